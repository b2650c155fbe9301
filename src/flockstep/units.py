"""Times, speeds and sizes as people write and read them: `20ms`, `100 Mbit/s`, `3.229 MB`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from flockstep.errors import InvalidField
from flockstep.fields import shown

# Fractions, so that 100us is the float 0.0001 and not one beside it.
SECONDS: dict[str, Fraction] = {
    "s": Fraction(1),
    "ms": Fraction(1, 1_000),
    "us": Fraction(1, 1_000_000),
    "µs": Fraction(1, 1_000_000),
}
BYTES_PER_SECOND: dict[str, Fraction] = {
    "bit/s": Fraction(1, 8),
    "kbit/s": Fraction(1_000, 8),
    "Mbit/s": Fraction(1_000_000, 8),
    "Gbit/s": Fraction(1_000_000_000, 8),
    "B/s": Fraction(1),
    "kB/s": Fraction(1_000),
    "MB/s": Fraction(1_000_000),
    "GB/s": Fraction(1_000_000_000),
}
_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{0,20})?) ?([a-zA-Zµ/]+)")


def read_seconds(field: str, text: str) -> float:
    """`20ms` is 0.02."""
    return _quantity(field, text, SECONDS, "a time such as 20ms, 0.5s or 100us")


def read_bytes_per_second(field: str, text: str) -> float:
    """`100Mbit/s` is 12.5e6, and so is `12.5MB/s`."""
    rule = "a speed such as 100Mbit/s, 1Gbit/s or 12.5MB/s"
    return _quantity(field, text, BYTES_PER_SECOND, rule)


def is_quantity(text: str) -> bool:
    """Whether a text is a number with a unit, whatever unit it is."""
    return _QUANTITY.fullmatch(text.strip()) is not None


def _quantity(field: str, text: str, units: Mapping[str, Fraction], rule: str) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2] not in units:
        raise InvalidField(f"{field!r} must be {rule} (got {shown(text)})")
    return float(Fraction(found[1]) * units[found[2]])


def shown_number(value: float) -> str:
    """Four digits that count: `0.7778`, `12,345`."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def shown_seconds(seconds: float) -> str:
    """`0.1 ms`, for latencies and the times of steps."""
    if seconds >= 1 or seconds == 0:
        return f"{shown_number(seconds)} s"
    if seconds >= 1e-4:
        return f"{shown_number(seconds * 1e3)} ms"
    return f"{shown_number(seconds * 1e6)} µs"


def shown_speed(bytes_per_second: float) -> str:
    """`1 Gbit/s`."""
    if math.isinf(bytes_per_second):
        return "no limit"
    bits = 8 * bytes_per_second
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{shown_number(bits / size)} {unit}"
    return f"{shown_number(bits)} bit/s"


def shown_megabytes(nbytes: float) -> str:
    """`3.229 MB`; of a million bytes, as links count."""
    return f"{shown_number(nbytes / 1e6)} MB"
