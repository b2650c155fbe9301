"""The state of a simulated run between its workers, saved and put back.

Whatever workers do to each other they do under the scheduler's mutex, so at any moment at which
somebody holds it the run is in one definite state: the values of shared tensors, who holds which
lock, when links are free, which messages are under way, and what every worker has heard since it
was copied (its journal). Calls that wait for their outcome are no part of it: the workers that go
on from their copies make them again, at the same times.
"""

from __future__ import annotations

from typing import Any

from flockstep.backends.sim.group import Channel, SimGroup
from flockstep.backends.sim.scheduler import Scheduler
from flockstep.backends.sim.shared import Home
from flockstep.errors import CheckpointError

OF_HOMES = ("changes", "link_is_free_at", "holder", "turn", "takes_turns")


def saved_world(scheduler: Scheduler, groups: dict[str, SimGroup]) -> dict[str, Any] | None:
    """The state between all workers, and their journals. None where one of them cannot be
    saved.
    """
    journals = [slot.journal.written() for slot in scheduler.slots]
    if any(journal is None for journal in journals):
        return None
    return {
        "groups": {name: _saved_group(group) for name, group in groups.items()},
        "journals": journals,
        "streams": scheduler.streams.saved(),
    }


def load_world(scheduler: Scheduler, groups: dict[str, SimGroup]) -> None:
    """Put back what all workers, who have come here together, say of themselves, and rank 0 of what
    is between them.
    """
    told = [slot.going_back for slot in scheduler.slots]
    world = told[0][1]
    for name, saved in world["groups"].items():
        homes = groups[name].homes if name in groups else {}
        missing = [home for home in saved["homes"] if home not in homes]
        if name not in groups or missing:
            raise CheckpointError(
                f"the checkpoint has {missing or name!r}, which this run has not made: all Workers "
                "of a comm are made before one of them goes on"
            )
        _load_group(groups[name], saved)
    for slot, (own, _), journal in zip(scheduler.slots, told, world["journals"], strict=True):
        slot.clock, slot.steps = own["clock"], own["steps"]
        slot.journal.go_back(journal)
        slot.going_back = None
    scheduler.streams.load(world["streams"], [own["torch"] for own, _ in told])


def _saved_group(group: SimGroup) -> dict[str, Any]:
    channels = []
    for channel in group.channels.values():
        message, arrival = channel.on_its_way or (None, 0)
        channels.append([channel.sender, channel.receiver, message, arrival, channel.taken_at])
    homes = {name: _saved_home(home) for name, home in group.homes.items()}
    return {"splits": group.splits, "channels": channels, "homes": homes}


def _saved_home(home: Home) -> dict[str, Any]:
    fields = {name: getattr(home, name) for name in OF_HOMES}
    return fields | {"value": home.value.clone(), "takes_turns": [*home.takes_turns]}


def _load_group(group: SimGroup, saved: dict[str, Any]) -> None:
    group.splits = saved["splits"]
    group.channels.clear()
    for sender, receiver, message, arrival, taken_at in saved["channels"]:
        on_its_way = None if message is None else (message, arrival)
        group.channels[sender, receiver] = Channel(sender, receiver, on_its_way, taken_at)
    for name, values in saved["homes"].items():
        home = group.homes[name]
        home.value.copy_(values["value"])
        for field in OF_HOMES:
            setattr(home, field, values[field])
