"""Results and errors as they travel from host to host: plain values and tensors, never a pickle.

A value becomes a tree of JSON, with tensors and arrays beside it. Modules and dataclasses travel as their contents: the
receiver, whose own worker ran the same program, fills them into what that worker returned in the same place.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flockstep import errors
from flockstep.errors import FlockstepError, WorkerError, WorkerLost, worker_error

PLAIN = (type(None), bool, int, float, str)


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """A tree of JSON for `value`; its tensors are appended to the list."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, np.ndarray | np.generic):
        return {"array": encode(torch.from_numpy(np.ascontiguousarray(value)), tensors)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.Size):
        return {"tuple": list(value)}
    if type(value) in (list, tuple, set):
        return {type(value).__name__: [encode(each, tensors) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, tensors), encode(each, tensors)] for key, each in value.items()]}
    if isinstance(value, nn.Module):
        return {"module": encode(value.state_dict(), tensors)}
    if isinstance(value, FlockstepError):
        return {"error": encode_error(value)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"dataclass": encode(fields, tensors)}
    raise FlockstepError(
        f"a {type(value).__name__} cannot be sent to another host: "
        "return numbers, texts, tensors, modules, and lists, tuples or dicts of them"
    )


def decode(tree: Any, tensors: list[Tensor], like: Any = None) -> Any:
    """The value of a tree. Modules and dataclasses are made `like` those in the same place, or stay dicts."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "array":
            return decode(content, tensors).numpy()
        case "bytes":
            return bytes.fromhex(content)
        case "list" | "tuple" | "set":
            likes = like if isinstance(like, list | tuple) and len(like) == len(content) else [None] * len(content)
            made = [decode(each, tensors, each_like) for each, each_like in zip(content, likes, strict=True)]
            return {"list": list, "tuple": tuple, "set": set}[kind](made)
        case "dict":
            pairs = [(decode(key, tensors), each) for key, each in content]
            known = like if isinstance(like, dict) else {}
            return {key: decode(each, tensors, known.get(key)) for key, each in pairs}
        case "module":
            state = decode(content, tensors)
            if not isinstance(like, nn.Module):
                return state
            module = copy.deepcopy(like)
            module.load_state_dict(state)
            return module
        case "dataclass":
            known = vars(like) if dataclasses.is_dataclass(like) and not isinstance(like, type) else {}
            fields = {key: decode(each, tensors, known.get(key)) for key, each in content["dict"]}
            return dataclasses.replace(like, **fields) if known.keys() == fields.keys() else fields
        case "error":
            return decode_error(content)
    raise FlockstepError(f"a result holds an unknown kind of value, {kind!r}")


def encode_error(error: BaseException) -> dict[str, Any]:
    """What is known of an error that `launch` raises, in plain values."""
    cause = error.__cause__
    notes = getattr(cause or error, "__notes__", [])
    known = type(error).__name__ if type(error).__module__ == errors.__name__ else "WorkerError"
    fields = {name: getattr(error, name, None) for name in ("rank", "exit_code", "step", "seconds")}
    raised = {} if cause is None else {"cause": type(cause).__name__, "cause_text": str(cause)}
    return {"type": known, "text": str(error), "notes": notes, **fields, **raised}


def decode_error(said: dict[str, Any]) -> FlockstepError:
    """The error again: of its own type if that is Python's or ours, and a WorkerError otherwise."""
    cause = getattr(builtins, str(said.get("cause")), None)
    kind = getattr(errors, said["type"], None)
    error: FlockstepError
    if isinstance(cause, type) and issubclass(cause, Exception):
        error = worker_error(said["rank"], _raised(cause, said["cause_text"]))
    elif kind is WorkerLost:
        error = WorkerLost(said["text"], said["rank"], said["exit_code"], said["step"], said["seconds"])
    elif isinstance(kind, type) and issubclass(kind, FlockstepError) and not issubclass(kind, WorkerError):
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
