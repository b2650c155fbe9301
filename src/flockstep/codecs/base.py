"""What a codec is: how a tensor is written into bytes, and what it must remember between
messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from flockstep.randomness import Purpose, numpy_stream

BLOCK = 1 << 16  # elements


class Carrier(Protocol):
    """What carries messages: a `Comm`."""

    size: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor: ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]: ...


@dataclass
class Memory:
    """What one worker remembers between the messages of one stream. It belongs to the strategy's
    state.
    """

    error: Tensor | None  # what was not sent yet; None for codecs that forget it
    # Of the tensors that lie one behind the other at the start of the stream's tensors.
    shapes: tuple[torch.Size, ...]
    seed: int  # the same on all workers
    draw: np.random.Generator  # each worker's own
    messages: int = 0
    bases: list[Tensor] = field(default_factory=list)  # PowerSGD's


class Codec(ABC):
    """Base class. A codec is a frozen dataclass; what changes lives in the `Memory` that it is
    given.

    A message is a flat tensor of bytes on the CPU, just as it travels. Half-precision tensors are
    worked on in single precision. With error feedback nothing is lost over time:

        decode(encode(x)) + error = x + the error before
    """

    name: ClassVar[str]
    """The name on the command line."""
    feeds_back: ClassVar[bool] = False
    """Whether what a message leaves out is remembered, and added to what is sent next."""

    def memory(
        self, like: Tensor, shapes: Sequence[torch.Size] = (), *, seed: int = 0, rank: int = 0
    ) -> Memory:
        """A fresh memory for tensors like this one."""
        error = torch.zeros(like.numel(), dtype=_wide(like.dtype)) if self.feeds_back else None
        return Memory(error, tuple(shapes), seed, numpy_stream(Purpose.ROUNDING, seed, rank))

    def encode(self, tensor: Tensor, memory: Memory | None = None) -> Tensor:
        """The message for a flat tensor; with a memory, for the tensor and what was not sent
        before.
        """
        tensor = on_cpu(tensor)
        if memory is None or memory.error is None:
            return self._encode(tensor, memory)
        unsent = memory.error.add_(tensor)
        message = self._encode(unsent, memory)
        self.add_decoded(message, unsent, -1.0, memory)
        return message

    def decode(self, message: Tensor, like: Tensor, memory: Memory | None = None) -> Tensor:
        """The flat tensor that a message stands for, with as many elements of the same dtype as
        `like`.
        """
        result = torch.zeros(like.numel(), dtype=_wide(like.dtype))
        self.add_decoded(message, result, 1.0, memory)
        return result.to(like)

    @abstractmethod
    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        """Add `scale` times what the message stands for to `total`, of single or double
        precision on the CPU.
        """

    def average(self, carrier: Carrier, tensor: Tensor, memory: Memory) -> None:
        """Replace a flat tensor on every worker by the mean over the workers, as far as their
        messages tell it.

        It is the same to the bit on all of them.
        """
        messages = carrier.all_gather(self.encode(tensor, memory))
        total = on_cpu(tensor).zero_()
        for message in messages:
            self.add_decoded(message, total, 1.0, memory)
        tensor.copy_(total.div_(len(messages)))

    @abstractmethod
    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        """The message for just this tensor, which lies on the CPU and stays as it is."""


def on_cpu(tensor: Tensor) -> Tensor:
    """The tensor as codecs work on it: itself, if it lies on the CPU and is of single or double
    precision.
    """
    return tensor.to("cpu", _wide(tensor.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def blocks(elements: int, multiple: int = 8) -> Iterator[slice]:
    """Parts of a flat tensor that stay in the cache from one operation to the next, of whole
    multiples each.

    A pass over a large tensor costs many times one over a part of it that was just used.
    """
    step = max(1, BLOCK // multiple) * multiple
    return (slice(start, min(start + step, elements)) for start in range(0, elements, step))


def in_buckets(tensor: Tensor, size: int) -> Tensor:
    """A flat tensor in rows of `size`; the last is filled up with zeros."""
    rest = -tensor.numel() % size
    return (torch.nn.functional.pad(tensor, (0, rest)) if rest else tensor).view(-1, size)


def as_message(*parts: Tensor) -> Tensor:
    """Tensors of any kind, one behind the other, as bytes."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def part_of(message: Tensor, start: int, elements: int, dtype: torch.dtype) -> Tensor:
    """`elements` of a dtype that begin at byte `start` of a message."""
    piece = message[start : start + elements * dtype.itemsize]
    aligned = (piece.storage_offset() % dtype.itemsize) == 0
    return (piece if aligned else piece.clone()).view(dtype)
