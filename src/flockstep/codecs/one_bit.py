"""One bit an element."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flockstep.codecs.base import (
    Codec,
    Memory,
    blocks,
    empty_message,
    part_of,
)
from flockstep.codecs.bits import pack, packed_bytes, unpack
from flockstep.codecs.flags import count_of, flags_of

HEADER = 8  # two float32


@dataclass(frozen=True)
class OneBit(Codec):
    """The sign of every number; what it stands for is the mean of all with that sign. With error
    feedback.

        x_j → mean of {x_k > 0} if x_j > 0, else mean of {x_k ≤ 0}

    The paper takes the means for each column of a matrix; here they are those of the whole tensor.
    So where some numbers are far larger than others, the small ones drown: statistics of batch
    normalisation among parameters do that. Methods that average send them beside the message;
    `GoSGD` and `SGP` do not, and with this codec end in a loss that is not a number on nets that
    have them.

    Bytes: 1/8 an element and 8 for the two means.

    Paper: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs", 2014.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.OneBit()), workers=4)
    """

    name: ClassVar[str] = "one_bit"

    def nbytes(self, elements: int) -> int:
        return HEADER + packed_bytes(elements, 1)

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int:
        return self.nbytes(like.numel())

    @property
    def feeds_back(self) -> bool:
        return True

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        message = empty_message(self.nbytes(tensor.numel()), tensor)
        bits = message[HEADER:]
        total = size = 0.0
        positives = 0
        for block in blocks(tensor):
            part = tensor[block]
            is_positive = flags_of(part, operator.gt, 0)
            positives += count_of(is_positive)
            bits[block.start // 8 : -(-block.stop // 8)] = pack(is_positive, 1)
            total += float(part.sum())
            size += float(part.abs().sum())
        # Σ of the positives is (Σx + Σ|x|)/2.
        means = part_of(message, 0, 2, torch.float32)
        means[0] = (total - size) / 2 / max(1, tensor.numel() - positives)
        means[1] = (total + size) / 2 / max(1, positives)
        return message

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        means = part_of(message, 0, 2, torch.float32).to(total.dtype).mul(scale)
        low, high = (float(mean) for mean in means)
        bits = message[HEADER:]
        for block in blocks(total):
            ones = unpack(bits[block.start // 8 : -(-block.stop // 8)], block.stop - block.start, 1)
            total[block] += ones.to(total.dtype).mul_(high - low).add_(low)
