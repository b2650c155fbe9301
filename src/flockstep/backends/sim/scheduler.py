"""Who runs next: worker threads, one baton per lane, and virtual time.

Every worker is a thread. It runs until its next call to the comm, hands the call to the scheduler
and sleeps at its gate until the call has an outcome. There is no scheduler thread: whoever makes a
call runs `_advance` under the mutex, which opens the gates of those who may go on. Two kinds of
calls exist:

- *ordered* calls touch state that anybody may touch (shared tensors). They are applied strictly in
  the order of (virtual time, rank): a call waits until no other worker can still come before it. A
  worker that runs, or may run, can make no call earlier than its own clock, so its clock bounds
  what may be applied.
- *meeting* calls (collectives, messages) touch only the tensors of those who take part, all of whom
  sleep. They are settled as soon as the last of them arrives; the virtual time of the outcome
  follows from the clocks alone.

So the outcome depends on clocks and ranks, never on how threads were scheduled or how many lanes
there are. Time is counted in whole attoseconds: sums are exact, and ties are ties."""

from __future__ import annotations

import heapq
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flockstep.backends.base import describe_deadlock, source_line
from flockstep.backends.sim.journal import Entry, Journal
from flockstep.backends.sim.torch_states import LeftAlone, TorchStates
from flockstep.comm import Meter
from flockstep.errors import DeadlockError, FlockstepError

TICKS_PER_SECOND = 10**18


def to_ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_SECOND)


class Cancelled(BaseException):
    """Unwinds a worker's program when the run has failed elsewhere. Not an error of its own."""


@dataclass(eq=False)
class Slot:
    """What the scheduler knows of one worker."""

    rank: int
    clock: int = 0
    steps: int = 0
    state: str = "ready"  # ready | running | ordered | waiting | done
    call: str = "start"
    gate: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None
    is_in_background: bool = False  # its clock will go back to when that began
    is_interruptible: bool = True  # False when the thread is on its way out by itself
    # Runs in order before each ordered call of this worker has its effect.
    before_ordered: Callable[[], None] | None = None
    heard: list[Any] = field(default_factory=list)  # what its call brings, once it has its outcome
    journal: Journal = field(default_factory=Journal)
    going_back: Any = None  # what it has saved of itself, and rank 0 of what is between all
    meter: Meter = field(init=False, repr=False)  # told what a transfer costs; the rest is waiting

    def __post_init__(self) -> None:
        self.gate.acquire()
        self.meter = Meter(lambda: self.clock, TICKS_PER_SECOND, is_virtual=True)


