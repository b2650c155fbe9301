"""The simulator's `Comm`: tensors are handed over in memory, their cost is added to clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flockstep.backends.sim.compute import Stopwatch
from flockstep.backends.sim.scheduler import (
    TICKS_PER_SECOND,
    Scheduler,
    Slot,
    to_ticks,
)
from flockstep.backends.sim.shared import Home, SimShared
from flockstep.comm import (
    Comm,
    Gathered,
    Meter,
    SharedTensor,
    reduce_in_rank_order,
    shared_form,
    signature,
)
from flockstep.errors import MismatchError
from flockstep.network import Link, Network, costs


@dataclass(frozen=True)
class Arrival:
    """One worker's part in a collective: what it calls, with what, at what cost."""

    slot: Slot
    call: str
    tensor: Tensor
    settle: Callable[[list[Tensor]], Any]
    seconds: Callable[[int], float]


@dataclass(frozen=True)
class Message:
    """What a worker sends, and how long it takes to arrive."""

    slot: Slot
    tensor: Tensor
    ticks: int


@dataclass
class Channel:
    """The way from one worker of a group to another. One message may be on its way."""

    sender: int  # in the group, as the receiver
    receiver: int
    on_its_way: tuple[Tensor, int] | None = None  # with the time of its arrival
    taken_at: int = 0  # the message before
    next: Message | None = None  # of a sender that waits until the way is free
    waiting: tuple[Slot, Tensor] | None = None  # the receiver, and where the message goes


@dataclass
class SimGroup:
    """What the members of one comm share."""

    ranks: tuple[int, ...]  # in the world
    link: Link
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    outcomes: dict[int, Any] = field(default_factory=dict)
    channels: dict[tuple[int, int], Channel] = field(default_factory=dict)
    exchanges: dict[tuple[int, int], tuple[Slot, Tensor, Tensor]] = field(default_factory=dict)
    homes: dict[str, Home] = field(default_factory=dict)

    def channel(self, sender: int, receiver: int) -> Channel:
        """One and the same for both, whichever asks first: `setdefault` is done at once."""
        return self.channels.setdefault((sender, receiver), Channel(sender, receiver))


