"""The actors of this process: workers where the placement wants them, and homes of shared
tensors beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from flockstep.backends.ray.homes import HomeActor
from flockstep.backends.ray.session import Session
from flockstep.backends.ray.worker import Place, WorkerActor
from flockstep.errors import FlockstepError

FEWEST_HOMES = 2


@dataclass
class ActorSlot:
    """A place for one worker: a part of a placement group, and the actor that is there now."""

    group: PlacementGroup
    bundle: int
    actor: Any = None
    place: Place | None = None


class ActorPool:
    """Workers and homes, kept from one run to the next. Rank r has always the same slot."""

    def __init__(
        self,
        session: Session,
        placement: str,
        household: int,
        resources: Mapping[str, float],
        homes: int | None,
    ) -> None:
        self.address = session.address
        self._room_seconds = session.room_seconds
        self._placement = placement
        self._household = household
        self._resources = resources
        self._home_count = homes
        self._groups: list[PlacementGroup] = []
        self._slots: list[ActorSlot] = []
        self.homes: list[Any] = []  # the actors that hold shared tensors

    def __enter__(self) -> ActorPool:
        return self

    def __exit__(self, *exception: object) -> None:
        for actor in [*(slot.actor for slot in self._slots if slot.actor), *self.homes]:
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)

    def workers(self, count: int) -> list[tuple[Any, Place]]:
        """That many workers, ready, in rank order."""
        self._make_room(count)
        slots = self._slots[:count]
        for slot in slots:
            if slot.actor is None:
                slot.actor, slot.place = self._worker(slot), None
        waiting = [slot for slot in slots if slot.place is None]
        places = [slot.actor.place.remote() for slot in waiting]
        self._start_homes()  # side by side with the workers, which need not wait for them
        try:
            for slot, place in zip(waiting, ray.get(places), strict=True):
                slot.place = place
        except RayError as error:
            raise FlockstepError(f"Ray could not start {count} workers: {error}") from error
        return [(slot.actor, slot.place) for slot in slots if slot.place is not None]

    def lose(self, rank: int) -> None:
        """The worker of `rank` is gone, or has to go: the next run gets another."""
        slot = self._slots[rank]
        if slot.actor is not None:
            ray.kill(slot.actor)
        slot.actor = slot.place = None

    def forget(self, run: str) -> None:
        """Free the shared tensors of that run. If a home is lost the next run gets others."""
        try:
            ray.get([home.forget.remote(run) for home in self.homes])
        except RayActorError:
            for home in self.homes:
                ray.kill(home)
            self.homes = []

    def _make_room(self, count: int) -> None:
        """Reserve what further workers need. A household is one bundle, which Ray never divides
        between hosts.
        """
        missing = count - len(self._slots)
        if missing <= 0:
            return
        households = -(-missing // self._household)
        bundle = {
            name: amount * self._household for name, amount in self._resources.items() if amount
        }
        # A bundle must not be empty; of this resource every host has more than enough.
        bundle = bundle or {"object_store_memory": 1.0}
        group = placement_group([bundle] * households, strategy=self._placement.upper())
        self._groups.append(group)
        if not group.wait(self._room_seconds):
            raise FlockstepError(
                f"Ray has no room for {count} workers with {dict(self._resources)} each, "
                f"{self._household} to a host, within {self._room_seconds:g} s; "
                f"all hosts together have {ray.cluster_resources()}"
            )
        self._slots += [
            ActorSlot(group, bundle) for bundle in range(households) for _ in range(self._household)
        ]

    def _start_homes(self) -> None:
        """Homes on the hosts of the workers, in turn."""
        if self.homes:
            return
        tables = [placement_group_table(group) for group in self._groups]
        nodes = list(
            dict.fromkeys(node for table in tables for node in table["bundles_to_node_id"].values())
        )
        remote: Any = ray.remote  # its types leave the groups out
        make = remote(concurrency_groups={"beat": 1})(HomeActor)
        for index in range(self._home_count or max(len(nodes), FEWEST_HOMES)):
            where = NodeAffinitySchedulingStrategy(nodes[index % len(nodes)], soft=False)
            self.homes.append(make.options(num_cpus=0, scheduling_strategy=where).remote())

    def _worker(self, slot: ActorSlot) -> Any:
        amounts = dict(self._resources)
        remote: Any = ray.remote  # its types leave the groups out
        make = remote(concurrency_groups={"beat": 1, "output": 1})(WorkerActor)
        return make.options(
            num_cpus=amounts.pop("CPU", 0),
            num_gpus=amounts.pop("GPU", 0),
            resources=amounts,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                slot.group, placement_group_bundle_index=slot.bundle
            ),
        ).remote()
