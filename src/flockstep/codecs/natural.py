"""Powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flockstep.codecs.base import (
    Codec,
    Memory,
    blocks,
    empty_message,
    wide,
)
from flockstep.codecs.bits import pack, packed_bytes, unpack
from flockstep.randomness import borrowed_stream


@dataclass(frozen=True)
class Natural(Codec):
    """Every number as one of the two powers of two around it, at random so that it is right on
    average.

        x → sign(x) · 2^a with probability (2^(a+1) − |x|) / 2^a, else sign(x) · 2^(a+1),
        a = ⌊log₂|x|⌋

    Unbiased: E[decode(encode(x))] = x. Of a float32 this is the sign and the exponent, to which the
    mantissa adds one with its own value as probability. Zero stays zero; below the smallest normal
    number (2⁻¹²⁶) it is that number or zero. What would be rounded beyond the largest exponent
    stays at it; infinities stay, and what is no number comes back as one of them.

    Bytes: 9/8 an element (12/8 in double precision).

    Paper: Horváth et al., "Natural Compression for Distributed Deep Learning", 2019.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.Natural()), workers=4)
    """

    name: ClassVar[str] = "natural"

    def nbytes(self, elements: int, itemsize: int = 4) -> int:
        return packed_bytes(elements, 9 if itemsize == 4 else 12)

    def second_moment(self, elements: int) -> float:
        """9/8: of (1 + p)·2^a it is (1 + 3p)/(1 + p)², which is largest at p = 1/3."""
        return 9 / 8

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int:
        return self.nbytes(like.numel(), wide(like.dtype).itemsize)

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        form, elements = FORMS[tensor.dtype], tensor.numel()
        draw = borrowed_stream() if memory is None else memory.draw
        message = empty_message(self.nbytes(elements, tensor.element_size()), tensor)
        low, high = message[:elements], message[elements:]
        words = tensor.view(form.word)
        for block in blocks(tensor):
            word = words[block]
            size = word.bitwise_and(form.infinity | (form.mantissa - 1))
            chance = torch.from_numpy(_drawn(draw, len(word), form)).to(tensor.device)
            # It carries into the exponent as often as the mantissa says.
            rounded = chance.bitwise_and_(form.mantissa - 1).add_(size)
            rounded.clamp_(max=form.infinity - 1).masked_fill_(size >= form.infinity, form.infinity)
            code = rounded.bitwise_right_shift_(form.mantissa_bits)
            code.bitwise_or_((word < 0).to(form.word).bitwise_left_shift_(form.exponent_bits))
            low[block] = code.bitwise_and(0xFF).to(torch.uint8)
            rest = pack(code.bitwise_right_shift_(8).to(torch.uint8), form.rest_bits)
            high[block.start // 8 * form.rest_bits :][: len(rest)] = rest
        return message

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        form, elements = FORMS[total.dtype], total.numel()
        low, high = message[:elements], message[elements:]
        for block in blocks(total):
            count = block.stop - block.start
            start = block.start // 8 * form.rest_bits
            rest = high[start : start + packed_bytes(count, form.rest_bits)]
            code = unpack(rest, count, form.rest_bits).to(form.word).bitwise_left_shift_(8)
            word = code.bitwise_or_(low[block]).bitwise_left_shift_(form.mantissa_bits)
            total[block].add_(word.view(total.dtype), alpha=scale)


@dataclass(frozen=True)
class _Form:
    """How a floating-point number lies in a word: sign, exponent, mantissa."""

    word: torch.dtype
    drawn: type[np.signedinteger[Any]]
    exponent_bits: int
    mantissa_bits: int

    @property
    def mantissa(self) -> int:
        """How many mantissas there are."""
        return 1 << self.mantissa_bits

    @property
    def infinity(self) -> int:
        """The word of infinity: all ones in the exponent."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def rest_bits(self) -> int:
        """Bits of sign and exponent beyond a byte."""
        return 1 + self.exponent_bits - 8


def _drawn(draw: np.random.Generator, count: int, form: _Form) -> np.ndarray[Any, Any]:
    """Words of random bits. Whole ones of 64 bits are drawn fastest."""
    nbytes = count * form.word.itemsize
    return draw.integers(1 << 64, size=-(-nbytes // 8), dtype=np.uint64).view(form.drawn)[:count]


FORMS = {
    torch.float32: _Form(torch.int32, np.int32, exponent_bits=8, mantissa_bits=23),
    torch.float64: _Form(torch.int64, np.int64, exponent_bits=11, mantissa_bits=52),
}
