"""A task whose gradient is noise and nothing else, for what theory says about noise."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

PARAMETERS = 1_000
TRAIN, TEST = 20_000, 10
SEEDS = {TRAIN: 1, TEST: 2}


class Walker(nn.Module):
    """A vector of parameters x, at first 0; of rows ε it gives x·ε, a number each."""

    def __init__(self, parameters: int = PARAMETERS) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(parameters))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.x


@functools.cache  # runs do not change it
def noise(count: int) -> tuple[Tensor]:
    """So many rows of independent standard normal numbers, the same ones in every run."""
    random = torch.Generator().manual_seed(SEEDS[count])
    return (torch.randn(count, PARAMETERS, generator=random),)


def product(model: nn.Module, batch: Any) -> Tensor:
    """The mean of x·ε, whose gradient is the mean of the rows ε, wherever x is."""
    output: Tensor = model(batch[0])
    return output.mean()


def distance_from_start(model: nn.Module, batch: Any) -> float:
    """How far a parameter is from where it began: the root of the mean square of all."""
    (x,) = model.parameters()
    return float(x.double().square().mean().sqrt())
