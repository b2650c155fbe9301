"""Half precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flockstep.codecs.base import Carrier, Codec, Memory, as_message

LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Float16(Codec):
    """Every number as a half-precision one.

        x → round to 11 significant bits; what lies beyond ±65,504 becomes ±65,504

    Workers' messages are summed on the way, in single precision, and rounded once.

    Bytes: 2 an element. A mean is one all-reduce of them.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.Float16()), workers=4)
    """

    name: ClassVar[str] = "float16"

    def nbytes(self, elements: int) -> int:
        return 2 * elements

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        return as_message(_half(tensor))

    def add_decoded(self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None) -> None:
        total.add_(message.view(torch.float16), alpha=scale)

    def average(self, carrier: Carrier, tensor: Tensor, memory: Memory) -> None:
        tensor.copy_(carrier.all_reduce(_half(tensor), op="mean"))


def _half(tensor: Tensor) -> Tensor:
    return tensor.clamp(-LARGEST, LARGEST).to(torch.float16)
