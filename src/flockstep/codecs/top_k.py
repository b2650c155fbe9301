"""The largest elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flockstep.codecs.base import (
    Codec,
    Memory,
    as_message,
    part_of,
)
from flockstep.codecs.sparse import largest, share_of
from flockstep.fields import require_number


@dataclass(frozen=True)
class TopK(Codec):
    """The `ratio` of the elements that are largest by absolute value; the rest waits, and adds up.

        x_j → x_j if |x_j| is among the k = ratio · n largest, else 0

    Also called gradient dropping. With error feedback.

    Bytes: 4 for the place and 4 (8 in double precision) for the value of each element sent.

    Fields:
        ratio: the share of the elements that is sent, above 0 and at most 1.

    Papers: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017; Lin et
    al., "Deep Gradient Compression", 2018.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.TopK(ratio=0.01)), workers=4)
    """

    name: ClassVar[str] = "top_k"
    feeds_back: ClassVar[bool] = True
    ratio: float

    def __post_init__(self) -> None:
        require_number("ratio", self.ratio, above=0, at_most=1)

    def nbytes(self, elements: int, itemsize: int = 4) -> int:
        return share_of(elements, self.ratio) * (4 + itemsize)

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        places = largest(tensor, share_of(tensor.numel(), self.ratio))
        return as_message(tensor[places], places.to(torch.int32))

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        total.index_add_(0, *self._parts(message, total), alpha=scale)

    def _parts(self, message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        count = share_of(like.numel(), self.ratio)
        places = part_of(message, count * like.element_size(), count, torch.int32)
        return places, part_of(message, 0, count, like.dtype)
