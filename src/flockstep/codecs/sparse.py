"""What codecs share that send a few elements with their places."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from flockstep.codecs.flags import flags_of, places_of

SAMPLE = 1 << 15
WORTH_SAMPLING = 1 << 18


def share_of(elements: int, ratio: float) -> int:
    """How many of the elements are sent: at least one, if there are any."""
    return min(elements, max(1, round(elements * ratio)))


def largest(tensor: Tensor, count: int) -> Tensor:
    """The places of the `count` elements that are largest by absolute value.

    A sample tells below which value hardly any of them lies, so that only what is above need be
    compared."""
    sizes = tensor.abs()
    if tensor.numel() < WORTH_SAMPLING or count > tensor.numel() // 10:
        return torch.topk(sizes, count, sorted=False).indices
    sample = sizes[:: tensor.numel() // SAMPLE]
    share = min(
        1.0, 1.2 * count / tensor.numel() + 3 / SAMPLE**0.5 * (count / tensor.numel()) ** 0.5
    )
    bound = torch.topk(sample, max(1, int(share * sample.numel())), sorted=False).values.min()
    places = places_of(flags_of(sizes, operator.ge, float(bound)))
    if len(places) < count:  # the sample was off
        return torch.topk(sizes, count, sorted=False).indices
    return places[torch.topk(sizes[places], count, sorted=False).indices]
