"""The simulator's `Comm`: tensors are handed over in memory, their cost is added to clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flockstep.backends.sim.compute import Stopwatch
from flockstep.backends.sim.group import Arrival, Channel, Message, SimGroup
from flockstep.backends.sim.saving import load_world, saved_world
from flockstep.backends.sim.scheduler import (
    TICKS_PER_SECOND,
    Scheduler,
    to_ticks,
)
from flockstep.backends.sim.shared import Home, SimShared
from flockstep.comm import (
    Background,
    Comm,
    Gathered,
    Meter,
    SharedTensor,
    reduce_in_rank_order,
    shared_form,
    signature,
)
from flockstep.errors import MismatchError
from flockstep.network import Network, costs


class SimComm(Comm):
    """A simulated worker's handle on its group."""

    def __init__(
        self,
        scheduler: Scheduler,
        groups: dict[str, SimGroup],
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
        self._groups = groups  # all of the run, by name
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

        if self._scheduler.ordered(self._slot, "looking at the run", apply):
            act()  # in the past; the caller has to see to it that twice is as good as once

    def watch_order(self, act: Callable[[], None]) -> None:
        self._slot.before_ordered = act

    @contextmanager
    def off_the_clock(self, is_done: bool = False) -> Iterator[None]:
        with self.unmetered(), self._stopwatch.paused():
            yield

    @contextmanager
    def in_background(self) -> Iterator[Background]:
        slot, background = self._slot, Background(comm=self)
        began = slot.clock
        slot.is_in_background = True
        # One call without length, of which those inside are parts: their time is not this worker's.
        with self.meter.call("in the background"):
            try:
                yield background
            finally:
                background.until, slot.clock, slot.is_in_background = slot.clock, began, False

    def _wait_for_background(self, until: int) -> None:
        with self.meter.call("wait for the background"):
            self._slot.clock = max(self._slot.clock, until)

    # --- what of this worker a checkpoint keeps ---------------------------------------------------

    def saved(self) -> dict[str, Any]:
        return {
            "clock": self._slot.clock,
            "steps": self._slot.steps,
            "meter": self.meter.saved(),
            "torch": torch.get_rng_state(),
            "jitter": self._stopwatch.random,
        }

    def saved_world(self) -> dict[str, Any] | None:
        with self.standing_still():
            return saved_world(self._scheduler, self._groups)

    def go_back(self, own: dict[str, Any], world: dict[str, Any] | None) -> None:
        self._slot.going_back = own, world

        def settle(_: list[Tensor]) -> list[Any]:
            load_world(self._scheduler, self._groups)
            return []

        with self.unmetered():
            self._collective("go back", torch.empty(0), settle, _free)
        self.meter.load(own["meter"])
        self._stopwatch.random = own["jitter"]

    @property
    def is_in_the_past(self) -> bool:
        return self._slot.journal.is_in_the_past

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        with self._scheduler.mutex:
            yield

    def keep_journal(self, is_on: bool) -> None:
        self._slot.journal.keep(is_on)

    # --- groups and shared tensors ----------------------------------------------------------------

    def split(self, color: int) -> SimComm:
        def settle(colors: list[Tensor]) -> list[dict[int, SimGroup]]:
            parent, groups = self._group, {}
            parent.splits += 1
            for each in sorted({int(value) for value in colors}):
                ranks = tuple(
                    world
                    for world, value in zip(parent.ranks, colors, strict=True)
                    if int(value) == each
                )
                name = f"{parent.name}{parent.splits}={each}/"
                groups[each] = SimGroup(ranks, self._network.between(ranks), name)
                self._groups[name] = groups[each]
            return [groups]

        with self.meter.call("split"):
            (groups,) = self._collective("split", torch.tensor(color), settle, _free)
        group = groups[color]
        rank = group.ranks.index(self._slot.rank)
        return SimComm(
            self._scheduler,
            self._groups,
            group,
            rank,
            self.seed,
            self._network,
            self._stopwatch,
            self.meter,
            self._put,
        )

    def _shared(self, name: str, like: Tensor, home: int | None) -> SharedTensor:
        def settle(values: list[Tensor]) -> list[Home]:
            homes = self._group.homes
            if name not in homes:
                identity = f"{self._group.name}{name}"
                homes[name] = Home(identity, values[0].clone(), self._group.link, self.size)
            return [homes[name]]

        call = f"shared({name!r}: {shared_form(like, home)})"
        (place,) = self._collective(call, like.detach(), settle, _free)
        return SimShared(name, place, self._scheduler, self._slot, self.rank, self.meter)

    # --- collectives ------------------------------------------------------------------------------

    def _collective(
        self,
        call: str,
        tensor: Tensor,
        settle: Callable[[list[Tensor]], list[Any]],
        seconds: Callable[[int], float],
    ) -> list[Any]:
        """Meet all members in `call`; the last to arrive runs `settle` on all tensors, for all
        of them.
        """
        heard: list[Any] = []
        if self.meter.paused:
            seconds = _free
        mine = Arrival(self._slot, call, tensor, settle, seconds, heard)
        self._scheduler.meet(self._slot, call, lambda: self._arrive(mine), heard)
        return heard

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
        for each in arrivals:
            each.heard.extend(outcome)
            each.slot.meter.sent(cost)
            # What is not counted takes no time, not even that of waiting for each other.
            self._scheduler.wake(each.slot, each.slot.clock if self.meter.paused else end)

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        def settle(parts: list[Tensor]) -> list[Tensor]:
            result = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
            reduce_in_rank_order(parts, op, out=result)
            return [result]

        call = f"all_reduce({op}) of {signature(tensor)}"
        link, size = self._group.link, self.size
        (result,) = self._collective(
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
        (result,) = self._collective(
            call,
            tensor,
            lambda parts: [parts[root].clone()],
            lambda nbytes: costs.broadcast_seconds(link, size, nbytes),
        )
        if self.rank != root:
            tensor.copy_(result)

    def _barrier(self) -> None:
        link, size = self._group.link, self.size
        self._collective(
            "barrier", torch.empty(0), lambda _: [], lambda _: costs.barrier_seconds(link, size)
        )

    # --- two workers ------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, peer: int) -> None:
        channel = self._group.channel(self.rank, peer)
        call = f"send to rank {self._group.ranks[peer]}"
        message = Message(self._slot, tensor, self._message_ticks(tensor, peer))

        def post() -> None:
            self._post(channel, message)
            self._deliver(channel)

        def wait() -> None:
            channel.next = message
            self._deliver(channel)

        if channel.on_its_way is None:  # and it stays so: nobody else sends here
            self._scheduler.go_on(self._slot, call, post)
        else:
            self._scheduler.meet(self._slot, call, wait)

    def _recv(self, tensor: Tensor, peer: int) -> None:
        channel = self._group.channel(peer, self.rank)

        def wait() -> None:
            channel.waiting = self._slot, tensor
            self._deliver(channel)

        call = f"recv from rank {self._group.ranks[peer]}"
        self._scheduler.meet(self._slot, call, wait, [tensor])

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

        self._scheduler.meet(slot, f"exchange with rank {group.ranks[peer]}", meet, [received])
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
