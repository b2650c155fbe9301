"""How launchers of several hosts end a run together: what they bring to rank 0, and what they
hear from it.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from flockstep.backends.cluster.coordinator import Coordinator
from flockstep.backends.cluster.messages import FROM_LAUNCHERS, require_schema
from flockstep.backends.cluster.values import (
    decode,
    decode_error,
    encode,
    encode_error,
)
from flockstep.backends.cluster.wire import (
    TENSOR,
    Connection,
    Header,
    WireError,
    raw,
)
from flockstep.backends.heartbeat import Watchdog
from flockstep.errors import FlockstepError, WorkerLost


class ResultCollector:
    """Rank 0's side. Every launcher says, on a connection of its own, how its worker ended."""

    def __init__(
        self, coordinator: Coordinator, workers: int, patience: float | None = None
    ) -> None:
        self._coordinator = coordinator
        self._workers = workers
        self._watchdog = Watchdog(patience)
        self._connections: dict[int, Connection] = {}
        self._results: dict[int, tuple[Any, list[Tensor]]] = {}
        self._told = False
        self._guard = threading.Lock()

    def serve(self, connection: Connection, rank: int) -> None:
        """Serve one launcher's connection until it ends."""
        with self._guard:
            if not 0 <= rank < self._workers or rank in self._connections:
                raise WireError(f"the launcher of rank {rank} is not awaited")
            self._connections[rank] = connection
        try:
            while (said := connection.hear()) is not None:
                require_schema(said, FROM_LAUNCHERS)
                match said["do"]:
                    case "result":
                        tensors = [_tensor(connection) for _ in range(said["tensors"])]
                        # What is no value is refused here, while its sender is known.
                        decode(said["tree"], tensors)
                        self._results[rank] = (said["tree"], tensors)
                    case "lost":
                        self._coordinator.declare_lost(
                            rank, said["exit_code"], said["step"], said["frozen_seconds"]
                        )
                    case "raised":
                        self._coordinator.fail(decode_error(said["error"]))
        except OSError:
            pass  # its host is gone: as good as a connection that ended
        finally:
            with self._guard:
                del self._connections[rank]
            if not self._told:
                self._coordinator.declare_lost(rank, with_launcher=True)

    def beat(self) -> None:
        """Let all launchers know that this process lives."""
        self._tell_all({"beat": True})

    def tick(self) -> None:
        """Call now and then: tell all launchers when the run is over, or why it has failed."""
        coordinator = self._coordinator
        self._look_for_frozen()
        coordinator.tick()
        ended = self._results.keys() | coordinator.lost.keys()
        if self._told or (coordinator.failure is None and len(ended) < self._workers):
            return
        self._told = True
        if coordinator.failure is not None:
            verdict: dict[str, Any] = {"failure": encode_error(coordinator.failure)}
        else:
            verdict = {"over": [encode_error(error) for error in coordinator.lost.values()]}
        self._tell_all(verdict)

    def _look_for_frozen(self) -> None:
        """Give launchers up that do not move: no host has anything to do with them any more."""
        for rank, seconds in self._watchdog.look(self._signs_of_life).items():
            self._coordinator.declare_lost(rank, frozen_seconds=seconds, with_launcher=True)
            error = self._coordinator.lost.get(rank)
            if error is not None:  # what it hears should it come back to life
                self._tell_all({"failure": encode_error(error)}, only=rank)
            self._tell_all({"gone": rank})

    def _signs_of_life(self) -> dict[int, int]:
        with self._guard:
            return {rank: each.arrived for rank, each in self._connections.items()}

    def _tell_all(self, message: dict[str, Any], only: int | None = None) -> None:
        with self._guard:
            connections = [each for rank, each in self._connections.items() if only in (None, rank)]
        for connection in connections:
            try:
                connection.say(message)
            except OSError:
                pass  # the thread that serves it notices, too

    @property
    def is_empty(self) -> bool:
        """All launchers have heard and left."""
        return not self._connections

    def results(self, own: Any) -> dict[int, Any]:
        """What the workers returned, by rank; modules and dataclasses are made like those in
        `own`.
        """
        return {rank: decode(tree, tensors, own) for rank, (tree, tensors) in self._results.items()}


def _tensor(connection: Connection) -> Tensor:
    header = connection.header()
    if header is None or header.kind != TENSOR:
        raise WireError("a tensor of a result is missing")
    return connection.tensor(header)


class LauncherChannel:
    """A launcher's side of its connection to rank 0. `patience` is that with rank 0.

    Where rank 0 cannot be told something any more, `look` says why."""

    def __init__(self, connection: Connection, rank: int, patience: float | None = None) -> None:
        self._connection = connection
        self._rank = rank
        self._watchdog = Watchdog(patience)
        self.is_over = False
        self.lost: list[WorkerLost] = []
        self.gone: set[int] = set()  # ranks whose launchers were given up
        self.is_hearing = False

    def be_patient(self, idle: Callable[[], None]) -> None:
        """Call `idle` now and then while rank 0 does not take what it is told."""
        self._connection.be_patient(idle)

    def beat(self) -> None:
        """Let rank 0 know that this process lives."""
        self._connection.say({"do": "beat"})

    def bring(self, value: Any) -> None:
        """Send what this rank's worker returned."""
        tensors: list[Tensor] = []
        try:
            tree = encode(value, tensors)
        except FlockstepError as error:
            raise FlockstepError(
                f"rank {self._rank} cannot send what its program returned: {error}"
            ) from error
        with suppress(OSError), self._connection.sending:
            self._connection.say({"do": "result", "tree": tree, "tensors": len(tensors)})
            for tensor in tensors:
                header = Header(
                    TENSOR,
                    self._connection.run,
                    dtype=tensor.dtype,
                    shape=tuple(tensor.shape),
                    length=tensor.nbytes,
                )
                self._connection.send(header, raw(tensor))

    def tell_lost(self, lost: WorkerLost) -> None:
        names = ("exit_code", "step", "frozen_seconds")
        self._tell({"do": "lost"} | {name: getattr(lost, name) for name in names})

    def tell_raised(self, error: BaseException) -> None:
        self._tell({"do": "raised", "error": encode_error(error)})

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            self._connection.say(message)

    def look(self, seconds: float) -> FlockstepError | None:
        """Listen for at most that long. The error, if the run has failed; `is_over` says that it
        has ended.
        """
        if self.is_over:
            return None
        if not select.select([self._connection.socket], [], [], seconds)[0]:
            return self._frozen()
        self.is_hearing = True
        try:
            message = self._connection.hear()
        except OSError:
            message = None
        finally:
            self.is_hearing = False
        if message is None:
            return WorkerLost("the launcher of rank 0 is gone", rank=0)
        match message:
            case {"beat": True}:
                return None
            case {"gone": int(rank)}:
                self.gone.add(rank)
                return None
            case {"failure": dict(said)}:
                return decode_error(said)
            case {"over": list(losses)} if all(isinstance(said, dict) for said in losses):
                errors = [decode_error(said) for said in losses]
                self.lost = [error for error in errors if isinstance(error, WorkerLost)]
                self.is_over = True
                return None
        raise WireError(
            f"rank 0 told rank {self._rank} neither that the run is over nor why it has failed"
        )

    def _frozen(self) -> WorkerLost | None:
        """What is to be said if rank 0 has given no sign of life for too long."""
        for seconds in self._watchdog.look(lambda: {0: self._connection.arrived}).values():
            message = f"the launcher of rank 0 has not moved for {seconds:.1f} s"
            return WorkerLost(message, rank=0, frozen_seconds=seconds)
        return None

    def close(self) -> None:
        self._connection.close()
