"""Over which links a message between two workers goes, and what they can carry when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flockstep.network.link import Link
from flockstep.network.links import Network
from flockstep.network.places import LinkChange, shares

PARTS = 1 << 64  # of a byte per second: capacities are whole numbers of them, so that shares are

Resource = tuple[Any, ...]
"""What transfers share: the links ("pair", sender, receiver), ("sites", source, target),
("up", rank) and ("down", rank); ("home", identity, *owner), where a shared tensor lives;
("out", rank), what a worker sends at the same time."""


@dataclass(frozen=True)
class Way(Link):
    """From one worker to another, or between a worker and a shared tensor: the latency, the bytes
    per second of whoever is alone there, and what it shares with others.
    """

    resources: tuple[Resource, ...] = ()
    ranks: tuple[int, ...] = ()  # whose links it uses


class Routes:
    """The ways of a network among that many workers."""

    def __init__(self, network: Network, workers: int) -> None:
        self.network = network
        self._ways: dict[tuple[Any, ...], Way] = {}
        self._capacities: dict[tuple[Resource, int], int] = {}
        self._workers = workers
        self._fastest_of: dict[int, float] = {}
        counts = shares(network.sites, workers)
        self._site_of = [site for site, count in enumerate(counts) for _ in range(count)][:workers]
        self.change_seconds = sorted({change.seconds for change in network.trace})

    def way(self, sender: int, receiver: int) -> Way:
        """Between two workers."""
        key = (sender, receiver)
        if key not in self._ways:
            link = self._link(sender, receiver)
            resources = [("pair", *key), ("up", sender), ("down", receiver)]
            if self._site_of and self._site_of[sender] != self._site_of[receiver]:
                resources.append(("sites", self._site_of[sender], self._site_of[receiver]))
            self._ways[key] = self._made(link.latency_seconds, resources, key)
        return self._ways[key]

    def to_home(self, rank: int, owner: int | None, identity: str) -> Way:
        """From a worker to a shared tensor, which lives at a worker or at nobody's."""
        key = (rank, identity, "there")
        if key not in self._ways:
            if owner is None:
                way = self._made(self.network.latency_seconds, [("up", rank)], (rank,))
            else:
                way = self.way(rank, owner)
            self._ways[key] = self._through_home(way, owner, identity)
        return self._ways[key]

    def from_home(self, rank: int, owner: int | None, identity: str) -> Way:
        """And back."""
        key = (rank, identity, "back")
        if key not in self._ways:
            if owner is None:
                way = self._made(self.network.latency_seconds, [("down", rank)], (rank,))
            else:
                way = self.way(owner, rank)
            self._ways[key] = self._through_home(way, owner, identity)
        return self._ways[key]

    def _through_home(self, way: Way, owner: int | None, identity: str) -> Way:
        """All that goes to or comes from one shared tensor shares what its home can carry."""
        home = ("home", identity) if owner is None else ("home", identity, owner)
        return self._made(way.latency_seconds, [*way.resources, home], way.ranks)

    def out(self, rank: int) -> tuple[Resource, ...]:
        """What a worker sends at the same time shares this, unless that knows no limit."""
        out = ("out", rank)
        return (out,) if math.isfinite(self._speed(out)) else ()

    def capacity(self, resource: Resource, era: int) -> int:
        """Parts of a byte per second that the link carries after so many changes."""
        key = (resource, era)
        if key not in self._capacities:
            speed = Fraction(self._speed(resource)) / Fraction(self.network.framing)
            kind, *rest = resource
            ranks = rest[1:] if kind == "home" else () if kind == "sites" else rest
            sites = rest if kind == "sites" else ()
            for change in self._in_force(era):
                if self._concerns(change, ranks, sites):
                    speed *= Fraction(change.bandwidth)
            self._capacities[key] = max(1, int(speed * PARTS))
        return self._capacities[key]

    def latency_factor(self, ranks: Sequence[int], era: int) -> float:
        """Times the latency of a way that uses the links of these ranks, after so many changes."""
        factor = 1.0
        for change in self._in_force(era):
            if self._concerns(change, ranks, ()):
                factor *= change.latency
        return factor

    def _made(self, latency: float, resources: Sequence[Resource], ranks: tuple[int, ...]) -> Way:
        limited = [each for each in resources if math.isfinite(self._speed(each))]
        speed = min(map(self._speed, limited), default=math.inf)
        return Way(latency, speed / self.network.framing, tuple(limited), ranks)

    def _link(self, sender: int, receiver: int) -> Link:
        network = self.network
        if network.sites:
            return self._link_of_sites(self._site_of[sender], self._site_of[receiver])
        if network.latencies is None and network.bandwidths is None:
            for link, size in (
                (network.inside, network.household_size),
                (network.nearby, network.neighbourhood_size),
            ):
                if link is not None and size is not None and sender // size == receiver // size:
                    return link
            return network
        latency, speed = network.latency_seconds, network.bytes_per_second
        if network.latencies is not None:
            latency = network.latencies[sender][receiver]
        if network.bandwidths is not None:
            speed = network.bandwidths[sender][receiver]
        return Link(latency, speed)

    def _link_of_sites(self, source: int, target: int) -> Link:
        sites = self.network.sites
        if source == target:
            return sites[source].inside or self.network
        names = (sites[source].name, sites[target].name)
        ways = {(route.source, route.target): route.link for route in self.network.routes}
        return ways.get(names) or ways.get(names[::-1]) or self.network

    def _speed(self, resource: Resource) -> float:
        """Bytes per second of a link, before any change."""
        kind = resource[0]
        if kind == "pair":
            return self._link(*resource[1:]).bytes_per_second
        if kind == "sites":
            return self._link_of_sites(*resource[1:]).bytes_per_second
        if kind == "home" and len(resource) == 2:
            return self.network.bytes_per_second
        if kind in ("home", "out"):
            return self._fastest(resource[-1])

        (rank,) = resource[1:]
        field = f"{kind}link"
        of_site = getattr(self.network.sites[self._site_of[rank]], field) if self._site_of else None
        if of_site is not None:
            return float(of_site)
        speeds = getattr(self.network, field)
        return float(speeds[rank if len(speeds) > 1 else 0]) if speeds else math.inf

    def _fastest(self, rank: int) -> float:
        """Bytes per second of the fastest link of a worker: on equal links, that of any."""
        if rank not in self._fastest_of:
            others = [other for other in range(self._workers) if other != rank]
            pairs = [pair for other in others for pair in ((rank, other), (other, rank))]
            speeds = (self._link(*pair).bytes_per_second for pair in pairs)
            self._fastest_of[rank] = max(speeds, default=math.inf)
        return self._fastest_of[rank]

    def _in_force(self, era: int) -> list[LinkChange]:
        """The last change of each kind so far: of all links, of the same ranks, of the same
        site.
        """
        last: dict[Any, LinkChange] = {}
        for change in self.network.trace:
            if era and change.seconds <= self.change_seconds[era - 1]:
                last[change.ranks, change.site] = change
        return list(last.values())

    def _concerns(self, change: LinkChange, ranks: Sequence[int], sites: Sequence[int]) -> bool:
        if change.site is not None:
            touched = {*sites, *(self._site_of[rank] for rank in ranks)}
            return change.site in {self.network.sites[site].name for site in touched}
        return not change.ranks or bool({*change.ranks} & {*ranks})
