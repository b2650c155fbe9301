"""The sign of every element, and a vote."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flockstep.codecs.base import (
    Carrier,
    Codec,
    Memory,
    blocks,
    empty_message,
    part_of,
    widened,
)
from flockstep.codecs.bits import pack, packed_bytes, unpack
from flockstep.codecs.flags import flags_of
from flockstep.fields import require_choice, require_flag
from flockstep.randomness import borrowed_stream

SCALES = ("mean", "one")


@dataclass(frozen=True)
class SignSGD(Codec):
    """The sign of every number; over workers, the sign that most of them have.

        x_j → s · sign(x_j);   over workers: (1/w) Σ_i s_i · sign(Σ_i sign(x_ij))

    The paper has s = 1 (`scale="one"`), for gradients alone: the learning rate is then the size of
    every step, and much smaller than usual. With s = mean|x|, as in EF-SignSGD, a message is about
    as large as what it stands for, and serves any strategy with the usual learning rates. A tie
    gives sign(0) = 0. A message has no third sign: that of its zeros is drawn, one for all.

    Bytes: 1/8 an element, and 4 for the scale if it is the mean.

    Fields:
        scale: s: "mean" (of |x| over the whole tensor) or "one".
        error_feedback: whether what a message leaves out waits for the next, as in EF-SignSGD.

    Papers: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", 2018, and
    "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", 2019; Karimireddy et
    al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.SignSGD()), workers=4)
    """

    name: ClassVar[str] = "sign_sgd"
    scale: str = "mean"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        require_choice("scale", self.scale, SCALES)
        require_flag("error_feedback", self.error_feedback)

    @property
    def feeds_back(self) -> bool:
        return self.error_feedback

    @property
    def header(self) -> int:
        return 4 if self.scale == "mean" else 0

    @property
    def is_for_gradients(self) -> bool:
        return self.scale == "one"

    def nbytes(self, elements: int) -> int:
        return self.header + packed_bytes(elements, 1)

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int:
        return self.nbytes(like.numel())

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        draw = borrowed_stream() if memory is None else memory.draw
        is_positive = operator.ge if draw.integers(2) else operator.gt
        message = empty_message(self.nbytes(tensor.numel()), tensor)
        bits = message[self.header :]
        size = 0.0
        for block in blocks(tensor):
            flags = flags_of(tensor[block], is_positive, 0)
            bits[block.start // 8 : -(-block.stop // 8)] = pack(flags, 1)
            if self.scale == "mean":
                size += float(tensor[block].abs().sum())
        if self.scale == "mean":
            part_of(message, 0, 1, torch.float32)[0] = size / max(1, tensor.numel())
        return message

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        self._add_signs(message, total, self._scale(message) * scale)

    def average(self, carrier: Carrier, tensor: Tensor, memory: Memory) -> None:
        messages = carrier.all_gather(self.encode(tensor, memory))
        votes = widened(tensor).zero_()
        for message in messages:
            self._add_signs(message, votes, 1.0)
        scale = sum(map(self._scale, messages)) / len(messages)
        tensor.copy_(votes.sign_().mul_(scale))

    def _scale(self, message: Tensor) -> float:
        return float(part_of(message, 0, 1, torch.float32)) if self.scale == "mean" else 1.0

    def _add_signs(self, message: Tensor, total: Tensor, scale: float) -> None:
        bits = message[self.header :]
        for block in blocks(total):
            ones = unpack(bits[block.start // 8 : -(-block.stop // 8)], block.stop - block.start, 1)
            total[block] += ones.to(total.dtype).mul_(2 * scale).sub_(scale)
