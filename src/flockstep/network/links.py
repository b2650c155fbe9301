"""Links, networks of one to three tiers, and the named presets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.errors import InvalidField, unknown_name
from flockstep.fields import require, require_integer, require_name, require_number, shown
from flockstep.units import read_bytes_per_second, read_seconds, shown_seconds, shown_speed


@dataclass(frozen=True)
class Link:
    """A connection that needs `latency_seconds` plus the time for the bytes, for each message."""

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        require_number("latency_seconds", self.latency_seconds, at_least=0, finite=True)
        require_number("bytes_per_second", self.bytes_per_second, above=0)

    def seconds(self, nbytes: float) -> float:
        """α + nβ: one message of `nbytes`."""
        return self.latency_seconds + nbytes / self.bytes_per_second

    def in_words(self) -> str:
        """`lan-1g (1 Gbit/s, 0.1 ms)`; a link that is no preset has figures alone."""
        speed, latency = shown_speed(self.bytes_per_second), shown_seconds(self.latency_seconds)
        for name, preset in PRESETS.items():
            if preset == Network(self.latency_seconds, self.bytes_per_second):
                return f"{name} ({speed}, {latency})"
        return f"{speed}, {latency}"


@dataclass(frozen=True)
class Network(Link):
    """The link between any two workers, with optional faster tiers inside households and
    neighbourhoods.

    With `inside` and `household_size`, ranks 0 … G−1 are the first household, G … 2G−1 the second,
    and so on; with `nearby` and `neighbourhood_size`, a multiple of G, so are neighbourhoods. A
    call among workers of one household runs on `inside`, one among workers of one neighbourhood on
    `nearby`, and every other call on the outer link. Both may be names of presets.

        fs.Network(latency_seconds=1e-4, bytes_per_second=125e6)
        fs.Network(1e-2, 12.5e6, inside=fs.Network.preset("lan-10g"), household_size=8)
        fs.Network(1e-2, 12.5e6, "lan-10g", 8, nearby="lan-1g", neighbourhood_size=32)
    """

    inside: Link | None = None
    household_size: int | None = None
    nearby: Link | None = None
    neighbourhood_size: int | None = None

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

    def _check_tier(self, field: str, size_field: str) -> None:
        """A link and the size of what it is inside of, or neither."""
        link, size = getattr(self, field), getattr(self, size_field)
        together = (link is None) == (size is None)
        require(together, size_field, f"be given together with {field!r}", size)
        if isinstance(link, str):
            link = Network.preset(link)
            object.__setattr__(self, field, link)
        if link is not None:
            rule = "be a link such as fs.Network.preset('lan-10g')"
            require(isinstance(link, Link), field, rule, link)
            require_integer(size_field, size, 1)

    @classmethod
    def preset(cls, name: str) -> Network:
        """A named network: nominal figures of a class of hardware, not a measurement of any."""
        require_name("network", name, PRESETS)
        return PRESETS[name]

    @classmethod
    def read(cls, text: str, field: str = "network") -> Network:
        """A preset by its name, or a network of one's own: `latency=20ms,bandwidth=100Mbit/s`."""
        return _own_network(field, text) if is_own_network(text) else cls.preset(text)

    def in_words(self) -> str:
        """As a link; and what is inside households and neighbourhoods, where that differs."""
        words = [super().in_words()]
        if self.nearby is not None:
            size = self.neighbourhood_size
            words.append(f"{self.nearby.in_words()} inside neighbourhoods of {size}")
        if self.inside is not None:
            words.append(f"{self.inside.in_words()} inside households of {self.household_size}")
        return "; ".join(words)

    def require_workers(self, workers: int) -> None:
        """Complain of households or neighbourhoods that are not equal. A worker that is alone needs
        no network.
        """
        for field in ("household_size", "neighbourhood_size"):
            size = getattr(self, field)
            if size is not None and workers > 1:
                rule = f"divide the number of workers, {workers}"
                require(workers % size == 0, field, rule, size)

    def between(self, ranks: Sequence[int]) -> Link:
        """The link that a call among `ranks` runs on: that of the slowest pair."""
        tiers = ((self.inside, self.household_size), (self.nearby, self.neighbourhood_size))
        for link, size in tiers:
            if link is not None and size is not None and len({rank // size for rank in ranks}) == 1:
                return link
        return self


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
    for name in OWN_FIELDS:
        if name not in fields:
            how = "latency=20ms,bandwidth=100Mbit/s"
            raise InvalidField(f"{name!r} of {field} must be given: {how} (got {shown(text)})")
    latency = read_seconds("latency", fields["latency"])
    speed = read_bytes_per_second("bandwidth", fields["bandwidth"])
    require(speed > 0, "bandwidth", "be above 0", fields["bandwidth"])
    return Network(latency, speed)


OWN_FIELDS = ("latency", "bandwidth")

PRESETS: dict[str, Network] = {
    "ideal": Network(0.0, math.inf),
    "infiniband-200g": Network(2e-6, 25e9),
    "lan-100g": Network(1e-5, 12.5e9),
    "lan-10g": Network(5e-5, 1.25e9),
    "lan-1g": Network(1e-4, 125e6),
    "wifi": Network(3e-3, 25e6),
    "wan-100m": Network(3e-2, 12.5e6),
}
