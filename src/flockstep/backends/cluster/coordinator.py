"""The one place that knows what every worker waits for. It runs in the launcher; tensors do not
pass through it.

Every worker has a control channel to it and says there what it is about to wait for: the others of
a collective, a message, a lock. The coordinator answers when it may go on. Since it knows all that
anybody waits for, a deadlock is a fact: no worker runs, and nothing that it could answer is left.
Since it sees a channel end when a process dies, it can let the others go on without it."""

from __future__ import annotations

import reprlib
import threading
import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from flockstep.backends.base import Hearer, describe_deadlock, lost_worker
from flockstep.backends.cluster.calls import Calls
from flockstep.backends.cluster.locks import Lock
from flockstep.backends.cluster.mailbox import Mailbox
from flockstep.backends.cluster.messages import FROM_WORKERS, require_schema
from flockstep.backends.cluster.values import encode_error
from flockstep.backends.cluster.wire import Connection, WireError
from flockstep.errors import DeadlockError, FlockstepError, WorkerLost

# RAISING: its program has raised; whoever started it will bring the error, however long that takes.
STARTING, RUNNING, WAITING, RAISING, HUNG_UP, ENDED, LOST = range(7)
# Between a channel's end and the loss of its worker: whoever started the worker may know how it
# ended, and why.
GRACE_SECONDS = 1.0
# Who watches a shared tensor has looked in vain this often since anybody else did anything: it
# would see no change.
VAIN_LOOKS = 2


MOST_BEATS = 100


@dataclass
class WorkerRecord:
    """What is known of one worker."""

    state: int = STARTING
    connection: Connection | None = None
    steps: int = 0
    waits_in: str = ""
    late_for: tuple[str, int] | None = None  # the call in which it waits without having asked
    # By group, the last call that it went through without asking.
    passed: dict[str, int] = field(default_factory=dict)
    # If it watches a shared tensor, how often it has looked since anything else happened.
    looks: int | None = None
    is_gone: bool = False  # its process has ended; its channel, with what it said last, ends soon
    gone_at: float = 0.0  # since when the channel or the process has ended
    beats: int = 0  # that it was told of since it last said something


