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

Ends of transfers that share links (`fair.py`) are events of the same order: when one ends depends
on those that begin meanwhile, so it is settled when no worker can begin any before.

So the outcome depends on clocks and ranks, never on how threads were scheduled or how many lanes
there are. Time is counted in whole attoseconds: sums are exact, and ties are ties.

Workers may die (`faults.py`). A death is an event in the order of ordered calls, before those of
the same time. Who has no more to do until then sleeps; when its time has come, others hear of it
(`losses.py`), and its program unwinds without an effect on anybody."""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flockstep.backends.base import describe_deadlock, source_line
from flockstep.backends.sim.journal import Entry, Journal
from flockstep.backends.sim.torch_states import LeftAlone, TorchStates
from flockstep.comm import Meter
from flockstep.errors import DeadlockError, FlockstepError, WorkerLost

if TYPE_CHECKING:
    from flockstep.backends.sim.fate import Fate

TICKS_PER_SECOND = 10**18

# What comes at the same time: first the ends of transfers, then calls by rank.
NOBODY = -1


def to_ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_SECOND)


class Cancelled(BaseException):
    """Unwinds a worker's program when the run has failed elsewhere, or the worker has died. Not an
    error of its own.
    """


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
    is_made_again: bool = False  # its ordered call had its turn before the run was saved
    heard: list[Any] = field(default_factory=list)  # what its call brings, once it has its outcome
    journal: Journal = field(default_factory=Journal)
    going_back: Any = None  # what it has saved of itself, and one of them of what is between all
    fate: Fate | None = None  # None: nothing befalls it
    death: int | None = None  # when it dies, as soon as that is known
    is_dying: bool = False  # it does nothing more, and sleeps until its death
    is_put_off: bool = False  # its death came when it was off the clock; it comes again
    loss: WorkerLost | None = None  # it is dead
    raises: WorkerLost | None = None  # what its call comes to in place of an outcome
    meter: Meter = field(init=False, repr=False)  # told what a transfer costs; the rest is waiting

    def __post_init__(self) -> None:
        self.gate.acquire()
        self.meter = Meter(lambda: self.clock, TICKS_PER_SECOND, is_virtual=True)

    def dies_by(self, ticks: int) -> bool:
        """Whether it is dead at that moment, if it lives until its death."""
        return self.death is not None and self.death <= ticks

    def takes_part(self, start: int) -> bool:
        """Whether it takes part in what it waits for and what begins at `start`. What is off the
        clock takes no time, not even that of waiting for each other.
        """
        return self.meter.paused or not self.dies_by(start)


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
        # Heap of (time, rank, number, call): at most one call per worker, whose number is 0, and
        # what belongs to transfers.
        self._ordered: list[tuple[int, int, int, Callable[[], int | None]]] = []
        self._numbers = itertools.count(1)
        self._deaths: list[tuple[int, int]] = []  # heap of (time, rank)
        self._unfinished = workers
        self._is_closed = False
        self.moment = 0  # of the last event, in ticks
        self.may_lose = False  # whether anybody may die
        self.lost: set[int] = set()  # the ranks of who has
        self.goes_on = False  # without those who are dead
        # Called when a worker has died, in this order, at its time.
        self.after_death: list[Callable[[Slot], None]] = []
        self._told_losses: list[Callable[[int], None]] = []

    # --- called by workers, on their own threads --------------------------------------------------

    def begin(self, slot: Slot) -> None:
        """Wait for the first turn."""
        self._sleep(slot)
        self.stand(slot)

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
            heapq.heappush(self._ordered, (slot.clock, slot.rank, 0, apply))
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
        self.check(slot)
        with self.mutex:
            act()
            slot.journal.write(call, slot.clock, slot.meter, [])
            is_dying = slot.dies_by(slot.clock) and not slot.is_in_background
            if is_dying:  # now, before anybody else may come: its clock is beyond its death
                self._lie_down(slot)
            self._advance()
        if is_dying:
            self._sleep(slot)
        self.stand(slot)

    def _tell_again(self, slot: Slot, call: str, heard: list[Any]) -> Entry:
        self.check(slot)
        entry = slot.journal.tell(slot.rank, call, slot.meter, heard)
        slot.clock = entry.clock
        if entry.lost is not None:
            raise loss_of(self.slots[entry.lost])
        return entry

    def elapse(self, slot: Slot, ticks: int, is_step: bool) -> None:
        """Move the worker's clock on. Others may now come before it."""
        self.check(slot)
        if slot.fate is None:
            slot.clock += ticks
            slot.steps += is_step
        else:
            self._compute(slot, slot.fate, ticks, is_step)
        if self._lanes == 1:
            return
        with self.mutex:
            if is_step and slot.steps == 1:
                self.streams.first_step_done(slot.rank)
                self._open_lanes()
            self._advance()

    def move_to(self, slot: Slot, ticks: int) -> None:
        """The worker, which runs, has waited until then for what travelled meanwhile."""
        later = max(slot.clock, ticks)
        if slot.fate is None or slot.is_in_background:
            slot.clock = later
        else:
            self._live_until(slot, later)
            self.stand(slot)

    def stand(self, slot: Slot) -> None:
        """The clock of a worker that runs was moved: it may be paused then, or die."""
        if slot.fate is not None and not slot.is_in_background:
            self._compute(slot, slot.fate, 0, is_step=False)

    def _compute(self, slot: Slot, fate: Fate, ticks: int, is_step: bool) -> None:
        """Move the clock on by as many ticks of computing, with pauses where they fall."""
        while (pause := fate.pause_within(slot.clock, slot.clock + ticks)) is not None:
            began, ended = max(slot.clock, pause[0]), pause[1]
            ticks -= began - slot.clock
            self._live_until(slot, began)
            with slot.meter.call("pause"):
                self._live_until(slot, ended)
        self._live_until(slot, slot.clock + ticks)
        if not is_step:
            return
        slot.steps += 1
        if slot.steps == fate.death_step:
            slot.death = slot.clock
            self._wait_for_death(slot)
        if slot.steps in fate.step_pauses:
            with slot.meter.call("pause"):
                self._live_until(slot, fate.awake_from(slot.clock + fate.step_pauses[slot.steps]))

    def _live_until(self, slot: Slot, ticks: int) -> None:
        if slot.dies_by(ticks):
            self._wait_for_death(slot)
        slot.clock = ticks

    def _wait_for_death(self, slot: Slot) -> None:
        """Sleep until then. This raises."""
        with self.mutex:
            self._lie_down(slot)
            self._advance()
        self._sleep(slot)

    def _lie_down(self, slot: Slot) -> None:
        self._leave(slot, "dying", "waiting", [])
        slot.is_dying = True
        self._expect(slot)

    def end(self, slot: Slot, error: BaseException | None) -> None:
        """The worker's program has returned or raised."""
        with self.mutex:
            slot.is_interruptible = False
            if slot.loss is not None:  # which was noted when it died
                return
            if error is not None and not isinstance(error, Cancelled):
                self.fail(error)
            self._running.discard(slot)
            slot.state = "done"
            self._unfinished -= 1
            if self._unfinished == 0:
                self.finished.set()
            self._advance()

    def check(self, slot: Slot) -> None:
        """Leave the program if the run has failed, or the worker has died."""
        if self._is_closed:
            raise FlockstepError(
                "the launch of this comm has ended: a program cannot give its comm or shared "
                "tensors away"
            )
        if self.error is not None or slot.loss is not None:
            raise Cancelled

    def close(self) -> None:
        """Nothing comes of calls any more: the run has ended."""
        self._is_closed = True

    # --- called under the mutex -------------------------------------------------------------------

    def wake(self, slot: Slot, ticks: int, lost: Slot | None = None) -> None:
        """The call of `slot` has its outcome at time `ticks`: what it has heard, or that another
        worker is `lost`. It need not be there to hear it.
        """
        if slot.loss is not None:
            return
        if slot.fate is not None and not slot.is_in_background:
            ticks = slot.fate.awake_from(ticks)
            if self.is_gone(slot, ticks):
                return
        slot.clock = ticks
        slot.state = "ready"
        slot.raises = None if lost is None else loss_of(lost)
        lost_rank = None if lost is None else lost.rank
        slot.journal.write(slot.call, ticks, slot.meter, slot.heard, lost_rank)
        heapq.heappush(self._ready, (slot.clock, slot.rank))

    def next_part(self, slot: Slot, ticks: int, call: str, heard: list[Any]) -> None:
        """The call of `slot` has done its part by time `ticks`, and goes on as `call`: what it has
        heard so far is written down, as the call need not be made again from its start.
        """
        slot.clock = ticks
        slot.journal.write(slot.call, ticks, slot.meter, slot.heard)
        slot.call = call
        slot.heard = heard

    def is_gone(self, slot: Slot, ticks: int) -> bool:
        """Whether a call of `slot` that would go on at `ticks` does not, as the worker is dead by
        then. It sleeps until its death.
        """
        if slot.loss is not None:
            return True
        if not slot.dies_by(ticks):
            return False
        slot.is_dying = True
        slot.state = "waiting"
        self._expect(slot)
        return True

    def queue(self, slot: Slot, apply: Callable[[], int | None]) -> None:
        """The call of `slot` goes on in order, at its clock: as `ordered`, of one that sleeps."""
        slot.state = "ordered"
        heapq.heappush(self._ordered, (slot.clock, slot.rank, 0, apply))

    def at(self, ticks: int, act: Callable[[], None], rank: int = NOBODY) -> None:
        """Have `act`, which is no call, run when nobody can do anything before `ticks` any more."""
        heapq.heappush(self._ordered, (ticks, rank, next(self._numbers), act))

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
                if slot.dies_by(0):
                    slot.is_dying = True
                    slot.state = "waiting"
                else:
                    slot.state = "ready"
                    heapq.heappush(self._ready, (slot.clock, slot.rank))
                self._expect(slot)
            self._advance()

    def tell_losses(self, act: Callable[[int], None]) -> None:
        """Have `act` run with the rank of each worker that dies, when it has, and of those that
        have died already. Whoever asks for the same is told once.
        """
        with self.mutex:
            if act in self._told_losses:
                return
            self._told_losses.append(act)
            self.after_death.append(lambda slot: act(slot.rank))
            for slot in self.slots:
                if slot.loss is not None:
                    act(slot.rank)

    def bury(self, slot: Slot, death: int, steps: int) -> None:
        """A worker that sleeps has died before the run was saved that goes on now."""
        slot.death, slot.clock, slot.steps = death, death, steps
        self._mark_dead(slot)
        for act in self._told_losses:
            act(slot.rank)

    def _leave(self, slot: Slot, call: str, state: str, heard: list[Any]) -> None:
        self.check(slot)
        if slot.is_put_off:
            self._expect(slot)
        slot.call = call
        slot.heard = heard
        slot.state = state
        self._running.discard(slot)
        self.streams.leave(slot.rank)

    def _sleep(self, slot: Slot) -> None:
        slot.gate.acquire()
        self.check(slot)
        self.streams.enter(slot.rank)
        if slot.raises is not None:
            raise slot.raises

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
            if self._deaths and self._is_first((self._deaths[0][0], NOBODY)):
                self._let_die(self.slots[heapq.heappop(self._deaths)[1]])
            elif self._ordered and self._is_first(self._ordered[0][:2]):
                self.moment, rank, number, apply = heapq.heappop(self._ordered)
                if number:
                    self._happen(apply)
                    continue
                slot = self.slots[rank]
                slot.state = "waiting"
                try:
                    if slot.before_ordered is not None and not slot.is_made_again:
                        slot.before_ordered()
                    slot.is_made_again = False
                    ticks = apply()
                except FlockstepError as error:
                    self.fail(error)
                    return
                if ticks is not None:
                    self.wake(slot, ticks)
            elif self._ready and len(self._running) < lanes:
                self._run(self.slots[heapq.heappop(self._ready)[1]])
            elif self._running or self._ready or not self._unfinished:
                return
            elif (late := self._first_put_off()) is not None:
                self._die(late)
            else:
                self.fail(DeadlockError(self._describe_deadlock()))

    def _happen(self, act: Callable[[], object]) -> None:
        """What is nobody's call ends the run if it fails, and not the program of whoever happens to
        be here.
        """
        try:
            act()
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def _is_first(self, key: tuple[int, int]) -> bool:
        """Whether no worker that runs or is about to can still make an ordered call before
        `key`, and none has made one.
        """
        if self._ready and self._ready[0] < key:
            return False
        if self._ordered and self._ordered[0][:2] < key:
            return False
        return all(key < (slot.clock, slot.rank) for slot in self._running)

    # --- deaths -----------------------------------------------------------------------------------

    def _expect(self, slot: Slot) -> None:
        """Its death, if one is known, is an event to come."""
        slot.is_put_off = False
        entry = slot.death, slot.rank
        if slot.death is not None and entry not in self._deaths:
            heapq.heappush(self._deaths, (slot.death, slot.rank))

    def _let_die(self, slot: Slot) -> None:
        """The time of its death has come. Who has ended before it lives."""
        if slot.state == "done":
            return
        # What is off the clock takes no time, not even that of waiting for each other; and who is
        # ahead of its clock, in the background, comes back to it.
        is_off_the_clock = slot.meter.paused or slot.state != "waiting"
        if is_off_the_clock and not slot.is_dying:
            slot.is_put_off = True
        else:
            self._die(slot)

    def _first_put_off(self) -> Slot | None:
        """Who dies first of those who wait beyond their death, off the clock."""
        late = [slot for slot in self.slots if slot.is_put_off and slot.state == "waiting"]
        return min(late, key=lambda slot: (slot.death or 0, slot.rank), default=None)

    def _die(self, slot: Slot) -> None:
        assert slot.death is not None
        slot.clock = slot.death
        self.moment = max(self.moment, slot.death)
        self._happen(lambda: self._leave_life(slot))

    def _leave_life(self, slot: Slot) -> None:
        if slot.before_ordered is not None:
            slot.before_ordered()
        self._mark_dead(slot)
        if not self.goes_on:
            self.fail(loss_of(slot))
            return
        for act in self.after_death:
            act(slot)

    def _mark_dead(self, slot: Slot) -> None:
        """From here on its program unwinds, and what it calls has no effect."""
        slot.loss = loss_of(slot)
        self.lost.add(slot.rank)
        slot.is_dying = slot.is_put_off = False
        slot.state = "done"
        slot.gate.release()
        self._unfinished -= 1
        if self._unfinished == 0:
            self.finished.set()
        self._open_lanes()

    def _open_lanes(self) -> None:
        """Let workers run side by side, once all have taken a step."""
        if self._lanes == 1 or self.streams.lanes_are_open:
            return
        if all(slot.steps or slot.state == "done" for slot in self.slots):
            self.streams.open_lanes()

    def _describe_deadlock(self) -> str:
        return describe_deadlock(
            [
                None if slot.state == "done" else f"{slot.call} at {self._line_of(slot)}"
                for slot in self.slots
            ],
            lost=[slot.rank for slot in self.slots if slot.loss is not None],
        )

    def _line_of(self, slot: Slot) -> str:
        ident = slot.thread.ident if slot.thread else None
        return source_line(sys._current_frames().get(ident or 0))


def loss_of(slot: Slot) -> WorkerLost:
    """The error for a worker whose death is known."""
    assert slot.death is not None
    seconds = slot.death / TICKS_PER_SECOND
    message = f"rank {slot.rank} died at {seconds:g} s of virtual time after step {slot.steps}"
    return WorkerLost(message, slot.rank, None, slot.steps, seconds)
