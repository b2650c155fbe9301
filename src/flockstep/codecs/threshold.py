"""Elements beyond a threshold."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flockstep.codecs.base import Codec, Memory
from flockstep.codecs.flags import flags_of, places_of
from flockstep.fields import require, require_number


@dataclass(frozen=True)
class Threshold(Codec):
    """±τ where the value exceeds τ; the rest waits, and adds up.

        x_j → τ if x_j > τ, −τ if x_j < −τ, else 0

    With error feedback: a value of 3τ is sent in three messages. Messages know no other value than
    ±τ, so one that is not a number stays in the error, unsent; `fs.run` stops where a loss is not
    finite.

    Bytes: 4 for each element beyond τ: its place and, in one bit, its sign.

    Fields:
        tau: τ, above 0.

    Paper: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", 2015.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.Threshold(tau=0.1)), workers=4)
    """

    name: ClassVar[str] = "threshold"
    tau: float

    def __post_init__(self) -> None:
        require_number("tau", self.tau, above=0)

    @property
    def feeds_back(self) -> bool:
        return True

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        require(tensor.numel() < 1 << 30, "tensor", "have less than 2^30 elements", tensor.numel())
        places = places_of(flags_of(tensor.abs(), operator.gt, self.tau))
        signed = places.mul(2).add_(tensor[places] < 0)
        return signed.to(torch.int32).view(torch.uint8)

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        total.index_add_(0, *self._parts(message, total), alpha=scale)

    def _parts(self, message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        signed = message.view(torch.int32)
        return signed >> 1, torch.where((signed & 1).bool(), -self.tau, self.tau).to(like.dtype)
