"""Specs from text, as the command line and files give them: `top_k(ratio=0.01)`."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from flockstep.codecs import Codec, find_codec
from flockstep.errors import InvalidField, unknown_name

CALL = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def make_spec(kind: Any, name: str, texts: Mapping[str, str], how: str) -> Any:
    """A dataclass whose fields are read from texts. `how` tells how to give the field that is put in its braces."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in texts:
        if key not in fields:
            raise unknown_name(f"field of {name}", key, fields)
    for field in fields.values():
        if field.default is dataclasses.MISSING and field.name not in texts:
            raise InvalidField(f"{field.name!r} of {name} must be given: {how.format(field.name)}")
    return kind(**{key: read_value(key, text, hints[key]) for key, text in texts.items()})


def read_value(field: str, text: str, hint: Any) -> Any:
    """Read `text` as what the field's type says: a number, a text, a truth value, a codec, or none."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if text.lower() == "none" and types.NoneType in kinds:
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if Codec in kinds:
        return read_codec(field, text)
    for kind in (int, float, str):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    names = " or ".join("none" if kind is types.NoneType else kind.__name__ for kind in kinds)
    raise InvalidField(f"{field!r} must be {names} (got {text!r})")


def read_codec(field: str, text: str) -> Codec:
    """`one_bit`, `top_k(ratio=0.01)` or `top_k(0.01)`."""
    parts = CALL.fullmatch(text)
    if parts is None:
        raise InvalidField(f"{field!r} must be a codec such as one_bit or top_k(ratio=0.01) (got {text!r})")
    name, inside = parts[1], (parts[2] or "").strip()
    kind = find_codec(name)
    known = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    texts: dict[str, str] = {}
    for place, argument in enumerate(inside.split(",") if inside else []):
        key, equals, value = argument.partition("=")
        if not equals and place >= len(known):
            raise InvalidField(f"{field!r} must give {name} at most {len(known)} values (got {text!r})")
        texts[key.strip() if equals else known[place]] = (value if equals else argument).strip()
    made: Codec = make_spec(kind, name, texts, f"{field}={name}({{}}=…)")
    return made
