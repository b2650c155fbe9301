"""Random rounding to a few levels."""

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
from flockstep.codecs.bits import pack, packed_bytes, unpack
from flockstep.fields import require_integer, require_number
from flockstep.randomness import borrowed_stream


@dataclass(frozen=True)
class QSGD(Codec):
    """Every number as one of 2s+1 levels, rounded up or down at random so that it is right on
    average.

        x_j → (‖x‖/s) · sign(x_j) · ⌊ s·|x_j|/‖x‖ + u ⌋,   u uniform in [0, 1),  ‖x‖ over the bucket

    Unbiased: E[decode(encode(x))] = x. The paper codes levels with Elias codes; here each takes a
        fixed number of bits.

    Bytes: ⌈log₂(2s+1)⌉/8 an element and 4 a bucket.

    Fields:
        levels: s, between 1 and 127.
        bucket: elements that share a norm.

    Paper: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
        Encoding", 2017.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.QSGD(levels=4)), workers=4)
    """

    name: ClassVar[str] = "qsgd"
    levels: int
    bucket: int = 128

    def __post_init__(self) -> None:
        require_integer("levels", self.levels, 1)
        require_number("levels", self.levels, at_most=127)
        require_integer("bucket", self.bucket, 1)

    @property
    def width(self) -> int:
        """Bits of a level: those of the numbers 0 … 2s."""
        return (2 * self.levels).bit_length()

    def nbytes(self, elements: int) -> int:
        return 4 * -(-elements // self.bucket) + packed_bytes(elements, self.width)

    def second_moment(self, elements: int) -> float:
        """1 + min(d/s², √d/s) for buckets of d elements and s levels (the paper's Lemma 3.1)."""
        size = min(self.bucket, elements)
        return 1 + min(size / self.levels**2, math.sqrt(size) / self.levels)

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int:
        return self.nbytes(like.numel())

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        message = empty_message(self.nbytes(tensor.numel()), tensor)
        norms, packed = self._parts(message, tensor.numel())
        draw = borrowed_stream() if memory is None else memory.draw
        for block in blocks(tensor, 8 * self.bucket):
            rows = in_buckets(tensor[block], self.bucket)
            norm = torch.linalg.vector_norm(rows, dim=1).float()
            norms[block.start // self.bucket :][: len(rows)] = norm
            # sign(y)·⌊|y| + u⌋ and ⌊y + u⌋ both round to the neighbours of y, with the same
            # chances.
            level = torch.from_numpy(draw.random(rows.shape, dtype=np.float32)).to(rows)
            level.addcmul_(
                rows, (self.levels / norm.masked_fill(norm == 0, torch.inf)).to(rows.dtype)[:, None]
            )
            # A number that is its bucket's whole norm may be rounded beyond the last level.
            level = level.floor_().add_(self.levels).clamp_(0, 2 * self.levels)
            codes = pack(level.view(-1)[: block.stop - block.start].to(torch.uint8), self.width)
            packed[block.start // 8 * self.width :][: len(codes)] = codes
        return message

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        norms, packed = self._parts(message, total.numel())
        norms = norms.to(total.dtype) * (scale / self.levels)
        for block in blocks(total, 8 * self.bucket):
            count = block.stop - block.start
            codes = packed[block.start // 8 * self.width :][: packed_bytes(count, self.width)]
            levels = unpack(codes, count, self.width).to(total.dtype).sub_(self.levels)
            rows = in_buckets(levels, self.bucket)
            rows.mul_(norms[block.start // self.bucket :][: len(rows), None])
            total[block] += rows.view(-1)[:count]

    def _parts(self, message: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """The norms of the buckets and the packed levels, where they lie in the message."""
        count = -(-elements // self.bucket)
        return part_of(message, 0, count, torch.float32), message[4 * count :]
