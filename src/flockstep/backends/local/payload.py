"""Python objects in the arena. Tensors and arrays stand beside the pickle, not in it, and need
not be copied.
"""

from __future__ import annotations

import importlib
import io
import mmap
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from flockstep.backends.local.arena import ALIGNMENT, Arena


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


def store(arena: Arena, value: Any) -> int:
    """Write `value` into the arena; return its offset."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    parts: list[Any] = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = [len(part) for part in parts]
    starts = np.cumsum([_padded(8 * (2 + len(sizes))), *map(_padded, sizes)])
    offset = arena.allocate(int(starts[-1]))
    header = arena.words(offset, 2 + len(sizes))
    header[:] = [starts[-1], len(sizes), *sizes]
    for part, start, size in zip(parts, starts[:-1], sizes, strict=True):
        arena.bytes(offset + int(start), size)[:] = np.frombuffer(part, dtype=np.uint8)
    return offset


def load_private(arena: Arena, offset: int) -> Any:
    """Read a value without copying its tensors. What this process changes in them, no other
    process sees.
    """
    length = int(arena.words(offset, 1)[0])
    page_start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(
        arena.descriptor, offset - page_start + length, access=mmap.ACCESS_COPY, offset=page_start
    )
    return _load(memoryview(pages)[offset - page_start :])


def load_copy(arena: Arena, offset: int) -> Any:
    """Read a value into memory of its own."""
    length = int(arena.words(offset, 1)[0])
    return _load(memoryview(bytearray(arena.bytes(offset, length).data)))


def _load(memory: memoryview) -> Any:
    _, count = np.frombuffer(memory, dtype=np.int64, count=2)
    sizes = np.frombuffer(memory, dtype=np.int64, count=int(count), offset=16)
    starts = np.cumsum([_padded(8 * (2 + int(count))), *(_padded(int(size)) for size in sizes)])
    parts = [
        memory[int(start) : int(start + size)] for start, size in zip(starts, sizes, strict=False)
    ]
    load: Callable[..., Any] = pickle.loads
    return load(parts[0], buffers=parts[1:])


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
