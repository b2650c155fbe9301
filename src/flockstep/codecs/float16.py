"""Half precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flockstep.codecs.base import (
    Carrier,
    Codec,
    Memory,
    blocks,
)

LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Float16(Codec):
    """Every number as a half-precision one.

        x → min(max(x, −65,504), 65,504), rounded to 11 significant bits

    What is not finite stays so: it must not look like a large number to who receives it.

    Workers' messages are summed on the way, in single precision, and rounded once.

    Bytes: 2 an element. A mean is one all-reduce of them.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.Float16()), workers=4)
    """

    name: ClassVar[str] = "float16"

    def nbytes(self, elements: int) -> int:
        return 2 * elements

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int:
        return self.nbytes(like.numel())

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        return _half(tensor).view(torch.uint8)

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        half = message.view(torch.float16)
        for block in blocks(total):
            total[block].add_(half[block].to(total.dtype), alpha=scale)

    def average(self, carrier: Carrier, tensor: Tensor, memory: Memory) -> None:
        tensor.copy_(carrier.all_reduce(_half(tensor), op="mean"))


def _half(tensor: Tensor) -> Tensor:
    half = torch.empty(tensor.shape, dtype=torch.float16, device=tensor.device)
    for block in blocks(tensor):
        part = tensor[block]
        half[block] = part
        least, most = torch.aminmax(part)
        if not (least >= -LARGEST and most <= LARGEST):  # NaN is neither
            nothing = part - part  # but NaN where it is ∞ − ∞
            half[block] = part.clamp(-LARGEST, LARGEST).add_(nothing)
    return half
