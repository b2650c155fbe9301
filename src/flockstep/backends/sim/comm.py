"""The simulator's `Comm`: tensors are handed over in memory, their cost is added to clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flockstep.backends.sim.compute import Stopwatch
from flockstep.backends.sim.fair import Stream
from flockstep.backends.sim.group import (
    Arrival,
    Channel,
    Message,
    Offer,
    Receiver,
    Sent,
    SimGroup,
    settle_if_all_came,
)
from flockstep.backends.sim.saving import load_world, saved_world
from flockstep.backends.sim.scheduler import (
    TICKS_PER_SECOND,
    Scheduler,
    Slot,
    loss_of,
    to_ticks,
)
from flockstep.backends.sim.shared import Home, SimShared
from flockstep.backends.sim.transfers import Plan, Transfers
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
from flockstep.errors import CheckpointError, MessageLost, MismatchError
from flockstep.network import costs


class SimComm(Comm):
    """A simulated worker's handle on its group."""

    def __init__(
        self,
        scheduler: Scheduler,
        groups: dict[str, SimGroup],
        group: SimGroup,
        rank: int,
        seed: int,
        transfers: Transfers,
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
        self._transfers = transfers
        self._stopwatch = stopwatch
        self._put = tell

    def _tell(self, text: str) -> None:
        self._put(text)

    # --- who is there -----------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        if not self._scheduler.may_lose:
            return super().members
        moment = self._known_until()
        ranks = range(self.size)
        return tuple(rank for rank in ranks if not self._is_lost(rank, moment))

    def watch_losses(self, act: Callable[[int], None]) -> None:
        self._scheduler.tell_losses(act)

    def _known_until(self) -> int:
        """Whose death this worker knows of: all until this moment. Others may be behind this
        worker's clock, and die there before it; so it waits until they cannot any more.
        """
        if self._slot.state != "running":  # it sleeps, and others look for it at what has changed
            return self._scheduler.moment
        self._scheduler.ordered(self._slot, "seeing who is there", lambda: self._slot.clock)
        return self._slot.clock

    def _is_lost(self, rank: int, moment: int) -> bool:
        slot = self._slot_of(rank)
        return slot.loss is not None and slot.dies_by(moment)

    def _slot_of(self, rank: int) -> Slot:
        return self._scheduler.slots[self._group.ranks[rank]]

    def _require_there(self, peer: int) -> None:
        if self._scheduler.may_lose and self._is_lost(peer, self._known_until()):
            raise loss_of(self._slot_of(peer))

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
            self._scheduler.move_to(self._slot, until)

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
            return saved_world(self._scheduler, self._groups, self._transfers)

    def go_back(self, own: dict[str, Any] | None, world: dict[str, Any] | None) -> None:
        self._slot.going_back = own, world

        def settle(_: dict[int, Tensor]) -> list[Any]:
            load_world(self._scheduler, self._groups, self._transfers)
            return []

        with self.unmetered():
            self._collective("go back", torch.empty(0), settle, _free)
        if own is None:
            raise CheckpointError(
                f"the checkpoint has nothing of rank {self._slot.rank}, which was lost"
            )
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
        def settle(colors: dict[int, Tensor]) -> list[dict[int, SimGroup]]:
            parent, groups = self._group, {}
            parent.splits += 1
            for each in sorted({int(value) for value in colors.values()}):
                ranks = tuple(
                    parent.ranks[rank] for rank, value in colors.items() if int(value) == each
                )
                name = f"{parent.name}{parent.splits}={each}/"
                groups[each] = SimGroup(ranks, self._transfers.network.between(ranks), name)
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
            self._transfers,
            self._stopwatch,
            self.meter,
            self._put,
        )

    def _shared(self, name: str, like: Tensor, home: int | None) -> SharedTensor:
        def settle(values: dict[int, Tensor]) -> list[Home]:
            homes = self._group.homes
            if name not in homes:
                identity, value = f"{self._group.name}{name}", next(iter(values.values()))
                value = value.clone(memory_format=torch.contiguous_format)
                owner = None if home is None else self._group.ranks[home]
                link, transfers = self._group.link, self._transfers
                homes[name] = Home(identity, value, link, self.size, transfers, owner)
                for rank in {*range(self.size)} - {*values}:
                    homes[name].lose(rank)
            return [homes[name]]

        call = f"shared({name!r}: {shared_form(like, home)})"
        (place,) = self._collective(call, like.detach(), settle, _free)
        return SimShared(name, place, self._scheduler, self._slot, self.rank, self.meter)

    # --- collectives ------------------------------------------------------------------------------

    def _collective(
        self,
        call: str,
        tensor: Tensor,
        settle: Callable[[dict[int, Tensor]], list[Any]],
        seconds: Callable[[int, int], float],
        plan: Plan | None = None,
    ) -> list[Any]:
        """Meet all members that are not lost in `call`; when the last has arrived, `settle` is run
        on the tensors by rank, for all of them.
        """
        heard: list[Any] = []
        if self.meter.paused:
            seconds, plan = _free, None
        mine = Arrival(self._slot, call, tensor, settle, seconds, plan, heard)
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
        settle_if_all_came(group, self._scheduler, self._transfers)

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        def settle(tensors: dict[int, Tensor]) -> list[Tensor]:
            parts = [*tensors.values()]
            result = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
            reduce_in_rank_order(parts, op, out=result)
            return [result, torch.tensor(len(parts))]

        call = f"all_reduce({op}) of {signature(tensor)}{self._inside}"
        link = self._group.link
        result, count = self._collective(
            call,
            tensor,
            settle,
            partial(costs.all_reduce_seconds, link),
            self._transfers.all_reduce(link),
        )
        tensor.copy_(result)
        self._took_part = int(count)
        self.has_summed(costs.summed_bytes(self._took_part, tensor.nbytes))

    def has_summed(self, nbytes: float) -> None:
        per_byte = self._transfers.network.seconds_per_summed_byte
        if per_byte and not self.meter.paused:
            ticks = to_ticks(per_byte * nbytes)
            self.meter.sent(ticks)
            self._scheduler.elapse(self._slot, ticks, is_step=False)

    def _all_gather(self, tensor: Tensor) -> Gathered:
        call = f"all_gather of {tensor.dtype}{self._inside}"
        link = self._group.link
        ranks, *parts = self._collective(
            call,
            tensor,
            lambda parts: [torch.tensor([*parts]), *(part.clone() for part in parts.values())],
            partial(costs.all_gather_seconds, link),
            self._transfers.all_gather(link),
        )
        return Gathered((part.clone() for part in parts), ranks.tolist())

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        call = f"broadcast from {root} of {signature(tensor)}"
        link = self._group.link
        brought = self._collective(
            call,
            tensor,
            lambda parts: [parts[root].clone()] if root in parts else [],
            partial(costs.broadcast_seconds, link),
            self._transfers.broadcast(link, self._group.ranks[root]),
        )
        if not brought:
            raise loss_of(self._slot_of(root))
        if self.rank != root:
            tensor.copy_(brought[0])

    def _barrier(self) -> None:
        link = self._group.link
        self._collective(
            "barrier",
            torch.empty(0),
            lambda _: [],
            lambda workers, _: costs.barrier_seconds(link, workers),
            self._transfers.barrier(link),
        )

    # --- two workers ------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, peer: int, may_be_lost: bool = False) -> None:
        channel = self._group.channel(self.rank, peer)
        call = f"send to rank {self._group.ranks[peer]}"
        self._require_there(peer)
        stream, is_lost = self._message(tensor, peer, may_be_lost)
        message = Message(self._slot, tensor, stream, may_be_lost, is_lost)

        def post() -> None:
            self._post(channel, message)
            self._deliver(channel)

        def wait() -> None:
            channel.next = message
            self._deliver(channel)
            self._give_up_if_lost(channel, peer)

        is_at_once = self.meter.paused or self._slot.is_in_background
        if channel.on_its_way is None and (is_at_once or not self._transfers.are_shared):
            # And it stays so: nobody else sends here.
            self._scheduler.go_on(self._slot, call, post)
        else:
            self._scheduler.meet(self._slot, call, wait)

    def _try_send(self, tensor: Tensor, peer: int) -> None:
        self._send(tensor, peer, may_be_lost=True)

    def _send_bytes(self, message: Tensor, peer: int, may_be_lost: bool) -> None:
        self._send(message, peer, may_be_lost)

    def _recv(self, tensor: Tensor, peer: int, may_be_lost: bool = False) -> None:
        self._take(peer, [torch.tensor(False), tensor], may_be_lost)

    def _try_recv(self, tensor: Tensor, peer: int) -> None:
        self._recv(tensor, peer, may_be_lost=True)

    def _recv_bytes(self, peer: int, device: torch.device, may_be_lost: bool) -> Tensor:
        heard: list[Tensor] = []
        self._take(peer, heard, may_be_lost)
        return heard[1]

    def _take(self, peer: int, heard: list[Tensor], may_be_lost: bool) -> None:
        """Have the next message of `peer`, and whether it was lost, in the two tensors of the list,
        or as its first two.
        """
        channel = self._group.channel(peer, self.rank)

        def wait() -> None:
            channel.waiting = Receiver(self._slot, heard, may_be_lost)
            self._deliver(channel)
            self._give_up_if_lost(channel, peer)

        call = f"recv from rank {self._group.ranks[peer]}"
        self._scheduler.meet(self._slot, call, wait, heard)
        self._require_heard(peer, heard)

    def _deliver(self, channel: Channel) -> None:
        """Hand a message over, if it is there and somebody waits for it; let the next go on its
        way.
        """
        self._hand_over(channel)
        if channel.on_its_way is None and channel.next is not None:
            message, channel.next = channel.next, None
            slot = message.slot
            if not self._transfers.are_shared or slot.meter.paused or slot.is_in_background:
                self._post(channel, message)
                self._scheduler.wake(slot, slot.clock)
                self._hand_over(channel)
            else:
                self._carry(channel, message)

    def _carry(self, channel: Channel, message: Message) -> None:
        """Have the message travel over links that others use as well."""
        slot = message.slot
        began = max(slot.clock, channel.taken_at)

        def done(end: int) -> None:
            if self._scheduler.is_gone(slot, end):
                return
            slot.meter.sent(end - began)
            channel.on_its_way = _sent(message, end)
            self._scheduler.wake(slot, end)
            self._hand_over(channel)

        self._transfers.carry([slot], began, [[message.stream]], done)

    def _give_up_if_lost(self, channel: Channel, peer: int) -> None:
        """Who is lost takes no message any more, and sends none."""
        other = self._slot_of(peer)
        if other.loss is not None:
            channel.give_up(self._scheduler, self._slot, other)

    def _post(self, channel: Channel, message: Message) -> None:
        """The way is free since the message before was taken, whether or not its sender had to
        sleep until then. A worker sends until what it sends has arrived: if it dies before, nothing
        arrives.
        """
        slot = message.slot
        if not slot.meter.paused:  # what is not counted takes no time, not even that of waiting
            began = max(slot.clock, channel.taken_at)
            slot.clock = self._transfers.arrival_alone(began, [[message.stream]])
            slot.meter.sent(slot.clock - began)
        if not slot.dies_by(slot.clock):
            channel.on_its_way = _sent(message, slot.clock)

    def _hand_over(self, channel: Channel) -> None:
        sent, receiver = channel.on_its_way, channel.waiting
        if sent is None or receiver is None:
            return
        channel.on_its_way = channel.waiting = None
        slot = receiver.slot
        self._require_same_risk(
            channel.sender, sent.may_be_lost, channel.receiver, receiver.may_be_lost
        )
        self._give(channel.sender, sent.tensor, channel.receiver, receiver.heard, sent.is_lost)
        if slot.meter.paused:
            self._scheduler.wake(slot, slot.clock)
        else:
            channel.taken_at = max(slot.clock, sent.arrival)
            self._scheduler.wake(slot, channel.taken_at)

    def _exchange(self, tensor: Tensor, peer: int, may_be_lost: bool = False) -> Tensor:
        received = torch.empty_like(tensor)
        self._offer(tensor, peer, [torch.tensor(False), received], may_be_lost)
        return received

    def _try_exchange(self, tensor: Tensor, peer: int) -> Tensor:
        return self._exchange(tensor, peer, may_be_lost=True)

    def _exchange_bytes(self, message: Tensor, peer: int, may_be_lost: bool) -> Tensor:
        heard: list[Tensor] = []
        self._offer(message, peer, heard, may_be_lost)
        return heard[1]

    def _offer(self, tensor: Tensor, peer: int, heard: list[Tensor], may_be_lost: bool) -> None:
        group, slot = self._group, self._slot
        mine = Offer(slot, tensor, heard, may_be_lost)

        def meet() -> None:
            partner = self._slot_of(peer)
            if partner.loss is not None:
                self._scheduler.wake(slot, max(slot.clock, partner.clock), partner)
            elif (peer, self.rank) not in group.exchanges:
                group.exchanges[self.rank, peer] = mine
            else:
                theirs = group.exchanges.pop((peer, self.rank))
                if not self._is_too_late(slot, theirs.slot):
                    self._swap(peer, theirs, mine)

        self._scheduler.meet(slot, f"exchange with rank {group.ranks[peer]}", meet, heard)
        self._require_heard(peer, heard)

    def _is_too_late(self, slot: Slot, other: Slot) -> bool:
        """Whether one of two dies before both are there. The other one hears of it."""
        start = max(slot.clock, other.clock)
        dying = [each for each in (slot, other) if not each.takes_part(start)]
        for each in dying:
            each.is_dying = True
        if len(dying) == 1:
            alive = other if dying[0] is slot else slot
            self._scheduler.wake(alive, max(alive.clock, dying[0].death or 0), dying[0])
        return bool(dying)

    def _swap(self, peer: int, theirs: Offer, mine: Offer) -> None:
        """Both sides of an exchange are there."""
        self._require_same_risk(peer, theirs.may_be_lost, self.rank, mine.may_be_lost)
        streams = []
        for giver, taker, ranks in (
            (mine, theirs, (self.rank, peer)),
            (theirs, mine, (peer, self.rank)),
        ):
            way = self._transfers.between(giver.slot.rank, taker.slot.rank)
            stream, is_lost = self._transfers.message(
                giver.slot, way, giver.tensor.nbytes, may_be_lost=giver.may_be_lost
            )
            streams.append(stream)
            self._give(ranks[0], giver.tensor, ranks[1], taker.heard, is_lost)

        slots = [mine.slot, theirs.slot]
        if mine.slot.meter.paused:  # what is not counted takes no time, not even that of waiting
            for slot in slots:
                self._scheduler.wake(slot, slot.clock)
            return
        began = max(slot.clock for slot in slots)

        def done(end: int) -> None:
            for slot in slots:
                slot.meter.sent(end - began)
                self._scheduler.wake(slot, end)

        self._transfers.carry(slots, began, [streams], done)

    def _message(self, tensor: Tensor, peer: int, may_be_lost: bool) -> tuple[Stream, bool]:
        if self.meter.paused:
            return Stream(0, 0), False
        way = self._transfers.between(self._slot.rank, self._group.ranks[peer])
        return self._transfers.message(self._slot, way, tensor.nbytes, may_be_lost=may_be_lost)

    def _require_heard(self, peer: int, heard: list[Tensor]) -> None:
        if heard[0]:
            sender, receiver = self._group.ranks[peer], self._slot.rank
            raise MessageLost(f"rank {receiver}: a message of rank {sender} was lost")

    def _require_same_risk(self, sender: int, theirs: bool, receiver: int, mine: bool) -> None:
        if theirs != mine:
            ranks = self._group.ranks
            says, other = (sender, receiver) if theirs else (receiver, sender)
            raise MismatchError(
                f"rank {ranks[says]} said that the message between them may be lost, "
                f"rank {ranks[other]} did not"
            )

    def _in_world(self, rank: int) -> int:
        return self._group.ranks[rank]

    def _give(
        self, sender: int, sent: Tensor, receiver: int, heard: list[Tensor], is_lost: bool
    ) -> None:
        """Write whether a message is lost, and else the message, into the tensors of the list,
        which must be like it; into an empty list goes any message of bytes.
        """
        expected = signature(heard[1]) if heard else f"any number × {torch.uint8}"
        is_alike = signature(sent) == expected if heard else sent.dtype == torch.uint8
        if not is_alike:
            ranks = self._group.ranks
            raise MismatchError(
                f"rank {ranks[sender]} sent {signature(sent)}, "
                f"rank {ranks[receiver]} expected {expected}"
            )
        if not heard:
            heard.extend((torch.tensor(is_lost), sent.clone()))
            return
        heard[0].fill_(is_lost)
        if not is_lost:
            heard[1].copy_(sent.reshape(heard[1].shape))


def _sent(message: Message, arrival: int) -> Sent:
    return Sent(message.tensor.clone(), arrival, message.may_be_lost, message.is_lost)


def _free(_: int, __: int) -> float:
    return 0.0


def _nothing() -> None:
    pass