class Coordinator:
    """Watches over the workers of one run. All methods may be called from any thread."""

    def __init__(self, workers: int, on_failure: str = "stop") -> None:
        self.failure: FlockstepError | None = None
        self.lost: dict[int, WorkerLost] = {}
        self.told: SimpleQueue[str] = SimpleQueue()  # by workers, for the launcher
        self._continues = on_failure == "continue"
        self._workers = [WorkerRecord() for _ in range(workers)]
        self._calls = Calls(self._answer, workers, must_report=self._continues)
        self._mailbox = Mailbox(self._answer)
        self._locks: dict[str, Lock] = {}
        self._began: float | None = None
        self._guard = threading.RLock()

    # --- for the launcher -------------------------------------------------------------------------

    @property
    def steps(self) -> list[int]:
        return [worker.steps for worker in self._workers]

    def hand_on(self, hear: Hearer | None) -> None:
        """Let `hear` hear what workers have told."""
        while hear is not None and not self.told.empty():
            hear(self.told.get())

    @property
    def is_over(self) -> bool:
        """All programs have ended or were lost."""
        return all(worker.state in (ENDED, LOST) for worker in self._workers)

    @property
    def seconds(self) -> float:
        """Since all workers were there."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def fail(self, error: FlockstepError) -> None:
        """Stop all workers because of `error`. The first failure counts."""
        with self._guard:
            if self.failure is not None:
                return
            self.failure = error
            for worker in self._workers:
                self._say(worker, {"stop": True})

    def declare_gone(self, rank: int) -> None:
        """The process of `rank` has ended without a result; what it said last may still be on
        its channel.
        """
        with self._guard:
            worker = self._workers[rank]
            worker.is_gone, worker.gone_at = True, time.monotonic()
            if worker.connection is None:
                self.declare_lost(rank)

    def declare_lost(
        self,
        rank: int,
        exit_code: int | None = None,
        step: int | None = None,
        frozen_seconds: float | None = None,
        with_launcher: bool = False,
    ) -> None:
        """The process of `rank` has ended without a result, or is given up as it does not move.
        What it says from now on does not count. Its launcher may be lost with it.
        """
        with self._guard:
            worker = self._workers[rank]
            if with_launcher and self._continues:
                for other in self._workers:
                    self._say(other, {"launcher_lost": rank})
            if rank in self.lost or self.failure is not None:
                return
            worker.state = LOST
            steps = worker.steps if step is None else step
            error = lost_worker(rank, exit_code, steps, self.seconds, frozen_seconds)
            self.lost[rank] = error
            self._say(worker, {"stop": True})  # for one that comes back to life
            if not self._continues or len(self.lost) == len(self._workers):
                self.fail(error)
                return
            self._stir()
            for other in self._workers:
                self._say(other, {"lost": encode_error(error)})
            self._mailbox.lose(rank)
            self._calls.lose(rank)
            for lock in self._locks.values():
                lock.lose(rank)
            self._look_for_deadlock()
            self._dismiss()

    def beat(self) -> None:
        """Let all workers know that this process lives."""
        with self._guard:
            for worker in self._workers:
                # Who computes for hours does not read: more of them would fill the wire.
                if worker.beats < MOST_BEATS:
                    worker.beats += 1
                    self._say(worker, {"beat": True})

    def tick(self) -> None:
        """Call now and then: workers whose channel or process ended some time ago are lost."""
        with self._guard:
            for rank, worker in enumerate(self._workers):
                has_ended = worker.is_gone or worker.state == HUNG_UP
                if has_ended and time.monotonic() - worker.gone_at > GRACE_SECONDS:
                    self.declare_lost(rank)

    # --- for the workers --------------------------------------------------------------------------

    def serve(self, connection: Connection, rank: int) -> None:
        """Serve one worker's channel until it ends."""
        with self._guard:
            if not 0 <= rank < len(self._workers) or self._workers[rank].state != STARTING:
                raise WireError(f"rank {rank} is not awaited")
            worker = self._workers[rank]
            worker.state, worker.connection = RUNNING, connection
            if self.failure is not None:
                self._say(worker, {"stop": True})
            for error in self.lost.values():
                self._say(worker, {"lost": encode_error(error)})
        try:
            while (said := connection.hear()) is not None:
                with self._guard:
                    self._handle(rank, worker, said)
        except OSError:
            pass  # its host is gone: as good as a channel that ended
        finally:
            with self._guard:
                worker.connection = None
                if worker.is_gone:
                    self.declare_lost(rank)
                elif worker.state not in (RAISING, ENDED, LOST):
                    worker.state, worker.gone_at = HUNG_UP, time.monotonic()

    def _handle(self, rank: int, worker: WorkerRecord, said: dict[str, Any]) -> None:
        require_schema(said, FROM_WORKERS)
        worker.beats = 0
        if worker.state == LOST:
            return
        self._require_sense(rank, worker, said)
        if said["do"] not in ("look", "steps", "tell"):
            self._stir()
        if "waits_in" in said:
            worker.state, worker.waits_in, worker.passed = WAITING, said["waits_in"], said["passed"]
            worker.late_for = (said["group"], said["seq"]) if said.get("late") else None
        match said["do"]:
            case "steps":
                worker.steps = said["steps"]
            case "tell":
                self.told.put(said["text"])
            case "join":
                self._calls.join(rank, said)
            case "moved":
                worker.state = RUNNING
                self._calls.forget(rank, said)
            case "report":
                self._calls.report(rank, said)
            case "send":
                self._mailbox.send(rank, said["peer"], said["group"], said["message"])
            case "receive":
                self._mailbox.receive(rank, said["peer"], said["group"])
            case "taken":
                self._mailbox.taken(rank, said["peer"], said["group"])
            case "lock":
                self._lock(rank, said).ask(rank, said["in_turn"])
            case "unlock":
                self._lock(rank, said).release(rank)
            case "retire":
                self._lock(rank, said).retire(rank)
            case "watch":
                worker.looks = 0
            case "look":
                worker.looks = (worker.looks or 0) + 1
            case "seen":
                worker.state, worker.looks = RUNNING, None
            case "began":
                self._began = self._began or time.monotonic()
            case "raise":
                worker.state = RAISING
            case "end":
                worker.state = ENDED
        if worker.state in (WAITING, ENDED):
            self._look_for_deadlock()
            self._dismiss()

    def _require_sense(self, rank: int, worker: WorkerRecord, said: dict[str, Any]) -> None:
        """Raise a `WireError` for what this worker cannot say now, or not about this group or
        peer.
        """
        answer_is_due = worker.state == ENDED or (worker.state == WAITING and "waits_in" in said)
        # Who was told to stop may ask for more while it unwinds.
        if answer_is_due and self.failure is None:
            raise WireError(f"rank {rank} goes on without an answer")
        group = self._calls.groups.get(said.get("group", "world"), ())
        if rank not in group:
            raise WireError(f"rank {rank} is in no group {reprlib.repr(said['group'])}")
        if "peer" in said and (said["peer"] not in group or said["peer"] == rank):
            raise WireError(f"rank {rank} has no peer {said['peer']} in group {said['group']!r}")

    def _dismiss(self) -> None:
        """Let all go when all programs have ended: before, somebody might still want what
        another has sent.
        """
        if self.is_over:
            for rank in range(len(self._workers)):
                self._answer(rank, {})

    def _answer(self, rank: int, reply: dict[str, Any]) -> None:
        """Let a waiting worker go on."""
        worker = self._workers[rank]
        if worker.state == WAITING:
            worker.state = RUNNING
        self._say(worker, {"answer": reply})

    def _say(self, worker: WorkerRecord, message: dict[str, Any]) -> None:
        if worker.connection is None:
            return
        try:
            worker.connection.say(message)
        except OSError:
            pass  # the thread that listens to this channel notices too, and does what is due

    def _lock(self, rank: int, said: dict[str, Any]) -> Lock:
        name = said["lock"]
        if name not in self._locks:
            lock = self._locks[name] = Lock(
                self._calls.groups[said["group"]], lambda rank: self._answer(rank, {})
            )
            for lost in self.lost.keys() & set(lock.members):
                lock.lose(lost)
        if rank not in self._locks[name].members:
            raise WireError(f"lock {reprlib.repr(name)} is one of a group without rank {rank}")
        return self._locks[name]

    def _stir(self) -> None:
        """Something has happened that those who watch a shared tensor may not have seen yet."""
        for worker in self._workers:
            worker.looks = worker.looks and 0

    def _passed(self, rank: int, group: str) -> int:
        return self._workers[rank].passed.get(group, 0)

    def _look_for_deadlock(self) -> None:
        states = [worker.state for worker in self._workers]
        waiting = [worker for worker in self._workers if worker.state == WAITING]
        if any(
            worker.late_for and self._calls.are_all_at(*worker.late_for, self._passed)
            for worker in waiting
        ):
            return  # their tensors are on the way
        if any(worker.looks is not None and worker.looks < VAIN_LOOKS for worker in waiting):
            return  # it may be about to see what it waits for
        if self.failure is None and waiting and set(states) <= {WAITING, ENDED, LOST}:
            waits = [
                worker.waits_in if worker.state == WAITING else None for worker in self._workers
            ]
            self.fail(DeadlockError(describe_deadlock(waits, lost=self.lost)))
