"""Small whole numbers as a row of bits, and digits of base three as a row of bytes.

Low bits come first: eight numbers of b bits are b bytes. What has more than eight bits is written
as all its low bytes, and behind them the rest in the same way.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

DIGITS = 5  # of base three in a byte: 3⁵ = 243
# As many bytes as numbers of one, two or four bits fit into a byte.
WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}


def packed_bytes(count: int, width: int) -> int:
    """Bytes of that many numbers: ⌈count · width / 8⌉."""
    return -(-count * width // 8)


def pack(numbers: Tensor, width: int) -> Tensor:
    """Numbers below 2^width, or truth values, in `width` bits each."""
    if width > 8:
        low = numbers.bitwise_and(0xFF).to(torch.uint8)
        return torch.cat([low, pack(numbers.bitwise_right_shift(8), width - 8)])
    if width == 1 and numbers.device.type == "cpu":  # where NumPy is several times as fast
        return torch.from_numpy(np.packbits(numbers.numpy(), bitorder="little"))
    numbers = numbers.to(torch.uint8)
    if width == 8:
        return numbers
    groups = torch.nn.functional.pad(numbers, (0, -numbers.numel() % 8)).view(-1, 8)
    if 8 % width == 0:
        packed = _joined(groups.view(-1).view(WORDS[width]), width)
    else:
        # Low bytes come first in memory on all machines that torch runs on.
        words = groups.to(torch.int64).bitwise_left_shift_(_shifts(width, groups)).sum(dim=1)
        packed = words.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)
    return packed[: packed_bytes(numbers.numel(), width)]


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """The numbers again: as bytes, or as words where a byte is too small."""
    if width > 8:
        high = unpack(packed[count:], count, width - 8).to(torch.int32)
        return high.bitwise_left_shift_(8).bitwise_or_(packed[:count])
    if width == 8:
        return packed
    if width == 1 and packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little"))
    if 8 % width == 0:
        return _parted(packed, width)[:count]
    groups = torch.nn.functional.pad(packed, (0, -packed.numel() % width)).view(-1, width)
    joined = torch.nn.functional.pad(groups, (0, 8 - width)).view(torch.int64)
    words = joined.bitwise_right_shift(_shifts(width, joined))
    return words.bitwise_and_((1 << width) - 1).to(torch.uint8).view(-1)[:count]


def digits_bytes(count: int) -> int:
    """Bytes of that many digits of base three: ⌈count / 5⌉."""
    return -(-count // DIGITS)


def pack_digits(digits: Tensor) -> Tensor:
    """Digits of base three, as floating-point numbers, five in a byte."""
    fives = torch.nn.functional.pad(digits, (0, -digits.numel() % DIGITS)).view(-1, DIGITS)
    return torch.mv(fives, _powers().to(fives)).to(torch.uint8)


def unpack_digits(packed: Tensor, count: int) -> Tensor:
    """The digits again, as bytes."""
    of_byte = _digits_of_bytes().to(packed.device)
    return of_byte.index_select(0, packed.to(torch.int32)).view(-1)[:count]


def _joined(words: Tensor, width: int) -> Tensor:
    """Words whose bytes are small numbers, as bytes that hold them all.

    A word that is shifted by the free bits of one byte has its second number beside where the first
    one was, and so on.
    """
    packed = words.clone()
    for place in range(1, words.itemsize):
        packed.bitwise_or_(words.bitwise_right_shift(place * (8 - width)))
    return packed.bitwise_and_(0xFF).to(torch.uint8)


def _parted(packed: Tensor, width: int) -> Tensor:
    """The small numbers that bytes hold, as bytes."""
    words = packed.to(WORDS[width])
    parted = words.clone()
    for place in range(1, words.itemsize):
        parted.bitwise_or_(words.bitwise_left_shift(place * (8 - width)))
    mask = sum(((1 << width) - 1) << 8 * place for place in range(words.itemsize))
    return parted.bitwise_and_(mask).view(torch.uint8)


def _shifts(width: int, like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.int64, device=like.device) * width


@functools.cache
def _digits_of_bytes() -> Tensor:
    """For each byte its five digits."""
    return (torch.arange(256)[:, None] // _powers() % 3).to(torch.uint8)


def _powers() -> Tensor:
    return 3 ** torch.arange(DIGITS)
