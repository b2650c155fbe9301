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
from torch.optim import Optimizer

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

    # What was not sent yet, on the device of the stream's tensors; None for codecs that forget it.
    error: Tensor | None
    # Of the tensors that lie one behind the other at the start of the stream's tensors.
    shapes: tuple[torch.Size, ...]
    seed: int  # the same on all workers
    draw: np.random.Generator  # each worker's own
    messages: int = 0
    bases: list[Tensor] = field(default_factory=list)  # PowerSGD's
    velocity: Tensor | None = None  # TopK's, with momentum correction
    # Of differences that contain what was not sent before, so that no error is remembered.
    of_differences: bool = False


class Codec(ABC):
    """Base class. A codec is a frozen dataclass; what changes lives in the `Memory` that it is
    given.

    A message is a flat tensor of bytes, just as it travels, on the device of the tensor that it
    stands for, where all the work is done. Half-precision tensors are worked on in single
    precision. With error feedback nothing is lost over time:

        decode(encode(x)) + error = x + the error before
    """

    name: ClassVar[str]
    """The name on the command line."""

    @property
    def feeds_back(self) -> bool:
        """Whether what a message leaves out is remembered, and added to what is sent next."""
        return False

    @property
    def is_for_gradients(self) -> bool:
        """Whether it is for gradients alone, not for changes that an optimizer has made of them."""
        return False

    def require_optimizer(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Complain of an optimizer that gradients which went through the codec cannot go to."""

    def memory(
        self, like: Tensor, shapes: Sequence[torch.Size] = (), *, seed: int = 0, rank: int = 0
    ) -> Memory:
        """A fresh memory for tensors like this one."""
        error = _zeros(like) if self.feeds_back else None
        return Memory(error, tuple(shapes), seed, numpy_stream(Purpose.ROUNDING, seed, rank))

    def encode(self, tensor: Tensor, memory: Memory | None = None) -> Tensor:
        """The message for a flat tensor; with a memory, for the tensor and what was not sent
        before.
        """
        tensor = widened(tensor)
        if memory is None or memory.error is None:
            return self._encode(tensor, memory)
        unsent = self._with_unsent(tensor, memory, memory.error)
        message = self._encode(unsent, memory)
        self.add_decoded(message, unsent, -1.0, memory)
        return message

    def decode(self, message: Tensor, like: Tensor, memory: Memory | None = None) -> Tensor:
        """The flat tensor that a message stands for, with as many elements of the same dtype as
        `like`.
        """
        result = _zeros(like)
        self.add_decoded(message.to(like.device), result, 1.0, memory)
        return result.to(like.dtype)

    def second_moment(self, elements: int) -> float:
        """τ, so that E|C(x)|² ≤ τ|x|² for a tensor x of so many elements: above 1 for codecs that
        are right on average, C(x) = x in expectation, and not closer to x than 0 is. Who sends
        differences to a copy divides them by it, as Koloskova et al. 2019 do, or the copy would run
        away.
        """
        return 1.0

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int | None:
        """How many bytes the next message for a tensor like this one has; None if that depends on
        its values.

        Without a memory: what a receiver knows who has none, so None too if the length depends on
        the sender's memory.
        """
        return None

    @abstractmethod
    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        """Add `scale` times what the message stands for to `total`, of single or double
        precision on the message's device.
        """

    def average(self, carrier: Carrier, tensor: Tensor, memory: Memory) -> None:
        """Replace a flat tensor on every worker by the mean over the workers, as far as their
        messages tell it.

        It is the same to the bit on all of them.
        """
        messages = carrier.all_gather(self.encode(tensor, memory))
        total = widened(tensor).zero_()
        for message in messages:
            self.add_decoded(message, total, 1.0, memory)
        tensor.copy_(total.div_(len(messages)))

    @abstractmethod
    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        """The message for just this tensor, of single or double precision, which stays as it
        is.
        """

    def _with_unsent(self, tensor: Tensor, memory: Memory, error: Tensor) -> Tensor:
        """The memory's error, to which the tensor was added: what there is to send."""
        return error.add_(tensor)


def widened(tensor: Tensor) -> Tensor:
    """The tensor as codecs work on it: itself, if it is of single or double precision."""
    return tensor.to(wide(tensor.dtype))


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.numel(), dtype=wide(like.dtype), device=like.device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision in which codecs work on tensors of a dtype: single at least."""
    return torch.promote_types(dtype, torch.float32)


def blocks(tensor: Tensor, multiple: int = 8) -> Iterator[slice]:
    """Parts of a flat tensor that stay in the cache from one operation to the next, of whole
    multiples each.

    A pass over a large tensor costs a CPU many times one over a part of it that was just used.
    Other devices take it whole.
    """
    elements = tensor.numel()
    step = max(1, BLOCK // multiple) * multiple if tensor.device.type == "cpu" else elements
    return (slice(start, min(start + step, elements)) for start in range(0, elements, step or 1))


def in_buckets(tensor: Tensor, size: int) -> Tensor:
    """A flat tensor in rows of `size`; the last is filled up with zeros."""
    rest = -tensor.numel() % size
    return (torch.nn.functional.pad(tensor, (0, rest)) if rest else tensor).view(-1, size)


def empty_message(nbytes: int, like: Tensor) -> Tensor:
    """Bytes to be written, on the device of a tensor."""
    return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


def as_message(*parts: Tensor) -> Tensor:
    """Tensors of any kind, one behind the other, as bytes."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def part_of(message: Tensor, start: int, elements: int, dtype: torch.dtype) -> Tensor:
    """`elements` of a dtype that begin at byte `start` of a message."""
    piece = message[start : start + elements * dtype.itemsize]
    aligned = (piece.storage_offset() % dtype.itemsize) == 0
    return (piece if aligned else piece.clone()).view(dtype)
