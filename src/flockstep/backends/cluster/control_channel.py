"""A worker's control channel to the coordinator: what it says, what it asks, and what it hears
meanwhile.
"""

from __future__ import annotations

import select
import sys
import time
from typing import Any

from flockstep import errors
from flockstep.backends.base import Stopped, source_line
from flockstep.backends.cluster.values import decode_error
from flockstep.backends.cluster.wire import Connection
from flockstep.backends.heartbeat import Watchdog
from flockstep.comm import Meter
from flockstep.errors import WorkerLost


class ControlChannel:
    """One worker's end. A worker that hears that the run is to stop unwinds (`Stopped`).

    `patience`: so many seconds without a sign of life of the coordinator, and it is given up."""

    def __init__(self, connection: Connection, rank: int, patience: float | None = None) -> None:
        self.rank = rank
        self.meter = Meter()
        self.lost: dict[int, WorkerLost] = {}
        self.lost_launchers: set[int] = set()
        # By group, the last call that this worker went through without asking.
        self.passed: dict[str, int] = {}
        self._connection = connection
        self._answers: list[dict[str, Any]] = []
        self._watchdog = Watchdog(patience)
        self._is_hearing = False
        connection.be_patient(self._while_waiting)

    def tell(self, do: str, **said: Any) -> None:
        """Say something that needs no answer."""
        try:
            self._connection.say({"do": do, **said})
        except OSError as error:
            raise self._cut_off() from error

    def ask(self, do: str, waits_in: str, **said: Any) -> dict[str, Any]:
        """Say what this worker waits in, and wait for the answer."""
        began = time.monotonic()
        self.tell_waiting(do, waits_in, **said)
        while not self._answers:
            self._hear()
        self.meter.waited(time.monotonic() - began)
        return self._take_answer()

    def tell_waiting(self, do: str, waits_in: str, **said: Any) -> None:
        """Say what this worker waits in."""
        self.tell(
            do,
            waits_in=f"{waits_in} at {source_line(sys._getframe(1))}",
            passed=self.passed,
            **said,
        )

    def _take_answer(self) -> dict[str, Any]:
        answer = self._answers.pop()
        if "error" in answer:
            raise self._error(answer)
        return answer

    def catch_up(self) -> None:
        """Take in what was said meanwhile, without waiting."""
        while select.select([self._connection.socket], [], [], 0)[0]:
            self._hear()
        if self._answers:
            self._take_answer()  # nothing was asked: this is an error

    def pause(self, seconds: float) -> None:
        """Listen for that long."""
        began = time.monotonic()
        select.select([self._connection.socket], [], [], seconds)
        self.meter.waited(time.monotonic() - began)
        self.catch_up()

    def await_loss(self, ranks: tuple[int, ...], seconds: float) -> WorkerLost | None:
        """The loss of one of `ranks`, waiting for that news if need be; None if it does not
        come.
        """
        deadline = time.monotonic() + seconds
        while not (gone := self.lost.keys() & set(ranks)):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._connection.socket], [], [], left)[0]:
                return None
            self._hear()
        return self.lost[min(gone)]

    def close(self) -> None:
        self._connection.close()

    def _hear(self) -> None:
        self._is_hearing = True
        try:
            message = self._connection.hear()
        except OSError as error:
            raise self._cut_off() from error
        finally:
            self._is_hearing = False
        if message is None:
            raise self._cut_off()
        if "answer" in message:
            self._answers.append(message["answer"])
        elif "lost" in message:
            loss = decode_error(message["lost"])
            if isinstance(loss, WorkerLost) and loss.rank is not None:
                self.lost[loss.rank] = loss
        elif "launcher_lost" in message:
            self.lost_launchers.add(message["launcher_lost"])
        elif "beat" not in message:
            raise Stopped

    def _while_waiting(self) -> None:
        """Give a coordinator up that gives no sign of life."""
        # Who waits to be heard has to listen, too, or would not see the signs.
        while not self._is_hearing and select.select([self._connection.socket], [], [], 0)[0]:
            self._hear()
        frozen = self._watchdog.look(lambda: {0: self._connection.arrived})
        for seconds in frozen.values():
            raise WorkerLost(
                f"the launcher of the run has not moved for {seconds:.1f} s", frozen_seconds=seconds
            )

    def _cut_off(self) -> WorkerLost:
        return WorkerLost(f"rank {self.rank} has lost the launcher of the run", self.rank)

    def _error(self, answer: dict[str, Any]) -> errors.FlockstepError:
        if answer["error"] == "WorkerLost":
            return self.lost[answer["lost"]]
        kind: type[errors.FlockstepError] = getattr(errors, answer["error"])
        return kind(answer["text"])
