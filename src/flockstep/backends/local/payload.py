"""Python objects in the arena. Tensors and arrays stand beside the pickle, not in it, and need
not be copied.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from flockstep.backends import pickling
from flockstep.backends.local.arena import ALIGNMENT, Arena


def store(arena: Arena, value: Any, called: str = "outcome") -> int:
    """Write `value` into the arena; return its offset. `called` is what an error calls it."""
    parts = pickling.dump(value, called)
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
    return pickling.load(parts)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
