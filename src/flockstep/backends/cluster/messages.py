"""What workers and launchers may say to the coordinator, field by field: checked once, when it
arrives.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from flockstep.backends.cluster.wire import DTYPES, WireError

Schema = Mapping[str, Callable[[Any], bool]]
"""The fields of a message, and what must hold for each."""


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return is_whole(value) and 0 <= value < 1 << 63


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def is_message(value: Any) -> bool:
    """What `send` says of its tensor: its dtype's place in the list, and its number of elements."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(map(is_count, value))
        and value[0] < len(DTYPES)
    )


def is_exit_code(value: Any) -> bool:
    return is_whole(value) and -128 < value < 256


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_count, value.values()))


def is_anything(_: Any) -> bool:
    return True


def or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


_WAIT: Schema = {"waits_in": is_text, "passed": is_counts}
_LOCK: Schema = {"lock": is_text, "group": is_text}
_JOIN: Schema = {
    "group": is_text,
    "seq": is_count,
    "call": is_text,
    "signature": is_text,
    "must": is_text,
    "data": or_none(is_whole),
    "root": or_none(is_count),
    "moves": is_flag,
    "late": is_flag,
    **_WAIT,
}

FROM_WORKERS: Mapping[str, Schema] = {
    "began": {},
    "steps": {"steps": is_count},
    "tell": {"text": is_text},
    "join": _JOIN,
    "moved": {"group": is_text, "seq": is_count},
    "report": {"group": is_text, "seq": is_count, "ok": is_flag, **_WAIT},
    "send": {"peer": is_count, "group": is_text, "message": is_message, **_WAIT},
    "receive": {"peer": is_count, "group": is_text, **_WAIT},
    "taken": {"peer": is_count, "group": is_text},
    "lock": {**_LOCK, "in_turn": is_flag, **_WAIT},
    "unlock": _LOCK,
    "retire": _LOCK,
    "watch": _WAIT,
    "look": {},
    "seen": {},
    "raise": {},
    "end": _WAIT,
}

FROM_LAUNCHERS: Mapping[str, Schema] = {
    # `values.decode` knows what a tree may be.
    "result": {"tree": is_anything, "tensors": is_count},
    "lost": {
        "exit_code": or_none(is_exit_code),
        "step": or_none(is_count),
        "frozen_seconds": or_none(is_number),
    },
    "raised": {"error": is_object},  # and `values.decode_error` what an error is
    "beat": {},
}


def require_schema(said: Mapping[str, Any], schemas: Mapping[str, Schema]) -> None:
    """Raise a `WireError` unless `said` has just the fields that what it wants to `do` needs."""
    do = said.get("do")
    if not isinstance(do, str) or do not in schemas:
        raise WireError(f"nobody can do {reprlib.repr(do)} here")
    require_fields(
        f"a message to {do!r}", {name: said[name] for name in said if name != "do"}, schemas[do]
    )


def require_fields(what: str, said: Mapping[str, Any], schema: Schema) -> None:
    """Raise a `WireError` unless `said` has just the fields of the schema."""
    if said.keys() != schema.keys():
        raise WireError(f"the fields of {what} are wrong (got {reprlib.repr(sorted(said))})")
    for name, holds in schema.items():
        if not holds(said[name]):
            raise WireError(f"{name!r} of {what} is wrong (got {reprlib.repr(said[name])})")
