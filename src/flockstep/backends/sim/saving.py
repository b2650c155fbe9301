"""The state of a simulated run between its workers, saved and put back.

Whatever workers do to each other they do under the scheduler's mutex, so at any moment at which
somebody holds it the run is in one definite state: the values of shared tensors, who holds which
lock, what is under way and how far it has got, and what every worker has heard since it
was copied (its journal). Calls that wait for their outcome are no part of it: the workers that go
on from their copies make them again, at the same times.
"""

from __future__ import annotations

from typing import Any

import torch

from flockstep.backends.sim.group import Channel, Sent, SimGroup
from flockstep.backends.sim.scheduler import Scheduler
from flockstep.backends.sim.shared import Home
from flockstep.backends.sim.transfers import Transfers
from flockstep.errors import CheckpointError
from flockstep.network import MODEL

OF_HOMES = ("changes", "holder", "turn", "takes_turns")


def saved_world(
    scheduler: Scheduler, groups: dict[str, SimGroup], transfers: Transfers
) -> dict[str, Any] | None:
    """The state between all workers, their journals, and who is lost. None where one of them
    cannot be saved; who is about to die has left a meeting that it would come to again.
    """
    journals = [slot.journal.written() if slot.loss is None else [] for slot in scheduler.slots]
    if None in journals or any(slot.is_dying for slot in scheduler.slots):
        return None
    if transfers.belongs_to(scheduler.lost):  # which nobody would begin again
        return None
    lost = [slot for slot in scheduler.slots if slot.loss is not None]
    return {
        "model": MODEL,
        "groups": {name: _saved_group(group) for name, group in groups.items()},
        "journals": journals,
        "streams": scheduler.streams.saved(),
        "lost": [[slot.rank, slot.death, slot.steps] for slot in lost],
        "transfers": transfers.saved(),
    }


def load_world(scheduler: Scheduler, groups: dict[str, SimGroup], transfers: Transfers) -> None:
    """Put back what all workers, who have come here together, say of themselves, and one of them of
    what is between them. Those that were lost are so again.
    """
    told = [slot.going_back or (None, None) for slot in scheduler.slots]
    world = next(world for _, world in told if world is not None)
    if world.get("model") != MODEL:
        raise CheckpointError(
            "the checkpoint is of an earlier simulator, whose network was another: its run cannot "
            "go on in this one"
        )
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
        slot.going_back = None
        if own is not None:
            slot.clock, slot.steps = own["clock"], own["steps"]
            slot.journal.go_back(journal)
    unused = torch.get_rng_state()
    states = [unused if own is None else own["torch"] for own, _ in told]
    scheduler.streams.load(world["streams"], states)
    transfers.load(world["transfers"])
    for rank, death, steps in world["lost"]:
        if scheduler.slots[rank].loss is None:
            scheduler.bury(scheduler.slots[rank], death, steps)


def _saved_group(group: SimGroup) -> dict[str, Any]:
    channels = []
    for channel in group.channels.values():
        sent = channel.on_its_way
        message = None if sent is None else [*vars(sent).values()]
        channels.append([channel.sender, channel.receiver, channel.taken_at, message])
    homes = {name: _saved_home(home) for name, home in group.homes.items()}
    return {"splits": group.splits, "channels": channels, "homes": homes}


def _saved_home(home: Home) -> dict[str, Any]:
    fields = {name: getattr(home, name) for name in OF_HOMES}
    link = None if home.own_link is None else home.own_link.saved()
    value, turns = home.value.clone(), [*home.takes_turns]
    return fields | {"value": value, "takes_turns": turns, "link": link}


def _load_group(group: SimGroup, saved: dict[str, Any]) -> None:
    group.splits = saved["splits"]
    group.channels.clear()
    for sender, receiver, taken_at, message in saved["channels"]:
        on_its_way = None if message is None else Sent(*message)
        group.channels[sender, receiver] = Channel(sender, receiver, on_its_way, taken_at)
    for name, values in saved["homes"].items():
        home = group.homes[name]
        home.value.copy_(values["value"])
        for field in OF_HOMES:
            setattr(home, field, values[field])
        if home.own_link is not None:
            home.own_link.load(values["link"])