class Scheduler:
    """Runs at most `lanes` workers at a time, in an order that virtual time alone decides."""

    def __init__(self, workers: int, lanes: int, streams: TorchStates | LeftAlone) -> None:
        self.slots = [Slot(rank) for rank in range(workers)]
        self.mutex = threading.RLock()
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self._lanes = lanes
        self.streams = streams
        self._running: set[Slot] = set()
        self._ready: list[tuple[int, int]] = []  # heap of (clock, rank)
        # Heap; at most one entry per worker.
        self._ordered: list[tuple[int, int, Callable[[], int | None]]] = []
        self._unfinished = workers
        self._is_closed = False

    # --- called by workers, on their own threads --------------------------------------------------

    def begin(self, slot: Slot) -> None:
        """Wait for the first turn."""
        self._sleep(slot)

    # `heard` is what the call brings to its caller: tensors that it will fill, or an empty list. A
    # call of a worker that goes on from a checkpoint may lie in the past: then it is told what it
    # heard then, nothing is done, and its journal's entry returned.

    def ordered(
        self,
        slot: Slot,
        call: str,
        apply: Callable[[], int | None],
        heard: list[Any] | None = None,
    ) -> Entry | None:
        """Have `apply` run when it is this call's turn. It returns when the caller may go on, in
        ticks, or None if somebody else will `wake` the caller."""
        heard = [] if heard is None else heard
        if slot.journal.is_in_the_past:
            return self._tell_again(slot, call, heard)
        with self.mutex:
            self._leave(slot, call, "ordered", heard)
            heapq.heappush(self._ordered, (slot.clock, slot.rank, apply))
            self._advance()
        self._sleep(slot)
        return None

    def meet(
        self, slot: Slot, call: str, arrive: Callable[[], None], heard: list[Any] | None = None
    ) -> None:
        """Run `arrive`, which wakes those who need wait no longer, the caller among them or not."""
        heard = [] if heard is None else heard
        if slot.journal.is_in_the_past:
            self._tell_again(slot, call, heard)
            return
        with self.mutex:
            self._leave(slot, call, "waiting", heard)
            arrive()
            self._advance()
        self._sleep(slot)

    def go_on(self, slot: Slot, call: str, act: Callable[[], None]) -> None:
        """Run `act`, which may wake others, without giving the baton away."""
        if slot.journal.is_in_the_past:
            self._tell_again(slot, call, [])
            return
        self.check()
        with self.mutex:
            act()
            slot.journal.write(call, slot.clock, slot.meter, [])
            self._advance()

    def _tell_again(self, slot: Slot, call: str, heard: list[Any]) -> Entry:
        self.check()
        entry = slot.journal.tell(slot.rank, call, slot.meter, heard)
        slot.clock = entry.clock
        return entry

    def elapse(self, slot: Slot, ticks: int, is_step: bool) -> None:
        """Move the worker's clock on. Others may now come before it."""
        self.check()
        slot.clock += ticks
        slot.steps += is_step
        if self._lanes == 1:
            return
        with self.mutex:
            if is_step and slot.steps == 1:
                self.streams.first_step_done(slot.rank)
                if all(other.steps or other.state == "done" for other in self.slots):
                    self.streams.open_lanes()
            self._advance()

    def end(self, slot: Slot, error: BaseException | None) -> None:
        """The worker's program has returned or raised."""
        with self.mutex:
            slot.is_interruptible = False
            if error is not None and not isinstance(error, Cancelled):
                self.fail(error)
            self._running.discard(slot)
            slot.state = "done"
            self._unfinished -= 1
            if self._unfinished == 0:
                self.finished.set()
            self._advance()

    def check(self) -> None:
        """Leave the program if the run has failed."""
        if self._is_closed:
            raise FlockstepError(
                "the launch of this comm has ended: a program cannot give its comm or shared "
                "tensors away"
            )
        if self.error is not None:
            raise Cancelled

    def close(self) -> None:
        """Nothing comes of calls any more: the run has ended."""
        self._is_closed = True

    # --- called under the mutex -------------------------------------------------------------------

    def wake(self, slot: Slot, ticks: int) -> None:
        """The call of `slot` has its outcome at time `ticks`."""
        slot.clock = ticks
        slot.state = "ready"
        slot.journal.write(slot.call, ticks, slot.meter, slot.heard)
        heapq.heappush(self._ready, (slot.clock, slot.rank))

    def fail(self, error: BaseException) -> None:
        """End the run: every sleeping worker wakes and unwinds. The first failure is the one
        that counts.
        """
        with self.mutex:
            if self.error is None:
                self.error = error
            self._ready.clear()
            self._ordered.clear()
            for slot in self.slots:
                if slot.state in ("ready", "ordered", "waiting"):
                    slot.is_interruptible = False
                    self._run(slot)

    def start(self) -> None:
        with self.mutex:
            for slot in self.slots:
                self.wake(slot, 0)
            self._advance()

    def _leave(self, slot: Slot, call: str, state: str, heard: list[Any]) -> None:
        self.check()
        slot.call = call
        slot.heard = heard
        slot.state = state
        self._running.discard(slot)
        self.streams.leave(slot.rank)

    def _sleep(self, slot: Slot) -> None:
        slot.gate.acquire()
        self.check()
        self.streams.enter(slot.rank)

    def _run(self, slot: Slot) -> None:
        slot.state = "running"
        self._running.add(slot)
        slot.gate.release()

    def _advance(self) -> None:
        """Apply every ordered call whose turn it is, fill the lanes, and notice when nobody can
        go on.
        """
        lanes = self._lanes if self.streams.lanes_are_open else 1
        while self.error is None:
            if self._ordered and self._is_first(self._ordered[0][:2]):
                _, rank, apply = heapq.heappop(self._ordered)
                slot = self.slots[rank]
                try:
                    if slot.before_ordered is not None:
                        slot.before_ordered()
                    ticks = apply()
                except FlockstepError as error:
                    self.fail(error)
                    return
                slot.state = "waiting"
                if ticks is not None:
                    self.wake(slot, ticks)
            elif self._ready and len(self._running) < lanes:
                self._run(self.slots[heapq.heappop(self._ready)[1]])
            else:
                break
        if self.error is None and not self._running and not self._ready and self._unfinished:
            self.fail(DeadlockError(self._describe_deadlock()))

    def _is_first(self, key: tuple[int, int]) -> bool:
        """Whether no worker that runs or is about to can still make an ordered call before
        `key`.
        """
        if self._ready and self._ready[0] < key:
            return False
        return all(key < (slot.clock, slot.rank) for slot in self._running)

    def _describe_deadlock(self) -> str:
        return describe_deadlock(
            [
                None if slot.state == "done" else f"{slot.call} at {self._line_of(slot)}"
                for slot in self.slots
            ]
        )

    def _line_of(self, slot: Slot) -> str:
        ident = slot.thread.ident if slot.thread else None
        return source_line(sys._current_frames().get(ident or 0))
