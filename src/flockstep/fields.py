"""Rules for the fields of specs. Every message names the field, the rule and the value."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import pairwise

from torch import Tensor

from flockstep.errors import InvalidField


def require(holds: bool, field: str, rule: str, value: object) -> None:
    """Raise `'field' must rule (got value)` unless the rule holds."""
    if not holds:
        raise InvalidField(f"{field!r} must {rule} (got {value!r})")


def require_integer(field: str, value: object, minimum: int) -> None:
    """A whole number of at least `minimum`; True and 2.0 are not whole numbers here."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidField(f"{field!r} must be a whole number (got {value!r})")
    require(value >= minimum, field, f"be at least {minimum}", value)


def require_between(field: str, value: float, low: float, high: float) -> None:
    """A number in the closed interval [low, high]; NaN is in no interval."""
    require_number(field, value)
    require(low <= value <= high, field, f"be between {low:g} and {high:g}", value)


def require_number(field: str, value: object) -> None:
    require(
        isinstance(value, int | float) and not isinstance(value, bool), field, "be a number", value
    )


def require_choice(field: str, value: object, choices: Collection[object]) -> None:
    require(value in choices, field, "be one of " + ", ".join(map(repr, choices)), value)


def require_above(field: str, value: float, bound: float) -> None:
    """A finite number above `bound`."""
    require_number(field, value)
    require(bound < value < math.inf, field, f"be above {bound:g} and finite", value)


def require_at_least(field: str, value: float, bound: float) -> None:
    """A finite number of at least `bound`."""
    require_number(field, value)
    require(bound <= value < math.inf, field, f"be at least {bound:g} and finite", value)


def require_share(field: str, value: float) -> None:
    """A number that is at least 0 and below 1, as momentum is."""
    require_number(field, value)
    require(0 <= value < 1, field, "be at least 0 and below 1", value)


def require_flag(field: str, value: object) -> None:
    require(isinstance(value, bool), field, "be True or False", value)


def require_rate(field: str, value: float | Tensor) -> None:
    """A learning rate: a number, or a tensor of one, as torch allows."""
    if isinstance(value, Tensor):
        require(value.numel() == 1, field, "be one number", value)
        value = float(value)
    require_at_least(field, value, 0)


def require_marks(field: str, value: object) -> None:
    """Moments of a training: fractions that increase."""
    rule = "be a tuple of increasing fractions above 0 and below 1"
    require(isinstance(value, tuple), field, rule, value)
    marks: tuple[object, ...] = value if isinstance(value, tuple) else ()
    numbers = [mark for mark in marks if isinstance(mark, int | float) and 0 < mark < 1]
    require(
        len(numbers) == len(marks) and all(a < b for a, b in pairwise(numbers)), field, rule, value
    )
