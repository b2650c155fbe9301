"""One link: a latency and a speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.fields import require_number
from flockstep.units import shown_seconds, shown_speed


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
        for name, figures in NAMED.items():
            if figures == (self.latency_seconds, self.bytes_per_second):
                return f"{name} ({speed}, {latency})"
        return f"{speed}, {latency}"


# Latency in seconds, bytes per second: nominal figures of a class of hardware.
NAMED: dict[str, tuple[float, float]] = {
    "ideal": (0.0, math.inf),
    "infiniband-200g": (2e-6, 25e9),
    "lan-100g": (1e-5, 12.5e9),
    "lan-10g": (5e-5, 1.25e9),
    "lan-1g": (1e-4, 125e6),
    "wifi": (3e-3, 25e6),
    "wan-100m": (3e-2, 12.5e6),
}
