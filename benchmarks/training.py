"""The training that is timed: gradient steps on synthetic images.

It knows torch alone: processes that torch spawns import it, and should load no more than they need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH_SIZE = 32
BATCHES = 64

Batch = tuple[Tensor, Tensor]


def synthetic_batches() -> list[Batch]:
    """Noise for images of 28×28 and labels of ten classes, always the same."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(BATCHES, BATCH_SIZE, 1, 28, 28, generator=random)
    labels = torch.randint(10, (BATCHES, BATCH_SIZE), generator=random)
    return list(zip(images, labels, strict=True))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def ordinary_step(model: nn.Module, batches: Sequence[Batch]) -> Callable[[], None]:
    """A step of an ordinary loop; each call takes the next batch."""
    optimizer, stream = sgd(model), cycle(batches)

    def step() -> None:
        images, labels = next(stream)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
