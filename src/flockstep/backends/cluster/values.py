"""Results and errors as they travel from host to host: plain values and tensors, never a pickle.

A value becomes a tree of JSON, with tensors and arrays beside it. Modules and dataclasses travel as
their contents: the receiver, whose own worker ran the same program, fills them into what that
worker returned in the same place."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import reprlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flockstep import errors
from flockstep.backends.cluster.messages import (
    Schema,
    is_number,
    is_text,
    is_texts,
    is_whole,
    or_none,
    require_fields,
)
from flockstep.backends.cluster.wire import WireError, require_sendable
from flockstep.comm import Gathered
from flockstep.errors import (
    FlockstepError,
    WorkerError,
    WorkerLost,
    worker_error,
)

PLAIN = (type(None), bool, int, float, str)
MAX_TEXT = 100_000  # characters of an error's text, or of a note to it


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """A tree of JSON for `value`; its tensors are appended to the list."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        require_sendable(value.dtype, tuple(value.shape))
        tensors.append(value.detach().cpu().contiguous())
        return {"tensor": len(tensors) - 1}
    if (
        isinstance(value, np.ndarray | np.generic)
        and value.dtype.kind in "biuf"
        and value.itemsize <= 8
    ):
        # A copy: torch wants the machine's order of bytes, and memory that it may write.
        array = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        return {
            "array" if isinstance(value, np.ndarray) else "scalar": encode(
                torch.from_numpy(array), tensors
            )
        }
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.Size):
        return {"tuple": list(value)}
    if type(value) in (list, tuple, Gathered):  # what was gathered arrives as a plain list
        kind = "tuple" if type(value) is tuple else "list"
        return {kind: [encode(each, tensors) for each in value]}
    if type(value) is set:
        return {"set": [_encode_key(each, tensors) for each in value]}
    if isinstance(value, dict):
        return {
            "dict": [
                [_encode_key(key, tensors), encode(each, tensors)] for key, each in value.items()
            ]
        }
    if isinstance(value, nn.Module):
        return {"module": [_name(value), encode(value.state_dict(), tensors)]}
    if isinstance(value, FlockstepError):
        return {"error": encode_error(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"dataclass": [_name(value), encode(_fields(value), tensors)]}
    raise FlockstepError(
        f"a {type(value).__name__} cannot be sent to another host: "
        "return numbers, texts, tensors, NumPy arrays, modules, and lists, tuples or dicts of them"
    )


def decode(tree: Any, tensors: list[Tensor], like: Any = None) -> Any:
    """The value of a tree. Modules and dataclasses are made `like` those in the same place, or
    stay dicts.
    """
    try:
        return _decode(tree, tensors, like)
    except RecursionError:
        raise WireError("a result of too many levels") from None


def _decode(tree: Any, tensors: list[Tensor], like: Any = None) -> Any:
    if type(tree) in PLAIN:
        return tree
    ((kind, content),) = (
        tree.items() if isinstance(tree, dict) and len(tree) == 1 else ((None, None),)
    )
    match kind, content:
        case "tensor", int(index) if 0 <= index < len(tensors):
            return tensors[index]
        case "array" | "scalar", {"tensor": int(index)} if 0 <= index < len(tensors):
            return _array(kind, tensors[index])
        case "bytes", str(digits) if len(digits) % 2 == 0 and set(digits) <= set(
            "0123456789abcdef"
        ):
            return bytes.fromhex(digits)
        case "list" | "tuple", list(trees):
            likes = (
                like
                if isinstance(like, list | tuple) and len(like) == len(trees)
                else [None] * len(trees)
            )
            made = [
                _decode(each, tensors, each_like)
                for each, each_like in zip(trees, likes, strict=True)
            ]
            return made if kind == "list" else tuple(made)
        case "set", list(trees) if all(map(_is_key, trees)):
            return {_decode(each, tensors) for each in trees}
        case "dict", list(pairs) if all(map(_is_pair, pairs)):
            known = like if isinstance(like, dict) else {}
            keys = [_decode(key, tensors) for key, _ in pairs]
            return {
                key: _decode(each, tensors, known.get(key))
                for key, (_, each) in zip(keys, pairs, strict=True)
            }
        case "module", [str(name), {"dict": _} as state]:
            return _module(name, _decode(state, tensors), like)
        case "dataclass", [str(name), {"dict": _} as fields]:
            is_alike = (
                dataclasses.is_dataclass(like)
                and not isinstance(like, type)
                and _name(like) == name
            )
            known = _fields(like) if is_alike else {}
            return _dataclass(_decode(fields, tensors, known), like if is_alike else None)
        case "error", dict(said):
            return decode_error(said)
    raise WireError(f"a result holds what is no value: {reprlib.repr(tree)}")


def _encode_key(value: Any, tensors: list[Tensor]) -> Any:
    """Of a dict, or a member of a set: the receiver must be able to tell them apart as the
    sender does.
    """
    tree = encode(value, tensors)
    if not _is_key(tree):
        raise FlockstepError(
            f"a {type(value).__name__} cannot be sent to another host "
            "as the key of a dict or in a set"
        )
    return tree


def _is_key(tree: Any) -> bool:
    match tree:
        case {"tuple": list(trees)}:
            return all(map(_is_key, trees))
        case {"bytes": _} | {"scalar": _}:
            return True
    return type(tree) in PLAIN


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _is_key(pair[0])


def _array(kind: str, tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16 or (kind == "scalar" and tensor.ndim):
        raise WireError(
            f"a result holds what is no {kind}: {tensor.dtype} of {tuple(tensor.shape)}"
        )
    return tensor.numpy() if kind == "array" else tensor.numpy()[()]


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _module(name: str, state: dict[str, Any], like: Any) -> Any:
    """A module with this state, or the state itself where there is no module that it fits."""
    if (
        not isinstance(like, nn.Module)
        or _name(like) != name
        or _forms(like.state_dict()) != _forms(state)
    ):
        return state
    module = copy.deepcopy(like)
    module.load_state_dict(state)
    return module


def _forms(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: (each.dtype, each.shape) if isinstance(each, Tensor) else None
        for key, each in state.items()
    }


def _dataclass(fields: dict[str, Any], like: Any) -> Any:
    """A dataclass with these fields, or the fields themselves where there is none like it."""
    if like is None or _fields(like).keys() != fields.keys():
        return fields
    # Neither its constructor, which may want other arguments, nor its checks run again.
    made = copy.copy(like)
    for name, value in fields.items():
        object.__setattr__(made, name, value)  # also of a frozen one
    return made


def encode_error(error: BaseException) -> dict[str, Any]:
    """What is known of an error that `launch` raises, in plain values."""
    cause = error.__cause__
    notes = [
        note[:MAX_TEXT]
        for note in getattr(cause or error, "__notes__", [])
        if isinstance(note, str)
    ]
    known = type(error).__name__ if type(error).__module__ == errors.__name__ else "WorkerError"
    figures = {
        name: getattr(error, name, None)
        for name in ("rank", "exit_code", "step", "seconds", "frozen_seconds")
    }
    builtin = next(
        (kind.__name__ for kind in type(cause).__mro__ if kind.__module__ == builtins.__name__),
        None,
    )
    return {
        "type": known,
        "text": str(error)[:MAX_TEXT],
        "notes": notes,
        **{
            name: figure if type(figure) in (int, float) else None
            for name, figure in figures.items()
        },
        # Of the type of its cause that other hosts know; only a WorkerError is of its cause's type.
        "cause": builtin if known == "WorkerError" and cause is not None else None,
        "cause_text": str(cause)[:MAX_TEXT],
    }


_ERROR: Schema = {
    "type": is_text,
    "text": is_text,
    "notes": is_texts,
    "rank": or_none(is_whole),
    "exit_code": or_none(is_whole),
    "step": or_none(is_whole),
    "seconds": or_none(is_number),
    "frozen_seconds": or_none(is_number),
    "cause": or_none(is_text),
    "cause_text": is_text,
}


def decode_error(said: dict[str, Any]) -> FlockstepError:
    """The error again: ours of its own type, others of the nearest type that Python itself has."""
    require_fields("an error", said, _ERROR)
    cause = getattr(builtins, str(said["cause"]), None)
    kind = getattr(errors, said["type"], None)
    error: FlockstepError
    if isinstance(cause, type) and issubclass(cause, Exception):
        error = worker_error(said["rank"], _raised(cause, said["cause_text"]))
        error.args = (said["text"],)  # which names the type that it really was
    elif kind is WorkerLost:
        error = WorkerLost(
            said["text"],
            said["rank"],
            said["exit_code"],
            said["step"],
            said["seconds"],
            said["frozen_seconds"],
        )
    elif (
        isinstance(kind, type)
        and issubclass(kind, FlockstepError)
        and not issubclass(kind, WorkerError)
    ):
        error = kind(said["text"])
    else:
        error = WorkerError(said["text"], said["rank"])
    for note in said["notes"]:
        (error.__cause__ or error).add_note(note)
    return error


def _raised(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:  # UnicodeDecodeError and its like need more than a text
        return RuntimeError(text)
