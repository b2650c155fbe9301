"""What the members of a simulated comm share: who has arrived, and what is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flockstep.backends.sim.fair import Stream
from flockstep.backends.sim.scheduler import Scheduler, Slot, to_ticks
from flockstep.backends.sim.shared import Home
from flockstep.backends.sim.transfers import Plan, Transfers
from flockstep.network import Link


@dataclass(frozen=True)
class Arrival:
    """One worker's part in a collective: what it calls, with what, at what cost."""

    slot: Slot
    call: str
    tensor: Tensor
    settle: Callable[[dict[int, Tensor]], list[Any]]  # what all hear, from tensors by rank
    seconds: Callable[[int, int], float]  # of so many workers and bytes, by the closed form
    plan: Plan | None  # what goes over which links; None: nothing
    heard: list[Any]  # what it brings, once all have arrived


@dataclass(frozen=True)
class Message:
    """What a worker sends, over which links."""

    slot: Slot
    tensor: Tensor
    stream: Stream
    may_be_lost: bool
    is_lost: bool


@dataclass(frozen=True)
class Sent:
    """A message that has been sent, with the time of its arrival."""

    tensor: Tensor
    arrival: int
    may_be_lost: bool
    is_lost: bool


@dataclass(frozen=True)
class Offer:
    """One side of an exchange."""

    slot: Slot
    tensor: Tensor
    heard: list[Tensor]  # as a receiver's
    may_be_lost: bool


@dataclass(frozen=True)
class Receiver:
    """Who waits for a message, and where it goes.

    `heard` has two tensors, whether it was lost and the message; or none yet, where its length is
    not known before."""

    slot: Slot
    heard: list[Tensor]
    may_be_lost: bool


@dataclass
class Channel:
    """The way from one worker of a group to another. One message may be on its way."""

    sender: int  # in the group, as the receiver
    receiver: int
    on_its_way: Sent | None = None
    taken_at: int = 0  # the message before
    next: Message | None = None  # of a sender that waits until the way is free
    waiting: Receiver | None = None

    def give_up(self, scheduler: Scheduler, slot: Slot, lost: Slot) -> None:
        """`slot` waits here no longer, if it does: the other one is lost."""
        is_sender = self.next is not None and self.next.slot is slot
        is_receiver = self.waiting is not None and self.waiting.slot is slot
        if is_sender:
            self.next = None
        if is_receiver:
            self.waiting = None
        if is_sender or is_receiver:
            scheduler.wake(slot, max(slot.clock, lost.clock), lost)


@dataclass
class SimGroup:
    """What the members of one comm share."""

    ranks: tuple[int, ...]  # in the world
    link: Link
    name: str = ""  # the same in every run of the same program
    splits: int = 0  # so far
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    channels: dict[tuple[int, int], Channel] = field(default_factory=dict)
    exchanges: dict[tuple[int, int], Offer] = field(default_factory=dict)
    homes: dict[str, Home] = field(default_factory=dict)

    def channel(self, sender: int, receiver: int) -> Channel:
        """One and the same for both, whichever asks first: `setdefault` is done at once."""
        return self.channels.setdefault((sender, receiver), Channel(sender, receiver))


def settle_if_all_came(group: SimGroup, scheduler: Scheduler, transfers: Transfers) -> None:
    """The members that are not lost meet, if all of them have arrived. Who dies before the last
    arrives is not there; who dies later has taken part.
    """
    lost = sum(world in scheduler.lost for world in group.ranks) if scheduler.lost else 0
    if not group.arrivals or len(group.arrivals) + lost < len(group.ranks):
        return
    start = max(scheduler.slots[world].clock for world in group.ranks)
    came = dict(sorted(group.arrivals.items()))
    group.arrivals.clear()
    arrivals = {rank: each for rank, each in came.items() if each.slot.takes_part(start)}
    for rank in came.keys() - arrivals.keys():
        came[rank].slot.is_dying = True
    if not arrivals:
        return

    first = next(iter(arrivals.values()))
    outcome = first.settle({rank: each.tensor for rank, each in arrivals.items()})
    largest = max(each.tensor.nbytes for each in arrivals.values())
    slots = [each.slot for each in arrivals.values()]

    def done(end: int) -> None:
        for each in arrivals.values():
            slot = each.slot
            each.heard.extend(outcome)
            slot.meter.sent(end - start)
            # What is not counted takes no time, not even that of waiting for each other.
            scheduler.wake(slot, slot.clock if slot.meter.paused else end)

    if len(slots) == 1 and len(group.ranks) > 1:
        done(start)  # nobody else is left to send to
    elif first.plan is None or transfers.are_closed_forms:
        done(start + to_ticks(first.seconds(len(slots), largest)))
    else:
        transfers.carry(slots, start, first.plan(slots, largest), done)
