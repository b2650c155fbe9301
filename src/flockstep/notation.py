"""Specs from text, as the command line and files give them: `top_k(ratio=0.01)`, `warmup(5) *
cosine`.
"""

from __future__ import annotations

import ast
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flockstep.codecs import Codec, find_codec
from flockstep.data import Assignment, BatchGrowth, find_assignment
from flockstep.errors import InvalidField, unknown_name
from flockstep.schedules import Schedule, find_schedule


def _find_growth(name: str) -> type[BatchGrowth]:
    if name != BatchGrowth.name:
        raise unknown_name("batch size", name, [BatchGrowth.name])
    return BatchGrowth


# What a field may hold besides plain values, how its class is found by name, and an example for who
# does not know.
KINDS: dict[type, tuple[Callable[[str], type], str]] = {
    Codec: (find_codec, "a codec such as one_bit or top_k(ratio=0.01)"),
    Assignment: (find_assignment, "an assignment such as disjoint or medium_coarse(copies=2)"),
    Schedule: (find_schedule, "a schedule such as cosine or warmup(epochs=5) * step_decay"),
    BatchGrowth: (_find_growth, "a whole number, or batch_growth(initial=32, at=(0.5,), factor=4)"),
}


def make_spec(kind: Any, name: str, texts: Mapping[str, str], how: str) -> Any:
    """A dataclass whose fields are read from texts. `how` tells how to give the field that is
    put in its braces.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in texts:
        if key not in fields:
            raise unknown_name(f"field of {name}", key, fields)
    for field in fields.values():
        is_needed = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if is_needed and field.name not in texts:
            raise InvalidField(f"{field.name!r} of {name} must be given: {how.format(field.name)}")
    return kind(**{key: read_value(key, text, hints[key]) for key, text in texts.items()})


def read_value(field: str, text: str, hint: Any) -> Any:
    """Read `text` as what the field's type says: numbers, a text, a truth value, a spec such as
    a codec, or none.
    """
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if text.lower() == "none" and types.NoneType in kinds:
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in KINDS:
        if kind in kinds:
            return read_spec(field, text, kind)
    for kind in (int, float, str):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        return _read_tuple(field, text)
    names = " or ".join("none" if kind is types.NoneType else kind.__name__ for kind in kinds)
    raise InvalidField(f"{field!r} must be {names} (got {text!r})")


def read_batch_size(field: str, text: str) -> int | BatchGrowth:
    """`32`, or `batch_growth(initial=32, at=(0.5, 0.75), factor=10)`."""
    try:
        return int(text)
    except ValueError:
        growth: BatchGrowth = read_spec(field, text, BatchGrowth)
        return growth


def read_spec(field: str, text: str, kind: type) -> Any:
    """A spec of that kind: `one_bit`, `top_k(ratio=0.01)`, `top_k(0.01)`, `warmup(5) *
    step_decay(at=(0.3, 0.6))`.
    """
    try:
        return _made(field, text, ast.parse(text.strip(), mode="eval").body, kind)
    except (SyntaxError, _NotASpec):
        raise InvalidField(f"{field!r} must be {KINDS[kind][1]} (got {text!r})") from None


def read_settings(settings: Sequence[str]) -> dict[str, str]:
    """`["period=8"]` gives `{"period": "8"}`."""
    values: dict[str, str] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise InvalidField(f"'--set' must be FIELD=VALUE (got {setting!r})")
        values[key] = text
    return values


class _NotASpec(Exception):
    """The text is an expression, but not of this kind."""


def _made(field: str, whole: str, node: ast.expr, kind: type) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and kind is Schedule:
        return _made(field, whole, node.left, kind) * _made(field, whole, node.right, kind)
    call = node if isinstance(node, ast.Call) else None
    named = call.func if call else node
    if not isinstance(named, ast.Name):
        raise _NotASpec
    found = KINDS[kind][0](named.id)
    known = [each.name for each in dataclasses.fields(found)]
    values = call.args if call else []
    if len(values) > len(known):
        raise InvalidField(
            f"{field!r} must give {named.id} at most {len(known)} values (got {whole!r})"
        )
    texts = {key: _text(value) for key, value in zip(known, values, strict=False)}
    for keyword in call.keywords if call else []:
        if keyword.arg is None or keyword.arg in texts:
            raise _NotASpec
        texts[keyword.arg] = _text(keyword.value)
    return make_spec(found, named.id, texts, f"{field}={named.id}({{}}=…)")


def _text(node: ast.expr) -> str:
    """As it was written, but for the quotes of a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)


def _read_tuple(field: str, text: str) -> tuple[float, ...]:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = None
    values = value if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(number, int | float) for number in values):
        raise InvalidField(f"{field!r} must be numbers such as 0.5,0.75 (got {text!r})")
    return tuple(values)
