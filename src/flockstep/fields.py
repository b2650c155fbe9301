"""Rules for the fields of specs. Every message names the field, the rule and the value."""

from __future__ import annotations

from collections.abc import Collection

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
    require(isinstance(value, int | float) and not isinstance(value, bool), field, "be a number", value)


def require_choice(field: str, value: object, choices: Collection[object]) -> None:
    require(value in choices, field, "be one of " + ", ".join(map(repr, choices)), value)
