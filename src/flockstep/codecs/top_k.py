"""The largest elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from flockstep.codecs.base import (
    Codec,
    Memory,
    as_message,
    part_of,
    wide,
)
from flockstep.codecs.sparse import largest, share_of
from flockstep.fields import require, require_integer, require_number

WARM_UP = (1 / 4, 1 / 16, 1 / 64, 1 / 256)  # what its parts send


@dataclass(frozen=True)
class TopK(Codec):
    """The `ratio` of the elements that are largest by absolute value; the rest waits, and adds up.

        x_j → x_j if |x_j| is among the k = ratio · n largest, else 0

    Also called gradient dropping. With error feedback.

    With momentum correction (deep gradient compression) what waits is a velocity u, so that an
    element that is sent late has the momentum of all steps before: u ← m·u + x; error ← error + u;
    the largest of the error are sent, and both error and u are 0 at their places (momentum factor
    masking). A message of all elements leaves u as it is, and this is momentum SGD. For gradients
    alone, with an optimizer that has no momentum of its own: SyncSGD's step is then plain SGD's.
    The law of the error is that of the velocity: decode(encode(x)) + error = u + the error before.

    Bytes: 4 for the place and 4 (8 in double precision) for the value of each element sent.

    Fields:
        ratio: the share of the elements that is sent, above 0 and at most 1.
        momentum_correction: m, below 1; 0: none.
        warmup: messages at the start that send more: four parts of them 25 %, 6.25 %, 1.5625 % and
            0.390625 %, but none less than `ratio`. The paper has an epoch for each part.

    Papers: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017; Lin et
    al., "Deep Gradient Compression", 2018.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.TopK(ratio=0.01)), workers=4)
    """

    name: ClassVar[str] = "top_k"
    ratio: float
    momentum_correction: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        require_number("ratio", self.ratio, above=0, at_most=1)
        require_number("momentum_correction", self.momentum_correction, at_least=0, below=1)
        require_integer("warmup", self.warmup, 0)

    @property
    def feeds_back(self) -> bool:
        return True

    @property
    def is_for_gradients(self) -> bool:
        return self.momentum_correction > 0

    def require_optimizer(self, optimizer: Optimizer) -> None:
        if not self.momentum_correction:
            return
        rule = "have no momentum of its own with TopK's 'momentum_correction'"
        node = getattr(optimizer, "node", None)
        if node is not None:  # of another framework, which tells no settings
            is_plain = node.is_plain_sgd
            require(is_plain, "optimizer", f"{rule}: plain SGD is known to", type(node).__name__)
            return
        own = {
            f"{setting}={group[setting]}"
            for group in optimizer.param_groups
            for setting in ("momentum", "betas")
            if group.get(setting)
        }
        got = f"{type(optimizer).__name__}({', '.join(sorted(own))})"
        require(not own, "optimizer", rule, got)

    def memory(
        self, like: Tensor, shapes: Sequence[torch.Size] = (), *, seed: int = 0, rank: int = 0
    ) -> Memory:
        memory = super().memory(like, shapes, seed=seed, rank=rank)
        if self.momentum_correction and memory.error is not None:
            memory.velocity = torch.zeros_like(memory.error)
        return memory

    def nbytes(self, elements: int, itemsize: int = 4) -> int:
        """After the warm-up."""
        return share_of(elements, self.ratio) * (4 + itemsize)

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int | None:
        if self.warmup and memory is None:
            return None
        count = share_of(like.numel(), self._ratio_now(memory))
        return count * (4 + wide(like.dtype).itemsize)

    def _ratio_now(self, memory: Memory | None) -> float:
        """The share that the next message sends."""
        if memory is None or memory.messages >= self.warmup:
            return self.ratio
        return max(self.ratio, WARM_UP[memory.messages * len(WARM_UP) // self.warmup])

    def _with_unsent(self, tensor: Tensor, memory: Memory, error: Tensor) -> Tensor:
        if memory.velocity is None:
            return error.add_(tensor)
        velocity = memory.velocity.mul_(self.momentum_correction).add_(tensor)
        return error.add_(velocity)

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        count = share_of(tensor.numel(), self._ratio_now(memory))
        places = largest(tensor, count)
        if memory is not None:
            memory.messages += 1
            if memory.velocity is not None and count < tensor.numel():
                memory.velocity[places] = 0
        return as_message(tensor[places], places.to(torch.int32))

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        total.index_add_(0, *self._parts(message, total), alpha=scale)

    def _parts(self, message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Places and values. How many there are is told by the message's length."""
        count = message.numel() // (4 + like.element_size())
        places = part_of(message, count * like.element_size(), count, torch.int32)
        return places, part_of(message, 0, count, like.dtype)