class SimComm(Comm):
    """A simulated worker's handle on its group."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: SimGroup,
        rank: int,
        seed: int,
        network: Network,
        stopwatch: Stopwatch,
        meter: Meter,
        tell: Callable[[str], None],
    ) -> None:
        self.rank = rank
        self.size = len(group.ranks)
        self.seed = seed
        self.meter = meter
        self._scheduler = scheduler
        self._group = group
        self._slot = scheduler.slots[group.ranks[rank]]
        self._network = network
        self._stopwatch = stopwatch
        self._put = tell

    def _tell(self, text: str) -> None:
        self._put(text)

    # --- time -------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._slot.clock / TICKS_PER_SECOND

    def start_stopwatch(self) -> None:
        self._stopwatch.start()

    def elapse(self, seconds: float | None = None, *, times: float = 1.0) -> None:
        self.meter.steps += seconds is None
        ticks = to_ticks(self._stopwatch.step_seconds(times) if seconds is None else seconds)
        self._scheduler.elapse(self._slot, ticks, is_step=seconds is None)
        if self._slot.before_ordered is not None:
            self.in_order(_nothing)  # until here the step was being computed

    def in_order(self, act: Callable[[], None]) -> None:
        def apply() -> int:
            act()
            return self._slot.clock

        self._scheduler.ordered(self._slot, "looking at the run", apply)

    def watch_order(self, act: Callable[[], None]) -> None:
        self._slot.before_ordered = act

    @contextmanager
    def off_the_clock(self, is_done: bool = False) -> Iterator[None]:
        with self.unmetered(), self._stopwatch.paused():
            yield

    @contextmanager
    def in_background(self) -> Iterator[Callable[[], None]]:
        slot, meter = self._slot, self.meter
        began = end = slot.clock
        slot.is_in_background = True

        def wait() -> None:
            with meter.call("wait for the background"):
                slot.clock = max(slot.clock, end)

        # One call without length, of which those inside are parts: their time is not this worker's.
        with meter.call("in the background"):
            try:
                yield wait
            finally:
                end, slot.clock, slot.is_in_background = slot.clock, began, False

    # --- groups and shared tensors ----------------------------------------------------------------

    def split(self, color: int) -> SimComm:
        def settle(colors: list[Tensor]) -> dict[int, SimGroup]:
            groups = {}
            for each in sorted({int(value) for value in colors}):
                ranks = tuple(
                    world
                    for world, value in zip(self._group.ranks, colors, strict=True)
                    if int(value) == each
                )
                groups[each] = SimGroup(ranks, self._network.between(ranks))
            return groups

        with self.meter.call("split"):
            group = self._collective("split", torch.tensor(color), settle, lambda _: 0.0)[color]
        rank = group.ranks.index(self._slot.rank)
        return SimComm(
            self._scheduler,
            group,
            rank,
            self.seed,
            self._network,
            self._stopwatch,
            self.meter,
            self._put,
        )

    def _shared(self, name: str, like: Tensor, home: int | None) -> SharedTensor:
        def settle(values: list[Tensor]) -> Home:
            homes = self._group.homes
            if name not in homes:
                homes[name] = Home(values[0].clone(), self._group.link, self.size)
            return homes[name]

        call = f"shared({name!r}: {shared_form(like, home)})"
        place = self._collective(call, like.detach(), settle, lambda _: 0.0)
        return SimShared(name, place, self._scheduler, self._slot, self.rank, self.meter)

    # --- collectives ------------------------------------------------------------------------------

    def _collective(
        self,
        call: str,
        tensor: Tensor,
        settle: Callable[[list[Tensor]], Any],
        seconds: Callable[[int], float],
    ) -> Any:
        """Meet all members in `call`; the last to arrive runs `settle` on all tensors, for all
        of them.
        """
        group, rank = self._group, self.rank
        if self.meter.paused:
            seconds = _free
        mine = Arrival(self._slot, call, tensor, settle, seconds)
        self._scheduler.meet(self._slot, call, lambda: self._arrive(mine))
        return group.outcomes.pop(rank)

    def _arrive(self, mine: Arrival) -> None:
        group = self._group
        for rank, other in group.arrivals.items():
            if other.call != mine.call:
                raise MismatchError(
                    f"rank {group.ranks[rank]} called {other.call}, "
                    f"rank {mine.slot.rank} called {mine.call}"
                )
        group.arrivals[self.rank] = mine
        if len(group.arrivals) < self.size:
            return
        arrivals = [group.arrivals[rank] for rank in range(self.size)]
        group.arrivals.clear()
        outcome = mine.settle([each.tensor for each in arrivals])
        largest = max(each.tensor.nbytes for each in arrivals)
        cost = to_ticks(mine.seconds(largest))
        end = max(each.slot.clock for each in arrivals) + cost
        for rank, each in enumerate(arrivals):
            group.outcomes[rank] = outcome
            each.slot.meter.sent(cost)
            # What is not counted takes no time, not even that of waiting for each other.
            self._scheduler.wake(each.slot, each.slot.clock if self.meter.paused else end)

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        def settle(parts: list[Tensor]) -> Tensor:
            result = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
            reduce_in_rank_order(parts, op, out=result)
            return result

        call = f"all_reduce({op}) of {signature(tensor)}"
        link, size = self._group.link, self.size
        result = self._collective(
            call, tensor, settle, lambda nbytes: costs.all_reduce_seconds(link, size, nbytes)
        )
        tensor.copy_(result)

    def _all_gather(self, tensor: Tensor) -> Gathered:
        call = f"all_gather of {tensor.dtype}"
        link, size = self._group.link, self.size
        parts = self._collective(
            call,
            tensor,
            lambda parts: [part.clone() for part in parts],
            lambda nbytes: costs.all_gather_seconds(link, size, nbytes),
        )
        return Gathered((part.clone() for part in parts), range(size))

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        call = f"broadcast from {root} of {signature(tensor)}"
        link, size = self._group.link, self.size
        result = self._collective(
            call,
            tensor,
            lambda parts: parts[root].clone(),
            lambda nbytes: costs.broadcast_seconds(link, size, nbytes),
        )
        if self.rank != root:
            tensor.copy_(result)

    def _barrier(self) -> None:
        link, size = self._group.link, self.size
        self._collective(
            "barrier", torch.empty(0), lambda _: None, lambda _: costs.barrier_seconds(link, size)
        )

    # --- two workers ------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, peer: int) -> None:
        channel = self._group.channel(self.rank, peer)
        message = Message(self._slot, tensor, self._message_ticks(tensor, peer))

        def post() -> None:
            self._post(channel, message)
            self._deliver(channel)

        def wait() -> None:
            channel.next = message
            self._deliver(channel)

        if channel.on_its_way is None:  # and it stays so: nobody else sends here
            self._scheduler.go_on(post)
        else:
            self._scheduler.meet(self._slot, f"send to rank {self._group.ranks[peer]}", wait)

    def _recv(self, tensor: Tensor, peer: int) -> None:
        channel = self._group.channel(peer, self.rank)

        def wait() -> None:
            channel.waiting = self._slot, tensor
            self._deliver(channel)

        self._scheduler.meet(self._slot, f"recv from rank {self._group.ranks[peer]}", wait)

    def _deliver(self, channel: Channel) -> None:
        """Hand a message over, if it is there and somebody waits for it; let the next go on its
        way.
        """
        self._hand_over(channel)
        if channel.on_its_way is None and channel.next is not None:
            message, channel.next = channel.next, None
            self._post(channel, message)
            self._scheduler.wake(message.slot, message.slot.clock)
            self._hand_over(channel)

    def _post(self, channel: Channel, message: Message) -> None:
        """The way is free since the message before was taken, whether or not its sender had to
        sleep until then.
        """
        slot = message.slot
        slot.meter.sent(message.ticks)
        if not slot.meter.paused:  # what is not counted takes no time, not even that of waiting
            slot.clock = max(slot.clock, channel.taken_at) + message.ticks
        channel.on_its_way = message.tensor.clone(), slot.clock

    def _hand_over(self, channel: Channel) -> None:
        if channel.on_its_way is None or channel.waiting is None:
            return
        (tensor, arrival), (slot, out) = channel.on_its_way, channel.waiting
        channel.on_its_way = channel.waiting = None
        self._require_alike(channel.sender, tensor, channel.receiver, out)
        out.copy_(tensor.reshape(out.shape))
        if slot.meter.paused:
            self._scheduler.wake(slot, slot.clock)
        else:
            channel.taken_at = max(slot.clock, arrival)
            self._scheduler.wake(slot, channel.taken_at)

    def _exchange(self, tensor: Tensor, peer: int) -> Tensor:
        group, slot = self._group, self._slot
        received = torch.empty_like(tensor)

        def meet() -> None:
            if (peer, self.rank) not in group.exchanges:
                group.exchanges[self.rank, peer] = (slot, tensor, received)
                return
            other, theirs, out = group.exchanges.pop((peer, self.rank))
            self._require_alike(peer, theirs, self.rank, tensor)
            out.copy_(tensor.reshape(out.shape))
            received.copy_(theirs.reshape(received.shape))
            cost = self._message_ticks(tensor, peer)
            end = max(slot.clock, other.clock) + cost
            for each in (slot, other):
                each.meter.sent(cost)
                # What is not counted takes no time, not even that of waiting for each other.
                self._scheduler.wake(each, each.clock if each.meter.paused else end)

        self._scheduler.meet(slot, f"exchange with rank {group.ranks[peer]}", meet)
        return received

    def _message_ticks(self, tensor: Tensor, peer: int) -> int:
        if self.meter.paused:
            return 0
        link = self._network.between((self._slot.rank, self._group.ranks[peer]))
        return to_ticks(costs.message_seconds(link, tensor.nbytes))

    def _in_world(self, rank: int) -> int:
        return self._group.ranks[rank]

    def _require_alike(self, sender: int, sent: Tensor, receiver: int, expected: Tensor) -> None:
        if signature(sent) != signature(expected):
            ranks = self._group.ranks
            raise MismatchError(
                f"rank {ranks[sender]} sent {signature(sent)}, "
                f"rank {ranks[receiver]} expected {signature(expected)}"
            )


def _free(_: int) -> float:
    return 0.0


def _nothing() -> None:
    pass
