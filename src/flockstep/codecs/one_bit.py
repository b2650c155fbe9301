"""One bit an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flockstep.codecs.base import (
    Codec,
    Memory,
    blocks,
    part_of,
)
from flockstep.codecs.bits import packed_bytes

HEADER = 8  # two float32


@dataclass(frozen=True)
class OneBit(Codec):
    """The sign of every number; what it stands for is the mean of all with that sign. With error
    feedback.

        x_j → mean of {x_k > 0} if x_j > 0, else mean of {x_k ≤ 0}

    The paper takes the means for each column of a matrix; here they are those of the whole tensor.

    Bytes: 1/8 an element and 8 for the two means.

    Paper: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs", 2014.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.OneBit()), workers=4)
    """

    name: ClassVar[str] = "one_bit"
    feeds_back: ClassVar[bool] = True

    def nbytes(self, elements: int) -> int:
        return HEADER + packed_bytes(elements, 1)

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        message = torch.empty(self.nbytes(tensor.numel()), dtype=torch.uint8)
        bits, values = message.numpy()[HEADER:], tensor.numpy()
        total = size = 0.0
        positives = 0
        for block in blocks(tensor.numel()):
            is_positive = values[block] > 0
            positives += int(np.count_nonzero(is_positive))
            bits[block.start // 8 : -(-block.stop // 8)] = np.packbits(is_positive)
            total += float(tensor[block].sum())
            size += float(tensor[block].abs().sum())
        # Σ of the positives is (Σx + Σ|x|)/2.
        means = part_of(message, 0, 2, torch.float32)
        means[0] = (total - size) / 2 / max(1, tensor.numel() - positives)
        means[1] = (total + size) / 2 / max(1, positives)
        return message

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        low, high = part_of(message, 0, 2, torch.float32).to(total.dtype).mul(scale).tolist()
        bits = message.numpy()[HEADER:]
        for block in blocks(total.numel()):
            ones = np.unpackbits(
                bits[block.start // 8 : -(-block.stop // 8)], count=block.stop - block.start
            )
            total[block] += torch.from_numpy(ones).to(total.dtype).mul_(high - low).add_(low)
