"""Shared tensors in virtual time: one home, and a link to it that all transfers share."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from flockstep.backends.sim.fair import Stream
from flockstep.backends.sim.journal import Entry
from flockstep.backends.sim.scheduler import Scheduler, Slot
from flockstep.backends.sim.transfers import Transfers
from flockstep.codecs import Codec
from flockstep.comm import Meter, SharedTensor, add_decoded, read_changes_nbytes
from flockstep.errors import FlockstepError, MessageLost
from flockstep.network import Link


class Home:
    """Where a shared tensor lives. Touched only by ordered calls, which come in the order of (time,
    rank).

    Transfers that are under way at the same time share the link. A read sees the value as it is
    when it is asked for. A change lands when it arrives: who reads while it is under way still sees
    the old value, as on a real network."""

    def __init__(
        self,
        identity: str,
        value: Tensor,
        link: Link,
        members: int,
        transfers: Transfers,
        owner: int | None = None,
    ) -> None:
        self.identity = identity
        self.value = value
        self.changes = 0
        self.link = link
        self.transfers = transfers
        self.owner = owner  # the world's rank of the worker at which it lives
        self.own_link = transfers.home_link()
        self.holder: int | None = None
        self.queue: deque[tuple[int, Slot]] = deque()  # (rank, slot) of those who wait for the lock
        self.waiting_for_turn: dict[int, Slot] = {}
        self.turn = 0
        self.takes_turns = [True] * members
        # Told when a change has landed, in the order they came.
        self.watchers: list[Callable[[int], None]] = []

    def carry(
        self, rank: int, ticks: int, streams: list[Stream], done: Callable[[int], None]
    ) -> None:
        """Have streams travel to or from here, from now on; on a link of its own that is one."""
        if not any(stream.work for stream in streams):
            done(ticks + max(stream.delay for stream in streams))
        elif self.own_link is not None:
            (stream,) = streams
            self.own_link.carry(rank, ticks, stream, done)
        else:
            self.transfers.carry_to_home(rank, ticks, streams, done)

    def was_under_way(self, rank: int) -> bool:
        """Whether that worker had begun a transfer when the run was saved, and has not gone on with
        it yet.
        """
        if self.own_link is not None:
            return self.own_link.was_under_way(rank)
        return self.transfers.was_under_way(rank)

    def pass_turn(self) -> None:
        """The next member that still takes turns is to have the lock."""
        if any(self.takes_turns):
            self.turn = (self.turn + 1) % len(self.takes_turns)
            while not self.takes_turns[self.turn]:
                self.turn = (self.turn + 1) % len(self.takes_turns)

    def lose(self, rank: int) -> None:
        """A member is lost: it holds no lock any more, and has no turn."""
        self.takes_turns[rank] = False
        self.waiting_for_turn.pop(rank, None)
        self.queue = deque(each for each in self.queue if each[0] != rank)
        if self.holder == rank:
            self.holder = None
        if self.turn == rank:
            self.pass_turn()

    def grant(self, scheduler: Scheduler, ticks: int) -> None:
        """Give a free lock to the next in line, from `ticks` on."""
        if self.holder is None and (following := self.next_in_line()):
            self.holder, slot = following
            scheduler.wake(slot, max(slot.clock, ticks))

    def next_in_line(self) -> tuple[int, Slot] | None:
        """Who gets the lock when it is free: whose turn it is, or who has waited longest."""
        if self.turn in self.waiting_for_turn:
            return self.turn, self.waiting_for_turn.pop(self.turn)
        return self.queue.popleft() if self.queue else None


@dataclass(slots=True)
class _Part:
    """Of a call: what it does at the home, or what travels. Each has an entry in the journal."""

    call: str
    heard: list[Any]
    streams: Callable[[], list[Stream]] | None = None  # asked when its turn has come
    home: Home | None = None  # that these go to or come from
    act: Callable[[], None] | None = None


class SimShared(SharedTensor):
    """One worker's handle on a home."""

    lands_whole = True

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
        self._streams: dict[int, Stream] = {}  # by what each is: a request, an answer

    @property
    def identity(self) -> str:
        return self._home.identity

    def peek(self) -> Tensor:
        return self._home.value.clone()

    def known(self) -> list[Any]:
        return [self._known, self._changes, self._last_read]

    def know(self, known: list[Any]) -> None:
        self._known, self._changes, self._last_read = known

    def _read(self, out: Tensor) -> None:
        call = self._call("read")
        parts = [self._reading(call, out), *self._answer(call)]
        self._learn_again(self._perform(parts), reads=True, changes=False)

    def _read_changes(self, known: Tensor, is_first: bool) -> None:
        call, nbytes = self._call("read_changes"), torch.tensor(self._home.value.nbytes)
        is_counted = False

        def count() -> None:
            """As soon as it is known, or was in the past."""
            nonlocal is_counted
            if not is_counted:
                is_counted = True
                self._has_arrived(int(nbytes))

        def read() -> None:
            value = self._home.value
            if not is_first:
                nbytes.fill_(read_changes_nbytes(value, known))
            count()
            known.copy_(value)
            self._note(reads=True, changes=False)

        def answer() -> list[Stream]:
            count()
            stream, _ = self._message(self._way_back, 1, False, None, int(nbytes))
            return [stream]

        parts = [_Part(call, [known, nbytes], act=read)]
        if not (self.is_home or self.meter.paused):
            parts.append(_Part(f"{call}, on its way back", [], answer, self._home))
        self._learn_again(self._perform(parts), reads=True, changes=False)
        count()

    def _write(self, tensor: Tensor) -> None:
        def write() -> None:
            self._home.value.copy_(tensor)

        self._change("write", write)

    def _add(self, tensor: Tensor, scale: float) -> None:
        self._change("add", partial(self._add_now, tensor, scale))

    def _try_add(self, tensor: Tensor, scale: float) -> None:
        self._change("add", partial(self._add_now, tensor, scale), may_be_lost=True)

    def _add_now(self, tensor: Tensor, scale: float) -> None:
        self._home.value.add_(tensor.to(self._home.value), alpha=scale)

    def _add_encoded(
        self,
        codec: Codec,
        messages: Sequence[Tensor],
        scale: float,
        sent: Tensor,
        may_be_lost: bool = False,
    ) -> None:
        (message,) = messages

        def add() -> None:
            add_decoded(codec, message, self._home.value, scale)

        self._change("add", add, may_be_lost, message.nbytes)

    def _try_add_encoded(
        self, codec: Codec, messages: Sequence[Tensor], scale: float, sent: Tensor
    ) -> None:
        self._add_encoded(codec, messages, scale, sent, may_be_lost=True)

    def _blend(self, tensor: Tensor, weight: float, may_be_lost: bool = False) -> Tensor:
        before = torch.empty_like(tensor)

        def blend() -> None:
            value = self._home.value
            before.copy_(value)
            value.add_(tensor.to(value) - value, alpha=weight)

        call = self._call("blend")
        request, is_lost = self._request(call, may_be_lost)
        landing = self._landing(call, blend, is_lost, heard=[before], reads=True)
        answer, answer_is_lost = self._answer_to_request(call, may_be_lost, is_lost)
        past = self._perform([*request, landing, *answer])
        self._learn_again(past, reads=True, changes=True)
        if is_lost or answer_is_lost:
            raise MessageLost(f"rank {self._slot.rank}: the {call} was lost on its way")
        return before

    def _try_blend(self, tensor: Tensor, weight: float) -> Tensor:
        return self._blend(tensor, weight, may_be_lost=True)

    def _change(
        self,
        verb: str,
        act: Callable[[], object],
        may_be_lost: bool = False,
        nbytes: int | None = None,
    ) -> None:
        """Have `act` change the value when the transfer, of the whole value or of `nbytes`, has
        arrived.
        """
        call = self._call(verb)
        request, is_lost = self._request(call, may_be_lost, nbytes)
        past = self._perform([*request, self._landing(call, act, is_lost)])
        self._learn_again(past, reads=False, changes=True)

    @classmethod
    def _add_to_each(
        cls,
        tensors: Sequence[Self],
        tensor: Tensor,
        scale: float,
        codec: Codec | None,
        message: Tensor | None,
    ) -> None:
        """Messages leave one after the other, or together where links are shared; all land when the
        last has arrived.
        """
        self = tensors[0]  # of the same worker as all of them
        call = self._call("add_to_each")
        parts, landings, streams, latency = [], [], [], 0
        for place, each in enumerate(tensors):
            act = partial(each._add_now, tensor, scale)
            if codec is not None and message is not None:
                act = partial(add_decoded, codec, message, each._home.value, scale)
            landings.append(each._landing(f"{call}, landing at {each._home.owner}", act, False))
            if each.is_home or self.meter.paused:
                continue
            nbytes = tensor.nbytes if message is None else message.nbytes
            stream, _ = each._message(each._way_there, place, False, None, nbytes)
            streams.append(stream)
            latency = max(latency, stream.delay)
            leaving = replace(stream, delay=0)
            parts.append(_Part(f"{call}, leaving", [], partial(list, [leaving]), each._home))
        if self._home.own_link is None and streams:
            streams = self._home.transfers.together(self._slot.rank, streams)
            parts = [_Part(f"{call}, under way", [], lambda: streams, self._home)]
        elif latency:
            rest = [Stream(0, latency)]
            parts.append(_Part(f"{call}, under way", [], lambda: rest, self._home))
        past = self._perform([*parts, *landings])
        for each, entry in zip(tensors, past, strict=False):
            each._learn_again([entry], reads=False, changes=True)

    # --- the parts of a call ----------------------------------------------------------------------

    def _reading(self, call: str, out: Tensor) -> _Part:
        def read() -> None:
            out.copy_(self._home.value)
            self._note(reads=True, changes=False)

        return _Part(call, [out], act=read)

    def _landing(
        self,
        call: str,
        act: Callable[[], object],
        is_lost: bool,
        heard: list[Any] | None = None,
        reads: bool = False,
    ) -> _Part:
        def land() -> None:
            act()
            self._note(reads, changes=True)
            for watcher in [*self._home.watchers]:
                watcher(self._slot.clock)

        return _Part(call, heard or [], act=_nothing if is_lost else land)

    def _request(
        self, call: str, may_be_lost: bool, nbytes: int | None = None
    ) -> tuple[list[_Part], bool]:
        """What travels there, if anything does, and whether it is lost."""
        if self.is_home or self.meter.paused:
            return [], False
        stream, is_lost = self._message(self._way_there, 0, may_be_lost, None, nbytes)
        return self._travelling(f"{call}, under way", stream), is_lost

    def _answer(self, call: str) -> list[_Part]:
        """What travels back to who has asked; asking itself costs nothing."""
        if self.is_home or self.meter.paused:
            return []
        stream, _ = self._message(self._way_back, 1, False, None)
        return self._travelling(f"{call}, on its way back", stream)

    def _answer_to_request(
        self, call: str, may_be_lost: bool, is_unasked: bool
    ) -> tuple[list[_Part], bool]:
        """Who does not know that nobody has asked waits for as long as an answer takes alone."""
        if self.is_home or self.meter.paused:
            return [], False
        stream, is_lost = self._message(self._way_back, 2, may_be_lost, self._way_there)
        if is_unasked:
            stream = Stream(0, stream.work + stream.delay)
        return self._travelling(f"{call}, on its way back", stream), is_lost

    def _travelling(self, call: str, stream: Stream) -> list[_Part]:
        if not stream.work and not stream.delay:
            return []
        return [_Part(call, [], lambda: [stream], self._home)]

    def _message(
        self,
        way: Link,
        place: int,
        may_be_lost: bool,
        there: Link | None,
        nbytes: int | None = None,
    ) -> tuple[Stream, bool]:
        """That of the whole value is always the same where nothing is lost."""
        if nbytes is None and place in self._streams:
            return self._streams[place], False
        transfers = self._home.transfers
        stream, is_lost = transfers.message(
            self._slot,
            way,
            self._home.value.nbytes if nbytes is None else nbytes,
            place=place,
            may_be_lost=may_be_lost,
            there=there,
        )
        if nbytes is None and not transfers.network.loss:
            self._streams[place] = stream
        return stream, is_lost

    @functools.cached_property
    def _way_there(self) -> Link:
        home = self._home
        return home.transfers.to_home(self._slot.rank, home.owner, home.identity, home.link)

    @functools.cached_property
    def _way_back(self) -> Link:
        home = self._home
        return home.transfers.from_home(self._slot.rank, home.owner, home.identity, home.link)

    # --- calls of several parts -------------------------------------------------------------------

    def _perform(
        self, parts: list[_Part], first: Callable[[], int | None] | None = None
    ) -> list[Entry]:
        """Do one part after the other, each in its turn; the worker sleeps until all are done. Of a
        worker that goes on from a checkpoint some may lie in the past: return what the journal has
        of those that act.
        """
        past: list[Entry] = []
        for index, part in enumerate(parts):
            run = first if first and not index else partial(self._run, parts[index:])
            if part.home is not None:
                self._slot.is_made_again = part.home.was_under_way(self._slot.rank)
            entry = self._scheduler.ordered(self._slot, part.call, run, part.heard)
            if entry is None:  # it was done now, with all that follow
                return past
            if part.act is not None:
                past.append(entry)
        return past

    def _run(self, parts: list[_Part]) -> int | None:
        """It is the turn of the first of these parts."""
        part, rest, slot = parts[0], parts[1:], self._slot
        if part.act is not None:
            part.act()
            return self._go_on(rest, slot.clock)

        assert part.streams is not None and part.home is not None
        began = slot.clock

        def arrived(ticks: int) -> None:
            if self._scheduler.is_gone(slot, ticks):  # a dead worker's message does not arrive
                return
            slot.meter.sent(ticks - began)
            if not rest:
                self._scheduler.wake(slot, ticks)
                return
            self._scheduler.next_part(slot, ticks, rest[0].call, rest[0].heard)
            self._scheduler.queue(slot, partial(self._run, rest))

        part.home.carry(slot.rank, began, part.streams(), arrived)
        return None

    def _go_on(self, rest: list[_Part], ticks: int) -> int | None:
        """What has acted at `ticks` travels back now, if anything is left to do."""
        if not rest:
            return ticks
        self._scheduler.next_part(self._slot, ticks, rest[0].call, rest[0].heard)
        return self._run(rest)

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

    def _learn_again(self, past: list[Entry], reads: bool, changes: bool) -> None:
        """What a call that lies in the past has taught its caller."""
        for entry in past:
            if entry.changes is not None:
                self._learn(entry.changes, reads, changes)

    def _wait_until(self, holds: Callable[[Tensor], bool], out: Tensor) -> None:
        home, call = self._home, self._call("wait_until")
        answer = self._answer(call)

        def look() -> bool:
            if not holds(home.value):
                return False
            out.copy_(home.value)
            self._note(reads=True, changes=False)
            return True

        def watch(landed: int) -> None:
            if self._slot.loss is not None:
                home.watchers.remove(watch)
            elif look():
                home.watchers.remove(watch)
                ticks = self._go_on(answer, max(landed, self._slot.clock))
                if ticks is not None:
                    self._scheduler.wake(self._slot, ticks)

        def begin() -> int | None:
            if look():
                return self._go_on(answer, self._slot.clock)
            home.watchers.append(watch)
            return None

        parts = [_Part(call, [out], act=_nothing), *answer]
        self._learn_again(self._perform(parts, begin), reads=True, changes=False)

    def _lock(self, in_turn: bool) -> None:
        self._scheduler.ordered(self._slot, self._call("lock"), lambda: self._acquire(in_turn))

    def _unlock(self, in_turn: bool) -> None:
        # A worker that unwinds because the run has failed finds the scheduler closed; nobody waits
        # any more. That of one who has died is free.
        if self._scheduler.error is None and self._slot.loss is None:
            self._scheduler.ordered(
                self._slot, self._call("unlock"), lambda: self._release(in_turn)
            )

    def retire(self) -> None:
        def apply() -> int:
            home = self._home
            home.takes_turns[self._rank] = False
            if home.turn == self._rank:
                home.pass_turn()
                self._home.grant(self._scheduler, self._slot.clock)
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
        self._home.grant(self._scheduler, self._slot.clock)
        return self._slot.clock

    def _call(self, verb: str) -> str:
        if self._slot.is_in_background:  # calls come in the order of clocks, which must not go back
            raise FlockstepError(
                f"rank {self._slot.rank}: {verb} of shared {self.name!r} "
                "cannot be in the background"
            )
        return f"{verb} of shared {self.name!r}"


def _nothing() -> None:
    pass
