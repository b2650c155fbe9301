"""Networks: one link for all, tiers, a matrix, or sites; access links, changes in time, loss; and
the named presets.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.errors import InvalidField, unknown_name
from flockstep.fields import require, require_integer, require_name, require_number, shown
from flockstep.network.link import NAMED, Link
from flockstep.network.places import LinkChange, Route, Site, require_in_order, shares
from flockstep.units import read_bytes_per_second, read_seconds, shown_seconds, shown_speed

Matrix = tuple[tuple[float, ...], ...]

# What all-reduces of 30,846,720 floats on four hosts took beyond the ideal ring (docs/network.md).
MEASURED_FRAMING = 1.00295
MEASURED_SECONDS_PER_SUMMED_BYTE = 2.161e-10

MODEL = 2
"""Raised when the same network comes to give other times. Part of the id of simulated runs whose
workers share tensors."""


@dataclass(frozen=True)
class Network(Link):
    """The link between any two workers, with optional faster tiers inside households and
    neighbourhoods, or links of their own between workers or sites.

    With `inside` and `household_size`, ranks 0 … G−1 are the first household, G … 2G−1 the second,
    and so on; with `nearby` and `neighbourhood_size`, a multiple of G, so are neighbourhoods. A
    call among workers of one household runs on `inside`, one among workers of one neighbourhood on
    `nearby`, and every other call on the outer link. Both may be names of presets.

    Fields:
        latencies, bandwidths: a row per sender and a column per receiver, in seconds and bytes per
            second, in place of the one link; the diagonal means nothing.
        sites: places in which workers are. Two of one site talk on its inner link; all that goes
            from one site to another shares the link between these two.
        routes: links between particular sites; between all others is the network's own.
        uplink, downlink: bytes per second that a worker can send and receive in all; one for all
            workers, or one per rank.
        trace: how links change in the course of the run.
        loss: the probability that a message is lost.
        framing: bytes on the wire per byte of a tensor.
        seconds_per_summed_byte: what adding up takes in an all-reduce.

    A tensor that lives at nobody's is reached over a link of its own, with the network's latency
    and bytes per second.

        fs.Network(latency_seconds=1e-4, bytes_per_second=125e6)
        fs.Network(1e-2, 12.5e6, inside=fs.Network.preset("lan-10g"), household_size=8)
        fs.Network(1e-2, 12.5e6, "lan-10g", 8, nearby="lan-1g", neighbourhood_size=32)
        fs.Network(0.04, 125e6, sites=(fs.Site("Oslo", inside="lan-10g"), fs.Site("Rome")))
        fs.Network(0.01, math.inf, uplink=2.5e6, downlink=12.5e6, loss=0.01)
    """

    inside: Link | None = None
    household_size: int | None = None
    nearby: Link | None = None
    neighbourhood_size: int | None = None
    latencies: Matrix | None = None
    bandwidths: Matrix | None = None
    sites: tuple[Site, ...] = ()
    routes: tuple[Route, ...] = ()
    uplink: tuple[float, ...] = ()
    downlink: tuple[float, ...] = ()
    trace: tuple[LinkChange, ...] = ()
    loss: float = 0.0
    framing: float = 1.0
    seconds_per_summed_byte: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_tier("inside", "household_size")
        self._check_tier("nearby", "neighbourhood_size")
        if self.neighbourhood_size is not None:
            rule = "be given where 'neighbourhood_size' is"
            require(self.household_size is not None, "household_size", rule, None)
            rule = f"be a multiple of household_size, {self.household_size}"
            is_one = self.neighbourhood_size % (self.household_size or 1) == 0
            require(is_one, "neighbourhood_size", rule, self.neighbourhood_size)
        self._check_matrix("latencies", lambda value: value >= 0 and math.isfinite(value))
        self._check_matrix("bandwidths", lambda value: value > 0)
        self._check_access("uplink")
        self._check_access("downlink")
        self._check_sites()
        self._check_trace()
        self._check_one_form()
        require_number("loss", self.loss, at_least=0, below=1)
        require_number("framing", self.framing, at_least=1, finite=True)
        summed = self.seconds_per_summed_byte
        require_number("seconds_per_summed_byte", summed, at_least=0, finite=True)

    def _check_tier(self, field: str, size_field: str) -> None:
        """A link and the size of what it is inside of, or neither."""
        link, size = getattr(self, field), getattr(self, size_field)
        together = (link is None) == (size is None)
        require(together, size_field, f"be given together with {field!r}", size)
        if isinstance(link, str):
            link = Network.preset(link)
            self._set(field, link)
        if link is not None:
            rule = "be a link such as fs.Network.preset('lan-10g')"
            require(isinstance(link, Link), field, rule, link)
            self._require_plain(field, link)
            require_integer(size_field, size, 1)

    def _check_matrix(self, field: str, holds: Callable[[float], bool]) -> None:
        rows = getattr(self, field)
        if rows is None:
            return
        rule = "be as many rows of numbers as each has columns"
        rows = _plain_numbers(rows)
        require(_is_sequence(rows) and all(map(_is_sequence, rows)), field, rule, rows)
        require(len(rows) > 0 and {len(row) for row in rows} == {len(rows)}, field, rule, rows)
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                require_number(field, value)
                fits = i == j or holds(value)
                what = "at least 0" if field == "latencies" else "above 0"
                require(fits, field, f"be {what} from rank {i} to rank {j}", value)
        self._set(field, tuple(tuple(map(float, row)) for row in rows))

    def _check_access(self, field: str) -> None:
        speeds = getattr(self, field)
        if isinstance(speeds, int | float):
            speeds = (speeds,)
        rule = "be bytes per second, one for all workers or one per rank"
        speeds = _plain_numbers(speeds)
        require(_is_sequence(speeds), field, rule, speeds)
        for speed in speeds:
            require_number(field, speed, above=0)
        self._set(field, tuple(map(float, speeds)))

    def _check_sites(self) -> None:
        for field, kind in (("sites", Site), ("routes", Route)):
            values = getattr(self, field)
            rule = f"be some such as fs.{kind.__name__}(…)"
            is_fit = _is_sequence(values) and all(isinstance(each, kind) for each in values)
            require(is_fit, field, rule, values)
            self._set(field, tuple(values))

        names = [site.name for site in self.sites]
        require(len(set(names)) == len(names), "sites", "have different names", names)
        for site in self.sites:
            if site.inside is not None:
                self._require_plain("inside", site.inside)
        ends = [(route.source, route.target) for route in self.routes]
        require(len(set(ends)) == len(ends), "routes", "be one for each way", ends)
        for route in self.routes:
            for name in (route.source, route.target):
                require(name in names, "routes", f"be between sites, {', '.join(names)}", name)

    def _check_trace(self) -> None:
        rule = "be some such as fs.LinkChange(10.0, bandwidth=0.5)"
        if isinstance(self.trace, LinkChange):
            self._set("trace", (self.trace,))
        is_fit = _is_sequence(self.trace)
        is_fit = is_fit and all(isinstance(each, LinkChange) for each in self.trace)
        require(is_fit, "trace", rule, self.trace)
        self._set("trace", tuple(self.trace))
        require_in_order(self.trace)
        names = [site.name for site in self.sites]
        for change in self.trace:
            if change.site is not None:
                known = ", ".join(names) or "of which there are none"
                require(change.site in names, "trace", f"name sites, {known}", change.site)

    def _check_one_form(self) -> None:
        """Tiers, a matrix or sites: each says what is between two workers."""
        given = [
            name
            for name, is_there in (
                ("inside", self.inside is not None),
                ("latencies", self.latencies is not None),
                ("bandwidths", self.bandwidths is not None),
                ("sites", bool(self.sites)),
            )
            if is_there
        ]
        if len(given) > 1 and given != ["latencies", "bandwidths"]:
            rule = f"be left out where {given[0]!r} is given"
            require(False, given[-1], rule, getattr(self, given[-1]))

    @staticmethod
    def _require_plain(field: str, link: Link) -> None:
        rule = "be one link, without more of its own"
        is_one = not isinstance(link, Network) or link == Network(*_figures(link))
        require(is_one, field, rule, link)

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    @classmethod
    def preset(cls, name: str) -> Network:
        """A named network: nominal figures of a class of hardware, not a measurement of any."""
        require_name("network", name, PRESETS)
        return PRESETS[name]

    @classmethod
    def read(cls, text: str, field: str = "network") -> Network:
        """A preset by its name, or a network of one's own: `latency=20ms,bandwidth=100Mbit/s`."""
        return _own_network(field, text) if is_own_network(text) else cls.preset(text)

    def as_measured(self) -> Network:
        """The same network with what real all-reduces took beyond the ideal ring: framing, and the
        time for adding up, as fitted to two published points.
        """
        return dataclasses.replace(
            self,
            framing=MEASURED_FRAMING,
            seconds_per_summed_byte=MEASURED_SECONDS_PER_SUMMED_BYTE,
        )

    def in_words(self) -> str:
        """As a link; and what is inside households and neighbourhoods, where that differs, and
        whatever else it has.
        """
        words = [super().in_words(), *self.besides()]
        for name, preset in PRESETS.items():
            if name not in NAMED and preset == self:
                return f"{name} ({'; '.join(words)})"
        return "; ".join(words)

    def besides(self) -> list[str]:
        """What the network has beyond its one link, in words."""
        words = []
        if self.nearby is not None:
            size = self.neighbourhood_size
            words.append(f"{self.nearby.in_words()} inside neighbourhoods of {size}")
        if self.inside is not None:
            words.append(f"{self.inside.in_words()} inside households of {self.household_size}")
        matrix = self.latencies or self.bandwidths
        if matrix is not None:
            words.append(f"a matrix of links between {len(matrix)} ranks")
        if self.sites:
            words.append(f"between sites {', '.join(map(_site_in_words, self.sites))}")
        for field in ("uplink", "downlink"):
            speeds = getattr(self, field)
            if speeds:
                low, high = (shown_speed(each) for each in (min(speeds), max(speeds)))
                words.append(f"{field} {low if low == high else f'{low} to {high}'}")
        if self.trace:
            count = len(self.trace)
            words.append(f"{count} {'change' if count == 1 else 'changes'} in time")
        if self.loss:
            words.append(f"{100 * self.loss:g} % of messages lost")
        if self.framing > 1 or self.seconds_per_summed_byte:
            words.append("with framing and time for sums")
        return words

    @property
    def is_plain(self) -> bool:
        """Whether no two calls can share a link, but those to one shared tensor."""
        more = (self.latencies, self.bandwidths, self.sites, self.uplink, self.downlink, self.trace)
        return not any(more)

    def require_workers(self, workers: int) -> None:
        """Complain of households or neighbourhoods that are not equal, and of a network that does
        not cover all workers. A worker that is alone needs no network.
        """
        if workers == 1:
            return
        for field in ("household_size", "neighbourhood_size"):
            size = getattr(self, field)
            if size is not None:
                rule = f"divide the number of workers, {workers}"
                require(workers % size == 0, field, rule, size)
        for field in ("latencies", "bandwidths"):
            matrix = getattr(self, field)
            if matrix is not None:
                rule = f"have a row for each of the {workers} workers"
                require(len(matrix) >= workers, field, rule, len(matrix))
        for field in ("uplink", "downlink"):
            speeds = getattr(self, field)
            if len(speeds) > 1:
                rule = f"have a value for each of the {workers} workers, or one for all"
                require(len(speeds) >= workers, field, rule, len(speeds))
        if self.sites:
            places = sum(shares(self.sites, workers))
            rule = f"have places for all of the {workers} workers"
            require(places >= workers, "sites", rule, places)
        for index, change in enumerate(self.trace):
            rule = f"name ranks below the number of workers, {workers}, in entry {index + 1}"
            require(all(rank < workers for rank in change.ranks), "trace", rule, change.ranks)

    def between(self, ranks: Sequence[int]) -> Link:
        """The link that a call among `ranks` runs on: that of the slowest pair."""
        tiers = ((self.inside, self.household_size), (self.nearby, self.neighbourhood_size))
        for link, size in tiers:
            if link is not None and size is not None and len({rank // size for rank in ranks}) == 1:
                return self.framed(link)
        return self.framed(self)

    def framed(self, link: Link) -> Link:
        """The link as tensors see it, whose bytes are more on the wire."""
        if self.framing == 1:
            return link
        return Link(link.latency_seconds, link.bytes_per_second / self.framing)


def _figures(link: Link) -> tuple[float, float]:
    return link.latency_seconds, link.bytes_per_second


def _plain_numbers(value: Any) -> Any:
    """Arrays and tensors as lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _site_in_words(site: Site) -> str:
    parts = [] if site.workers is None else [f"{site.workers} workers"]
    if site.inside is not None:
        parts.append(
            f"{shown_speed(site.inside.bytes_per_second)}, "
            f"{shown_seconds(site.inside.latency_seconds)} inside"
        )
    for field in ("uplink", "downlink"):
        if getattr(site, field) is not None:
            parts.append(f"{field} {shown_speed(getattr(site, field))}")
    return f"{site.name} ({', '.join(parts)})" if parts else site.name


def is_own_network(text: str) -> bool:
    """Whether a text says fields of a network, and no name of one."""
    return re.match(r"\s*\w+\s*=", text) is not None


def _own_network(field: str, text: str) -> Network:
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in OWN_FIELDS:
            raise unknown_name("field of a network", name, OWN_FIELDS)
        if name in fields:
            raise InvalidField(f"{name!r} of {field} must not be given twice (got {shown(text)})")
        fields[name] = value
    for name in ("latency", "bandwidth"):
        if name not in fields:
            how = "latency=20ms,bandwidth=100Mbit/s"
            raise InvalidField(f"{name!r} of {field} must be given: {how} (got {shown(text)})")
    uplink, downlink = (
        (_speed(name, fields[name]),) if name in fields else () for name in ("uplink", "downlink")
    )
    loss = _probability(fields["loss"]) if "loss" in fields else 0.0
    return Network(
        read_seconds("latency", fields["latency"]),
        _speed("bandwidth", fields["bandwidth"]),
        uplink=uplink,
        downlink=downlink,
        loss=loss,
    )


def _speed(field: str, text: str) -> float:
    speed = read_bytes_per_second(field, text)
    require(speed > 0, field, "be above 0", text)
    return speed


def _probability(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidField(f"'loss' must be a number such as 0.01 (got {shown(text)})") from None


OWN_FIELDS = ("latency", "bandwidth", "uplink", "downlink", "loss")

PRESETS: dict[str, Network] = {name: Network(*figures) for name, figures in NAMED.items()}

# Orders of magnitude of real places; docs/network.md says where they come from.
PRESETS["one-rack"] = Network(1e-5, 3.125e9, uplink=(3.125e9,), downlink=(3.125e9,))
PRESETS["two-regions"] = Network(
    0.04,
    125e6,
    sites=(
        Site("first", inside=Link(2.5e-4, math.inf)),
        Site("second", inside=Link(2.5e-4, math.inf)),
    ),
    uplink=(1.25e9,),
    downlink=(1.25e9,),
)
PRESETS["home-uplinks"] = Network(0.015, 1.25e9, uplink=(2.5e6,), downlink=(12.5e6,))
PRESETS["phones"] = Network(
    0.03,
    1.25e9,
    sites=(
        Site("5g", uplink=1.875e6, downlink=18.75e6),
        Site("4g", uplink=1e6, downlink=3.75e6),
        Site("weak", uplink=125e3, downlink=625e3),
    ),
    loss=0.01,
)
