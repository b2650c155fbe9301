"""One piece of memory that all processes of a run share.

It is an anonymous file, inherited or handed over as a descriptor, never a name in a file system:
when the last process of the run is gone, however it went, the memory is gone too. The file is
sparse and mapped whole, so an offset means the same in every process and only pages that are
touched take memory."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RESERVED_BYTES = 1 << 40  # of addresses, not of memory
LEAST_BYTES = 1 << 32
ALIGNMENT = 64
FIRST_OFFSET = mmap.PAGESIZE  # the page before it belongs to the arena itself
# Making one takes a microsecond or two; the same few are asked for again and again.
MOST_VIEWS = 4096

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class Arena:
    """Shared memory with an allocator that only ever moves forward: fresh memory is zero."""

    def __init__(self, descriptor: int, lock_descriptor: int) -> None:
        self.descriptor = descriptor
        # Locks stand in a file of their own: a process that closes any descriptor of a file, and a
        # map has one, loses all its locks on that file.
        self.lock_descriptor = lock_descriptor
        self._size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self._size)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._next = self.words(0, 1)
        self._base = self._bytes.ctypes.data
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @classmethod
    def create(cls) -> Arena:
        descriptor, lock_descriptor = _anonymous_file(), _anonymous_file()
        size = RESERVED_BYTES
        while True:
            os.ftruncate(descriptor, size)
            try:
                arena = cls(descriptor, lock_descriptor)
            except OSError:  # the system limits address space: take what it gives
                if size <= LEAST_BYTES:
                    raise
                size //= 4
            else:
                arena._next[0] = FIRST_OFFSET
                return arena

    def allocate(self, nbytes: int) -> int:
        """The offset of fresh zeroed memory, aligned for any vector instruction."""
        with self.locked(0):
            offset = int(self._next[0])
            end = offset + -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
            if end > self._size:
                raise MemoryError(
                    f"shared memory is full: {nbytes} bytes asked, {self._size - offset} left"
                )
            self._next[0] = end
        return offset

    def words(self, offset: int, count: int) -> NDArray[np.int64]:
        """Numbers that processes tell each other. Aligned, so that each is read and written
        whole.
        """
        return self._bytes[offset : offset + 8 * count].view(np.int64)

    def bytes(self, offset: int, count: int) -> NDArray[np.uint8]:
        return self._bytes[offset : offset + count]

    def tensor(self, offset: int, elements: int, dtype: torch.dtype) -> Tensor:
        """The memory at `offset` as a tensor."""
        if elements == 0:
            return torch.empty(0, dtype=dtype)
        key = (offset, elements, dtype)
        if key not in self._views:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            self._views[key] = torch.frombuffer(
                self._map, dtype=dtype, count=elements, offset=offset
            )
        return self._views[key]

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where a contiguous tensor lies in the arena; None if it lies elsewhere."""
        offset = tensor.data_ptr() - self._base
        inside = tensor.device.type == "cpu" and 0 <= offset < self._size and tensor.is_contiguous()
        return offset if inside else None

    def try_lock(self, offset: int) -> bool:
        """Take the lock named by `offset` if it is free. The kernel frees the locks of a process
        that dies.
        """
        try:
            fcntl.lockf(self.lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except (BlockingIOError, PermissionError):
            # What "somebody holds it" is called differs by system.
            return False
        return True

    def unlock(self, offset: int) -> None:
        fcntl.lockf(self.lock_descriptor, fcntl.LOCK_UN, 1, offset)

    @contextmanager
    def locked(self, offset: int) -> Iterator[None]:
        """Hold a lock for a few instructions, never while waiting for another worker."""
        fcntl.lockf(self.lock_descriptor, fcntl.LOCK_EX, 1, offset)
        try:
            yield
        finally:
            self.unlock(offset)

    def close(self) -> None:
        """Give the memory up in this process."""
        self._views.clear()
        del self._bytes, self._next
        try:
            self._map.close()
        except BufferError:
            # An interrupted call's frame, kept by its traceback, still has a view: the memory goes
            # with it.
            pass
        os.close(self.descriptor)
        os.close(self.lock_descriptor)


def _anonymous_file() -> int:
    return os.memfd_create("flockstep", os.MFD_CLOEXEC)
