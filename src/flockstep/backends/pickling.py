"""Python objects on their way from process to process of one run: a pickle, and beside it the
memory of tensors and arrays, which need not be copied.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor


def dump(value: Any) -> list[memoryview]:
    """The pickle of `value`, then the memory that it refers to."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
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


def _rebuild_tensor(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape).requires_grad_(requires_grad)
