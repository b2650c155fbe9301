"""What the others notice of a simulated worker that has died.

Ranks stay as they were, and nothing waits for the lost: meetings for which only they were missing
take place, those who wait for their messages hear of the loss, and their locks and turns pass on.
All this is done at the time of the death, in the order of all that workers do.
"""

from __future__ import annotations

from flockstep.backends.sim.group import SimGroup, settle_if_all_came
from flockstep.backends.sim.scheduler import Scheduler, Slot
from flockstep.backends.sim.shared import Home
from flockstep.backends.sim.transfers import Transfers


def leave_groups(
    lost: Slot, scheduler: Scheduler, groups: dict[str, SimGroup], transfers: Transfers
) -> None:
    """A worker is dead: nobody in its groups waits for it any longer, and what it sends or asks for
    travels no further.
    """
    transfers.drop(lost.rank, lost.clock)
    for group in [*groups.values()]:  # those that are made meanwhile are without it
        if lost.rank in group.ranks:
            _leave_group(lost, scheduler, group, transfers)


def _leave_group(lost: Slot, scheduler: Scheduler, group: SimGroup, transfers: Transfers) -> None:
    rank = group.ranks.index(lost.rank)
    group.arrivals.pop(rank, None)
    settle_if_all_came(group, scheduler, transfers)

    for channel in group.channels.values():
        if channel.sender == rank:
            channel.next = None
            if channel.waiting is not None:
                channel.give_up(scheduler, channel.waiting.slot, lost)
        elif channel.receiver == rank:
            channel.waiting = None
            if channel.next is not None:
                channel.give_up(scheduler, channel.next.slot, lost)

    for one, other in [*group.exchanges]:
        if rank in (one, other):
            slot = group.exchanges.pop((one, other)).slot
            if slot is not lost:
                scheduler.wake(slot, max(slot.clock, lost.clock), lost)

    for home in group.homes.values():
        _leave_home(lost, rank, scheduler, home)


def _leave_home(lost: Slot, rank: int, scheduler: Scheduler, home: Home) -> None:
    if home.own_link is not None:
        home.own_link.drop(lost.rank, lost.clock)
    home.lose(rank)
    home.grant(scheduler, lost.clock)
    for watcher in [*home.watchers]:  # what they wait for may depend on who is there
        watcher(lost.clock)
