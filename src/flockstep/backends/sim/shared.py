"""Shared tensors in virtual time: one home, one link to it, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from flockstep.backends.sim.journal import Entry
from flockstep.backends.sim.scheduler import Scheduler, Slot, to_ticks
from flockstep.comm import Meter, SharedTensor
from flockstep.errors import FlockstepError
from flockstep.network import Link, costs


class Home:
    """Where a shared tensor lives. Touched only by ordered calls, which come in the order of (time,
    rank).

    The link carries one transfer at a time, in the order of asking; a transfer that finds it busy
    waits. A read sees the value as it is when it is asked for. A change lands when it arrives: who
    reads while it is under way still sees the old value, as on a real network."""

    def __init__(self, identity: str, value: Tensor, link: Link, members: int) -> None:
        self.identity = identity
        self.value = value
        self.changes = 0
        self.link = link
        self.link_is_free_at = 0
        self.holder: int | None = None
        self.queue: deque[tuple[int, Slot]] = deque()  # (rank, slot) of those who wait for the lock
        self.waiting_for_turn: dict[int, Slot] = {}
        self.turn = 0
        self.takes_turns = [True] * members
        # Told when a change has landed, in the order they came.
        self.watchers: list[Callable[[int], None]] = []

    def transfer(self, ticks: int, cost: int) -> int:
        """Use the link from `ticks` on, or from when it is free; return when the transfer ends."""
        self.link_is_free_at = max(ticks, self.link_is_free_at) + cost
        return self.link_is_free_at

    def pass_turn(self) -> None:
        """The next member that still takes turns is to have the lock."""
        if any(self.takes_turns):
            self.turn = (self.turn + 1) % len(self.takes_turns)
            while not self.takes_turns[self.turn]:
                self.turn = (self.turn + 1) % len(self.takes_turns)

    def next_in_line(self) -> tuple[int, Slot] | None:
        """Who gets the lock when it is free: whose turn it is, or who has waited longest."""
        if self.turn in self.waiting_for_turn:
            return self.turn, self.waiting_for_turn.pop(self.turn)
        return self.queue.popleft() if self.queue else None


class SimShared(SharedTensor):
    """One worker's handle on a home."""

    def __init__(
        self, name: str, home: Home, scheduler: Scheduler, slot: Slot, rank: int, meter: Meter
    ) -> None:
        self.name = name
        self.shape = home.value.shape
        self.dtype = home.value.dtype
        self.meter = meter
        self._home = home
        self._scheduler = scheduler
        self._slot = slot
        self._rank = rank
        self._changes = 0  # by this worker, of those that the home counts

    @property
    def identity(self) -> str:
        return self._home.identity

    def peek(self) -> Tensor:
        return self._home.value.clone()

    def known(self) -> list[int]:
        return [self._known, self._changes]

    def know(self, known: list[int]) -> None:
        self._known, self._changes = known

    def _read(self, out: Tensor) -> None:
        def apply() -> int:
            out.copy_(self._home.value)
            self._note(reads=True, changes=False)
            return self._transferred(self._slot.clock, costs.message_seconds)

        past = self._scheduler.ordered(self._slot, self._call("read"), apply, [out])
        self._learn_again(past, reads=True, changes=False)

    def _write(self, tensor: Tensor) -> None:
        def write() -> None:
            self._home.value.copy_(tensor)

        self._change("write", write, costs.message_seconds, arrives=1.0)

    def _add(self, tensor: Tensor, scale: float) -> None:
        def add() -> None:
            self._home.value.add_(tensor.to(self._home.value), alpha=scale)

        self._change("add", add, costs.message_seconds, arrives=1.0)

    def _blend(self, tensor: Tensor, weight: float) -> Tensor:
        before = torch.empty_like(tensor)

        def blend() -> None:
            value = self._home.value
            before.copy_(value)
            value.add_(tensor.to(value) - value, alpha=weight)

        # There and back.
        self._change("blend", blend, costs.blend_seconds, arrives=0.5, heard=[before], reads=True)
        return before

    def _change(
        self,
        verb: str,
        act: Callable[[], object],
        seconds: Callable[[Link, float], float],
        *,
        arrives: float,
        heard: list[Tensor] | None = None,
        reads: bool = False,
    ) -> None:
        """Have `act` change the value after the part `arrives` of the time that the transfer
        takes.
        """
        call, home, meter, slot = self._call(verb), self._home, self.meter, self._slot
        cost = to_ticks(self._seconds(seconds))
        there = round(cost * arrives)
        back = cost - there

        def depart() -> int:
            meter.sent(there)
            return home.transfer(slot.clock, cost) - back

        def land() -> int:
            act()
            self._note(reads, changes=True)
            for watcher in [*home.watchers]:
                watcher(slot.clock)
            meter.sent(back)
            return slot.clock + back

        if cost:  # else it lands at once
            self._scheduler.ordered(slot, f"{call}, under way", depart)
        past = self._scheduler.ordered(slot, call, land, heard)
        self._learn_again(past, reads, changes=True)

    def _note(self, reads: bool, changes: bool) -> None:
        """Count a change, and what this worker knows of those by others."""
        if not self.counts_staleness:
            return
        by_others = self._home.changes - self._changes
        self._home.changes += changes
        self._slot.journal.changes = by_others
        self._learn(by_others, reads, changes)

    def _learn(self, by_others: int, reads: bool, changes: bool) -> None:
        if changes:
            self._has_changed(by_others)
            self._changes += 1
        if reads:
            self._has_read(by_others)

    def _learn_again(self, past: Entry | None, reads: bool, changes: bool) -> None:
        """What a call that lies in the past has taught its caller."""
        if past is not None and past.changes is not None:
            self._learn(past.changes, reads, changes)

    def _transferred(self, ticks: int, seconds: Callable[[Link, float], float]) -> int:
        """When a transfer ends that is asked for at `ticks`. Nothing travels to the worker at
        which the value lives.
        """
        cost = to_ticks(self._seconds(seconds))
        if not cost:
            return ticks
        self.meter.sent(cost)
        return self._home.transfer(ticks, cost)

    def _seconds(self, seconds: Callable[[Link, float], float]) -> float:
        """What a transfer costs this worker."""
        if self.meter.paused or self.is_home:
            return 0.0
        return seconds(self._home.link, self._home.value.nbytes)

    def _wait_until(self, holds: Callable[[Tensor], bool], out: Tensor) -> None:
        home = self._home

        def look() -> bool:
            if not holds(home.value):
                return False
            out.copy_(home.value)
            self._note(reads=True, changes=False)
            return True

        def watch(landed: int) -> None:
            if look():
                home.watchers.remove(watch)
                asked = max(landed, self._slot.clock)
                self._scheduler.wake(self._slot, self._transferred(asked, costs.message_seconds))

        def apply() -> int | None:
            if look():
                return self._transferred(self._slot.clock, costs.message_seconds)
            home.watchers.append(watch)
            return None

        past = self._scheduler.ordered(self._slot, self._call("wait_until"), apply, [out])
        self._learn_again(past, reads=True, changes=False)

    def _lock(self, in_turn: bool) -> None:
        self._scheduler.ordered(self._slot, self._call("lock"), lambda: self._acquire(in_turn))

    def _unlock(self, in_turn: bool) -> None:
        # A worker that unwinds because the run has failed finds the scheduler closed; nobody waits
        # any more.
        if self._scheduler.error is None:
            self._scheduler.ordered(
                self._slot, self._call("unlock"), lambda: self._release(in_turn)
            )

    def retire(self) -> None:
        def apply() -> int:
            home = self._home
            home.takes_turns[self._rank] = False
            if home.turn == self._rank:
                home.pass_turn()
                self._grant()
            return self._slot.clock

        self._scheduler.ordered(self._slot, self._call("retire"), apply)

    def _acquire(self, in_turn: bool) -> int | None:
        home = self._home
        if home.holder is None and (not in_turn or home.turn == self._rank):
            home.holder = self._rank
            return self._slot.clock
        if in_turn:
            home.waiting_for_turn[self._rank] = self._slot
        else:
            home.queue.append((self._rank, self._slot))
        return None

    def _release(self, in_turn: bool) -> int:
        self._home.holder = None
        if in_turn:
            self._home.pass_turn()
        self._grant()
        return self._slot.clock

    def _grant(self) -> None:
        """Give a free lock to the next in line, from now on."""
        home = self._home
        if home.holder is None and (following := home.next_in_line()):
            home.holder, slot = following
            self._scheduler.wake(slot, max(slot.clock, self._slot.clock))

    def _call(self, verb: str) -> str:
        if self._slot.is_in_background:  # calls come in the order of clocks, which must not go back
            raise FlockstepError(
                f"rank {self._slot.rank}: {verb} of shared {self.name!r} "
                "cannot be in the background"
            )
        return f"{verb} of shared {self.name!r}"
