"""What a worker has put on the wire, what its calls took, and how old its updates were."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from flockstep.comm.trace import SENDING, WAITING, Trace

FIGURES = (
    "bytes_sent", "exchanges", "steps", "ticks_waiting", "ticks_sending", "staleness_sum",
    "staleness_max", "staleness_count",
)  # fmt: skip
OF_LAST_CALL = ("ended", "took", "waiting")
EXACT_STALENESS = 64  # below it every staleness has a place of its own in the histogram
NOT_TIMED: AbstractContextManager[None] = nullcontext()


@dataclass(slots=True)
class Meter:
    """What one worker has exchanged with the others. All its comms share one.

    `exchanges` counts calls that moved a tensor. The time of a call is split into *waiting* (for
    other workers to arrive, to take a message, for a lock or a turn, for a link to be free) and
    *sending* (moving the bytes). What is left of the run's time is computing.

    - In the simulator both are exact: sending is the cost of the transfer, waiting the rest. The
      cost of a message is its sender's; who receives it waits.
    - On local processes waiting is the time that a worker sleeps, sending the rest of the call.
    - Under torchrun and on Ray waiting is agreement with the coordinator, locks and pauses, sending
      the rest. Inside a transfer gloo does not tell waiting for a peer from moving its bytes: what
      a call that repeats the one before waits for a late worker counts as sending.

    Staleness of an update: how many changes by others a shared tensor had seen since this worker
    last read it, when the worker changed it. `staleness_counts` says how many updates had which,
    by the places of `staleness_place`.

    Nothing is counted while `paused`.
    """

    clock: Callable[[], float] = time.monotonic  # that of the run, in ticks
    ticks_per_second: int = 1
    is_virtual: bool = False  # whether the clock is the simulator's
    bytes_sent: int = 0
    exchanges: int = 0
    steps: int = 0
    ticks_waiting: float = 0  # whole numbers in the simulator, so that sums are exact
    ticks_sending: float = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    staleness_count: int = 0
    staleness_counts: list[int] = field(default_factory=list)
    paused: bool = False
    _trace: Trace | None = field(default=None, init=False, repr=False)
    _call: _Call = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._call = _Call(self)

    @property
    def seconds_waiting(self) -> float:
        return self.ticks_waiting / self.ticks_per_second

    @property
    def seconds_sending(self) -> float:
        return self.ticks_sending / self.ticks_per_second

    def count(self, nbytes: int) -> None:
        """A tensor is moved: so many bytes on behalf of this worker."""
        if not self.paused:
            self.bytes_sent += nbytes
            self.exchanges += 1

    def before_call(self) -> tuple[int, int]:
        """The bytes and exchanges that were counted before the call that is under way, if one is
        that has sent nothing yet.

        A call is counted when it is made, but has no effect before its turn comes.
        """
        call = self._call
        if call.is_open and not call.sent:
            return call.bytes_before, call.exchanges_before
        return self.bytes_sent, self.exchanges

    def seconds_until(self, seconds: float) -> tuple[float, float]:
        """How long this worker had waited and sent at a moment that is not before its last call
        but one. As in the trace, a call waits first, and then sends; who has not come so far waits
        until then. In whole ticks, so that it is the same whichever call was the last.
        """
        call, second = self._call, self.ticks_per_second
        moment = round(seconds * second)
        if call.is_open and call.began < moment:
            waiting, sending = call.until(moment)
            return (self.ticks_waiting + waiting) / second, (self.ticks_sending + sending) / second
        beyond = min(max(0, call.ended - moment), call.took)
        sending = min(beyond, call.took - call.waiting)
        waiting = beyond - sending - max(0, moment - self.clock())
        return (self.ticks_waiting - waiting) / second, (self.ticks_sending - sending) / second

    def call(self, name: str, peer: int = -1, of: str = "") -> AbstractContextManager[None]:
        """A call to the others, inside a `with`: its time is counted. One inside another is part
        of it. `peer` is a rank of the world, `of` the name of a shared tensor.
        """
        call = self._call
        if self.paused or call.is_open:
            return NOT_TIMED
        call.name = name
        call.of = of
        call.peer = peer
        return call

    def waited(self, ticks: float) -> None:
        """Backends say here how much of the call was waiting; the rest was sending."""
        self._call.waited += ticks

    def sent(self, ticks: float) -> None:
        """The simulator says what the call's transfer costs; the rest was waiting."""
        self._call.sent += ticks

    def sent_again(self, nbytes: int) -> None:
        """Bytes of the call that were lost and are sent once more."""
        if not self.paused:
            self.bytes_sent += nbytes
            self._call.again += nbytes

    @property
    def again_in_call(self) -> int:
        """What `sent_again` was told since the call began."""
        return self._call.again

    @property
    def sent_in_call(self) -> float:
        """What `sent` was told since the call began."""
        return self._call.sent

    @sent_in_call.setter
    def sent_in_call(self, ticks: float) -> None:
        self._call.sent = ticks

    def count_staleness(self, changes: int) -> None:
        """An update of a value that others have changed so often since this worker read it."""
        if not self.paused:
            self.staleness_sum += changes
            self.staleness_count += 1
            self.staleness_max = max(self.staleness_max, changes)

            place, counts = staleness_place(changes), self.staleness_counts
            counts.extend([0] * (place + 1 - len(counts)))
            counts[place] += 1

    # --- saving -----------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """All figures, between two calls."""
        of_last_call = {name: getattr(self._call, name) for name in OF_LAST_CALL}
        figures = {name: getattr(self, name) for name in FIGURES}
        return figures | of_last_call | {"staleness_counts": [*self.staleness_counts]}

    def load(self, saved: Mapping[str, Any]) -> None:
        for name in FIGURES:
            setattr(self, name, saved[name])
        # Checkpoints of older versions do not have them.
        self.staleness_counts = [*saved.get("staleness_counts", ())]
        for name in OF_LAST_CALL:
            setattr(self._call, name, saved[name])

    # --- tracing ----------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace | None:
        """What records each call with its times; None, as it is at first: nothing does."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = trace
        if trace is not None:
            trace.begin(self._seconds, self.is_virtual)

    def _seconds(self) -> float:
        return self.clock() / self.ticks_per_second


def staleness_place(staleness: int) -> int:
    """Where a staleness is counted in a histogram: below 64 in a place of its own; from there on
    64 … 127 share a place, 128 … 255 the next, and so on.
    """
    if staleness < EXACT_STALENESS:
        return staleness
    return EXACT_STALENESS + staleness.bit_length() - EXACT_STALENESS.bit_length()


def staleness_from(place: int) -> int:
    """The least staleness that is counted in that place."""
    return place if place < EXACT_STALENESS else EXACT_STALENESS << (place - EXACT_STALENESS)


class _Call:
    """The call that a worker is in. There is one at a time, so the same object serves them all."""

    __slots__ = (
        "again", "began", "bytes_before", "ended", "exchanges_before", "is_open", "meter", "name",
        "of", "peer", "sent", "took", "waited", "waiting",
    )  # fmt: skip

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.is_open = False
        self.name = ""
        self.of = ""
        self.peer = -1
        self.bytes_before = 0
        self.exchanges_before = 0
        self.began: float = 0
        # Of the one before, until this one ends:
        self.ended: float = 0
        self.took: float = 0
        self.waiting: float = 0
        self.waited: float = 0
        self.sent: float = 0
        self.again = 0

    def __enter__(self) -> None:
        meter = self.meter
        self.is_open = True
        self.waited = 0
        self.sent = 0
        self.again = 0
        self.bytes_before = meter.bytes_sent
        self.exchanges_before = meter.exchanges
        self.began = meter.clock()

    def __exit__(self, *exception: object) -> None:
        meter = self.meter
        self.is_open = False
        self.again = 0
        self.ended = meter.clock()
        self.took = took = self.ended - self.began
        # What travels in the background takes no time of the call that sent it off: not below zero.
        waiting = max(0, took - self.sent) if meter.is_virtual else min(self.waited, took)
        self.waiting = waiting
        meter.ticks_waiting += waiting
        meter.ticks_sending += took - waiting
        if meter._trace is not None:
            self._record(meter._trace, waiting, took)

    def until(self, moment: float) -> tuple[float, float]:
        """How long this call, which is under way, had waited and sent at a moment since it began.
        Who has not come so far waits until then.
        """
        now = self.meter.clock()
        sending = max(0, min(moment, now) - (now - self.sent))
        return moment - self.began - sending, sending

    def _record(self, trace: Trace, waiting: float, took: float) -> None:
        """Waiting is shown before sending, although a call may wait in its middle."""
        meter, second = self.meter, self.meter.ticks_per_second
        began, middle = self.began / second, (self.began + waiting) / second
        end = (self.began + took) / second
        nbytes = meter.bytes_sent - self.bytes_before
        name = f"{self.name} {self.of}" if self.of else self.name
        trace.computed(began, meter.steps)
        if waiting:
            trace.add(WAITING, name, began, middle, 0, self.peer, meter.steps)
        if took > waiting or nbytes:
            trace.add(SENDING, name, middle, end, nbytes, self.peer, meter.steps)
        trace.computing_since = end
