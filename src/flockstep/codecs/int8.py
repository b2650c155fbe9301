"""Eight-bit whole numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
from flockstep.fields import require_integer

LARGEST = 127
SMALLEST = 1e-30  # where one over it is still a number


@dataclass(frozen=True)
class Int8(Codec):
    """Every number as one of 255 levels between the largest of its bucket and minus that.

        s = max|x| / 127 over the bucket;   x → s · round(x / s)

    Bytes: 1 an element and 4 a bucket.

    Fields:
        bucket: elements that share a scale.

    Paper: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2015, with linear
        levels.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.Int8()), workers=4)
    """

    name: ClassVar[str] = "int8"
    bucket: int = 1024

    def __post_init__(self) -> None:
        require_integer("bucket", self.bucket, 1)

    def nbytes(self, elements: int) -> int:
        return elements + 4 * -(-elements // self.bucket)

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int:
        return self.nbytes(like.numel())

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        message = empty_message(self.nbytes(tensor.numel()), tensor)
        scales, levels = self._parts(message, tensor.numel())
        for block in blocks(tensor, self.bucket):
            rows = in_buckets(tensor[block], self.bucket)
            largest = torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_())
            largest.masked_fill_(largest < SMALLEST, 0)
            scales[block.start // self.bucket :][: len(rows)] = largest / LARGEST
            per_level = (LARGEST / largest).masked_fill_(largest == 0, 0)
            levels[block] = (
                rows.mul(per_level[:, None]).round_().view(-1)[: block.stop - block.start]
            )
        return message

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        scales, levels = self._parts(message, total.numel())
        scales = scales.to(total.dtype) * scale
        for block in blocks(total, self.bucket):
            rows = in_buckets(levels[block].to(total.dtype), self.bucket)
            rows.mul_(scales[block.start // self.bucket :][: len(rows), None])
            total[block] += rows.view(-1)[: block.stop - block.start]

    def _parts(self, message: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """The scales of the buckets and the levels of the elements, where they lie in the
        message.
        """
        count = -(-elements // self.bucket)
        return part_of(message, 0, count, torch.float32), message[4 * count :].view(torch.int8)
