"""Where a replica stands among all possible parameters, in a few numbers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flockstep.randomness import Purpose, torch_stream

DIMENSIONS = 16
DIGITS = 6  # that count


def position_of(parameters: Tensor) -> list[float]:
    """A random projection of the parameters to 16 numbers, the same one in every run: distances
    between replicas, and between looks, are kept but for some tens of per cent.

    Each parameter is added to one of the numbers, with a sign, both drawn once (a "count sketch",
    Charikar, Chen and Farach-Colton 2002): one pass, whatever the model's size."""
    places, signs = _draws(parameters.numel())
    sums = torch.zeros(DIMENSIONS, dtype=torch.float64)
    sums.index_add_(0, places, parameters.detach().cpu().double() * signs)
    return [float(f"{each:.{DIGITS}g}") for each in sums.tolist()]


@functools.lru_cache(maxsize=1)  # a run has one model
def _draws(count: int) -> tuple[Tensor, Tensor]:
    random = torch_stream(Purpose.PROJECTION, 0)
    places = torch.randint(DIMENSIONS, (count,), generator=random, dtype=torch.int32)
    signs = torch.randint(2, (count,), generator=random, dtype=torch.int8)
    return places, signs * 2 - 1
