"""Three levels, at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flockstep.codecs.base import (
    Codec,
    Memory,
    blocks,
    empty_message,
    in_buckets,
    part_of,
)
from flockstep.codecs.bits import DIGITS, digits_bytes, pack_digits, unpack_digits
from flockstep.fields import require_integer, require_number
from flockstep.randomness import borrowed_stream

EQUAL = 1e-6  # a standard deviation that is rounding alone, beside the numbers


@dataclass(frozen=True)
class TernGrad(Codec):
    """Every number as minus the largest of its bucket, zero or the largest, at random so that it is
    right on average.

        x_j ← min(max(x_j, −c·σ), c·σ),   σ the standard deviation over the bucket
        x_j → s · sign(x_j) · b_j,   b_j = 1 with probability |x_j|/s, else 0,   s = max|x|

    Unbiased after the clipping: E[decode(encode(x))] = x. Without clipping (`clip=None`) it is for
    any x. A bucket of equal numbers, whose σ is 0, is not clipped. The paper takes s and σ for each
    layer; here they are those of a bucket.

    Bytes: 1/5 an element (five digits of base three in a byte: 1.6 bits, where log₂ 3 = 1.58 are
    needed) and 4 a bucket.

    Fields:
        clip: c; None: no clipping.
        bucket: elements that share a scale.

    Paper: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
    Learning", 2017.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.TernGrad()), workers=4)
    """

    name: ClassVar[str] = "tern_grad"
    clip: float | None = 2.5
    bucket: int = 1024

    def __post_init__(self) -> None:
        if self.clip is not None:
            require_number("clip", self.clip, above=0)
        require_integer("bucket", self.bucket, 1)

    def nbytes(self, elements: int) -> int:
        return 4 * -(-elements // self.bucket) + digits_bytes(elements)

    def second_moment(self, elements: int) -> float:
        """E|C(x)|² = s|x|₁ in each bucket of d elements, |x|₁ ≤ √d|x|, and s ≤ |x|, or s ≤ c|x|/√d
        where numbers are clipped.
        """
        most = math.sqrt(min(self.bucket, elements))
        return max(1.0, most if self.clip is None else min(most, self.clip))

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int:
        return self.nbytes(like.numel())

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        message = empty_message(self.nbytes(tensor.numel()), tensor)
        scales, packed = self._parts(message, tensor.numel())
        draw = borrowed_stream() if memory is None else memory.draw
        for block in blocks(tensor, DIGITS * self.bucket):
            count = block.stop - block.start
            rows = in_buckets(tensor[block], self.bucket)
            scale = self._scales(rows, count).float()
            scales[block.start // self.bucket :][: len(rows)] = scale
            # With y = x/s in [−1, 1], ⌊y + u⌋ is sign(y) with probability |y|, else 0; clipping x
            # to s is clipping y to 1.
            per_scale = (1 / scale.masked_fill(scale == 0, torch.inf)).to(rows.dtype)
            level = rows.mul(per_scale[:, None]).clamp_(-1, 1)
            level += torch.from_numpy(draw.random(rows.shape, dtype=np.float32)).to(rows)
            # A float may round 1 + u up to 2.
            digits = level.floor_().clamp_(max=1).add_(1).view(-1)[:count]
            codes = pack_digits(digits)
            packed[block.start // DIGITS :][: len(codes)] = codes
        return message

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        scales, packed = self._parts(message, total.numel())
        scales = scales.to(total.dtype) * scale
        for block in blocks(total, DIGITS * self.bucket):
            count = block.stop - block.start
            codes = packed[block.start // DIGITS :][: digits_bytes(count)]
            levels = unpack_digits(codes, count).to(total.dtype).sub_(1)
            rows = in_buckets(levels, self.bucket)
            rows.mul_(scales[block.start // self.bucket :][: len(rows), None])
            total[block] += rows.view(-1)[:count]

    def _scales(self, rows: Tensor, count: int) -> Tensor:
        """s of each bucket: its largest number, or c·σ if that is less. Of the last row only what
        is left of `count` elements belongs to the tensor.
        """
        largest = rows.abs().amax(dim=1)
        if self.clip is None:
            return largest
        deviation = _deviations(rows)
        deviation[-1:] = _deviations(rows[-1:, : count - (len(rows) - 1) * self.bucket])
        varies = deviation > EQUAL * largest
        return torch.where(varies, torch.minimum(largest, self.clip * deviation), largest)

    def _parts(self, message: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """The scales of the buckets and the packed digits, where they lie in the message."""
        count = -(-elements // self.bucket)
        return part_of(message, 0, count, torch.float32), message[4 * count :]


def _deviations(rows: Tensor) -> Tensor:
    """The standard deviation of each row."""
    differences = rows - rows.mean(dim=1, keepdim=True)
    lengths: Tensor = torch.linalg.vector_norm(differences, dim=1)
    return lengths / math.sqrt(rows.shape[1])
