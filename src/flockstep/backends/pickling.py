"""Python objects on their way from process to process of one run: a pickle, and beside it the
memory of tensors and arrays, which need not be copied.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from flockstep.errors import InvalidField
from flockstep.fields import shown


def dump(value: Any, called: str) -> list[memoryview]:
    """The pickle of `value`, then the memory that it refers to. `called` is what an error calls
    it.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:  # whatever the objects that it meets raise
        path, part = _unpicklable_part(value, called)
        rule = "be picklable, to travel to another process"
        raise InvalidField(f"{path!r} must {rule} (got {shown(part)}: {error})") from error
    return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def load(pieces: Sequence[Any]) -> Any:
    """The value again. Its tensors lie in the memory that is given here."""
    loads: Callable[..., Any] = pickle.loads
    return loads(pieces[0], buffers=pieces[1:])


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes closures and notebook code by value, and tensors as buffers of just their own
    elements.
    """

    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) is Tensor
            and obj.device.type == "cpu"
            and obj.layout is torch.strided
            and obj.numel()
        ):
            elements = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            buffer = pickle.PickleBuffer(elements.data)
            return _rebuild_tensor, (buffer, obj.dtype, tuple(obj.shape), obj.requires_grad)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            # Cloudpickle knows plain modules, not torch.backends.
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _unpicklable_part(value: Any, path: str) -> tuple[str, Any]:
    """The innermost part of `value` that cannot be pickled, and the way there."""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        for name, part in _parts(value):
            if not _is_picklable(part):
                value, path = part, f"{path}.{name}"
                break
    return path, value


def _is_picklable(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(value)
    except Exception:  # noqa: BLE001
        # Whatever it raises, dump has raised it, too.
        return False
    return True


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """What a pickle of `value` holds, by the names that its author would know."""
    if isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        return [*used.nonlocals.items(), *used.globals.items()]
    if isinstance(value, MethodType):
        return [("__self__", value.__self__)]
    if isinstance(value, functools.partial):
        return [(_name_of(value.func), value.func), *_parts(value.args), *value.keywords.items()]
    if isinstance(value, Mapping):
        return [(str(name), part) for name, part in value.items()]
    if isinstance(value, tuple | list | set | frozenset):
        return [(str(index), part) for index, part in enumerate(value)]
    members = getattr(value, "__dict__", {})
    return [(name, part) for name, part in members.items() if not name.startswith("__")]


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _rebuild_tensor(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape).requires_grad_(requires_grad)
