"""Where workers are, what is between these places, and what changes in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flockstep.errors import InvalidField
from flockstep.fields import require, require_integer, require_name, require_number, shown
from flockstep.network.link import NAMED, Link


@dataclass(frozen=True)
class Site:
    """A place with workers. Ranks go to the sites of a network in their order.

    Fields:
        name: what routes and changes call it.
        workers: how many are here; None: the sites that do not say it share the others equally,
            and of a rest the first have one more each.
        inside: the link between two workers of this site; None: the network's own.
        uplink, downlink: bytes per second that each worker here can send and receive in all; None:
            as the network says.

        fs.Site("Frankfurt", 8, inside="lan-10g")
    """

    name: str
    workers: int | None = None
    inside: Link | None = None
    uplink: float | None = None
    downlink: float | None = None

    def __post_init__(self) -> None:
        is_text = isinstance(self.name, str) and self.name != ""
        require(is_text, "name", "be a text", self.name)
        if self.workers is not None:
            require_integer("workers", self.workers, 1)
        if isinstance(self.inside, str):
            require_name("network", self.inside, NAMED)
            object.__setattr__(self, "inside", Link(*NAMED[self.inside]))
        rule = "be a link such as fs.Network.preset('lan-10g')"
        require(self.inside is None or isinstance(self.inside, Link), "inside", rule, self.inside)
        for field in ("uplink", "downlink"):
            speed = getattr(self, field)
            if speed is not None:
                require_number(field, speed, above=0)


@dataclass(frozen=True)
class Route:
    """What is between two sites, where it differs from the network's own link. The way back is the
    same, unless it has a route of its own.

        fs.Route("Frankfurt", "Singapore", latency_seconds=0.08, bytes_per_second=62.5e6)
    """

    source: str
    target: str
    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        Link(self.latency_seconds, self.bytes_per_second)  # complains of figures that are wrong
        require(self.target != self.source, "target", "be another site than 'source'", self.target)

    @property
    def link(self) -> Link:
        return Link(self.latency_seconds, self.bytes_per_second)


@dataclass(frozen=True)
class LinkChange:
    """From `seconds` on links are slower or faster than they are without it, until a later change
    of the same ranks or site. Changes of different ones multiply.

    Fields:
        seconds: of the run's clock.
        bandwidth: times the bytes per second of the link.
        latency: times its latency, for what is sent from then on.
        ranks: only the links of these workers; none and no site: all links.
        site: only the links of this site and its workers.

        fs.LinkChange(10.0, bandwidth=0.1, latency=3.0, site="Frankfurt")
    """

    name: ClassVar[str] = "link_change"

    seconds: float
    bandwidth: float = 1.0
    latency: float = 1.0
    ranks: tuple[int, ...] = ()
    site: str | None = None

    def __post_init__(self) -> None:
        require_number("seconds", self.seconds, at_least=0, finite=True)
        require_number("bandwidth", self.bandwidth, above=0, finite=True)
        require_number("latency", self.latency, at_least=0, finite=True)
        is_sequence = isinstance(self.ranks, Sequence) and not isinstance(self.ranks, str)
        require(is_sequence, "ranks", "be ranks such as (0, 3)", self.ranks)
        object.__setattr__(self, "ranks", tuple(self.ranks))
        for rank in self.ranks:
            require_integer("ranks", rank, 0)
        rule = "be left out where 'ranks' are given"
        require(self.site is None or not self.ranks, "site", rule, self.site)


def require_in_order(trace: Sequence[LinkChange]) -> None:
    """Refuse a trace that goes back in time."""
    for index in range(1, len(trace)):
        before, seconds = trace[index - 1].seconds, trace[index].seconds
        if seconds < before:
            raise InvalidField(
                f"'trace' must not go back in time: entry {index + 1} must be at {before:g} s or "
                f"later (got {shown(seconds)})"
            )


def shares(sites: Sequence[Site], workers: int) -> list[int]:
    """How many workers each site has."""
    counts = [site.workers for site in sites]
    open_places = [index for index, count in enumerate(counts) if count is None]
    taken = sum(count for count in counts if count is not None)
    found = [count or 0 for count in counts]
    if open_places:
        each, rest = divmod(max(0, workers - taken), len(open_places))
        for number, index in enumerate(open_places):
            found[index] = each + (number < rest)
    return found
