"""Rules for the fields of specs. Every message names the field, the rule and the value."""

from __future__ import annotations

import math
import os
import sys
import types
import typing
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flockstep.errors import InvalidField, plain_spelling, unknown_name

TYPE_NAMES = {
    types.NoneType: "none",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}

LONGEST_SHOWN = 300  # characters of a value in a message


def shown(value: object) -> str:
    """A value as messages have it: on one line, and the middle of a long one is left out."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no number of more than some thousand digits
        return "one of too many digits"
    if "\n" in text:  # as of a tensor or a model
        text = " ".join(text.split())
    half = LONGEST_SHOWN // 2
    return text if len(text) <= LONGEST_SHOWN else f"{text[:half]}…{text[-half:]}"


def require(holds: bool, field: str, rule: str, value: object) -> None:
    """Raise `'field' must rule (got value)` unless the rule holds."""
    if not holds:
        raise InvalidField(f"{field!r} must {rule} (got {shown(value)})")


def require_integer(field: str, value: object, minimum: int) -> None:
    """A whole number of at least `minimum`; True and 2.0 are not whole numbers here."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidField(f"{field!r} must be a whole number (got {shown(value)})")
    require(value >= minimum, field, f"be at least {minimum}", value)


def require_number(
    field: str,
    value: float,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    finite: bool = False,
) -> None:
    """A number within these bounds; True is no number here, and NaN is within none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidField(f"{field!r} must be a number (got {shown(value)})")
    is_too_large = isinstance(value, int) and abs(value) > sys.float_info.max
    require(not is_too_large, field, "be a number that fits into a float", value)

    bounds = [
        (value > above, above, f"above {above:g}"),
        (value >= at_least, at_least, f"at least {at_least:g}"),
        (value < below, below, f"below {below:g}"),
        (value <= at_most, at_most, f"at most {at_most:g}"),
    ]
    given = [(holds, words) for holds, bound, words in bounds if math.isfinite(bound)]
    if finite:
        given.append((math.isfinite(value), "finite"))
    rule = " and ".join(words for _, words in given)
    if math.isfinite(at_least) and math.isfinite(at_most):
        rule = f"between {at_least:g} and {at_most:g}"
    require(all(holds for holds, _ in given), field, f"be {rule}", value)


def require_choice(field: str, value: object, choices: Collection[object]) -> None:
    require(value in choices, field, "be one of " + ", ".join(map(repr, choices)), value)


def require_name(kind: str, name: object, known: Collection[str]) -> None:
    """A name that is among the known ones."""
    if not isinstance(name, str):
        raise InvalidField(f"{kind!r} must be a name such as {min(known)!r} (got {shown(name)})")
    if name not in known:
        raise unknown_name(kind, name, known)


def known_spelling(kind: str, name: str, known: Collection[str]) -> str:
    """The known name that is meant: `LocalSGD`, the name of a class, is `local_sgd`, too."""
    for each in known:
        if isinstance(name, str) and plain_spelling(each) == plain_spelling(name):
            return each
    require_name(kind, name, known)
    return name


def require_flag(field: str, value: object) -> None:
    require(isinstance(value, bool), field, "be True or False", value)


def require_tensor(field: str, value: object) -> None:
    require(isinstance(value, Tensor), field, "be a tensor", value)


def require_path(field: str, value: object) -> None:
    require(isinstance(value, str | os.PathLike), field, "be a path", value)


def require_model(value: object) -> None:
    """A model whose parameters are there."""
    if not isinstance(value, nn.Module):
        rule = "be an nn.Module, not a class or a function"
        raise InvalidField(f"'model' must {rule} (got {shown(value)})")
    lazy = [name for name, parameter in value.named_parameters() if is_lazy(parameter)]
    rule = "have parameters with shapes: put a batch through a lazy model where it is made"
    require(not lazy, "model", rule, f"{type(value).__name__} with {', '.join(lazy)}")


def require_optimizer(value: object) -> None:
    """An optimizer that was made, of whatever class."""
    is_one = hasattr(value, "param_groups") and hasattr(value, "step")
    require(is_one, "optimizer", "be a torch optimizer, made of the parameters", value)


def number_in(field: str, value: Any) -> float:
    """A number as it is, or that in a tensor of one."""
    if isinstance(value, Tensor):
        got = f"a tensor of shape {tuple(value.shape)}"
        require(value.numel() == 1, field, "be one number", got)
        return float(value.item())
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise InvalidField(f"{field!r} must be one number (got {shown(value)})")


def require_rate(field: str, value: float | Tensor) -> None:
    """A learning rate: a number, or a tensor of one, as torch allows."""
    if isinstance(value, Tensor):
        require(value.numel() == 1, field, "be one number", value)
        value = float(value)
    require_number(field, value, at_least=0, finite=True)


def require_marks(field: str, value: object) -> None:
    """Moments of a training: fractions that increase."""
    rule = "be a tuple of increasing fractions above 0 and below 1"
    require(isinstance(value, tuple), field, rule, value)
    marks: tuple[object, ...] = value if isinstance(value, tuple) else ()
    numbers = [mark for mark in marks if isinstance(mark, int | float) and 0 < mark < 1]
    require(
        len(numbers) == len(marks) and all(a < b for a, b in pairwise(numbers)), field, rule, value
    )


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type that a hint is."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def fitted(field: str, value: Any, hint: Any) -> Any:
    """A plain value as the type of its field has it: 1 is 1.0 in a field of floats, a list a tuple.

    Raises where it does not fit."""
    kinds = kinds_of(hint)

    for kind in kinds:
        if kind is Any or (value is None and kind is types.NoneType):
            return value
        if type(value) is kind and kind in (bool, int, float, str):
            return value

    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if int in kinds and is_number and isinstance(value, int):
        return int(value)
    if float in kinds and is_number:
        require_number(field, value)
        return float(value)
    if str in kinds and isinstance(value, str):
        return str(value)

    for kind in kinds:
        origin = typing.get_origin(kind)
        if origin is Literal and value in typing.get_args(kind):
            return value
        if origin is tuple and isinstance(value, tuple | list):
            return _fitted_tuple(field, tuple(value), kind)
        if list in (origin, kind) and isinstance(value, tuple | list):
            (item_hint,) = typing.get_args(kind) or (Any,)
            return [fitted(field, item, item_hint) for item in value]
        if is_mapping(origin) and isinstance(value, Mapping):
            key_hint, value_hint = typing.get_args(kind)
            return {
                fitted(field, key, key_hint): fitted(field, item, value_hint)
                for key, item in value.items()
            }

        is_class = isinstance(origin or kind, type) and kind not in (int, float, str, bool)
        if is_class and isinstance(value, origin or kind):
            return value

    raise InvalidField(f"{field!r} must be {type_names(hint)} (got {shown(value)})")


def _fitted_tuple(field: str, value: tuple[Any, ...], hint: Any) -> tuple[Any, ...]:
    hints = typing.get_args(hint)
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(value)
    require(len(value) == len(hints), field, f"be {len(hints)} values", value)
    return tuple(fitted(field, item, each) for item, each in zip(value, hints, strict=True))


def type_names(hint: Any) -> str:
    """`a whole number or none`: what a field takes, in words. Tensors are left out: texts cannot
    give them.
    """
    kinds = [kind for kind in kinds_of(hint) if kind is not Tensor]
    return " or ".join(map(_type_name, kinds))


def _type_name(kind: Any) -> str:
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    origin = typing.get_origin(kind)
    if origin is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if origin in (tuple, list):
        return "numbers such as 0.5,0.75"
    if is_mapping(origin):
        return "a mapping such as {3: 2.0}"
    return getattr(kind, "__name__", str(kind))


def is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)
