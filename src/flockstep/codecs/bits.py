"""Small whole numbers as a row of bits: eight numbers of b bits are b bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_bytes(count: int, width: int) -> int:
    """Bytes of that many numbers: ⌈count · width / 8⌉."""
    return -(-count * width // 8)


def pack(numbers: Tensor, width: int) -> Tensor:
    """Numbers below 2^width, as bytes, in `width` bits each."""
    if width == 8:
        return numbers
    eights = torch.nn.functional.pad(numbers, (0, -numbers.numel() % 8)).view(-1, 8).to(torch.int64)
    # Low bytes come first in memory on all machines that torch runs on.
    words = eights.bitwise_left_shift_(_shifts(width)).sum(dim=1)
    return (
        words.view(torch.uint8)
        .view(-1, 8)[:, :width]
        .reshape(-1)[: packed_bytes(numbers.numel(), width)]
    )


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """The numbers again, as bytes."""
    if width == 8:
        return packed
    groups = torch.nn.functional.pad(packed, (0, -packed.numel() % width)).view(-1, width)
    words = torch.nn.functional.pad(groups, (0, 8 - width)).view(torch.int64)
    return (
        words.bitwise_right_shift(_shifts(width))
        .bitwise_and_((1 << width) - 1)
        .to(torch.uint8)
        .view(-1)[:count]
    )


def _shifts(width: int) -> Tensor:
    return torch.arange(8, dtype=torch.int64) * width
