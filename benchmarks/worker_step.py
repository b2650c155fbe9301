"""The same training as a Flockstep worker, on any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from torch.nn import functional as F

import flockstep as fs
from benchmarks.training import Batch, sgd
from flockstep.models import LeNet5


def worker_step(
    comm: fs.Comm, strategy: fs.Strategy[Any], batches: Sequence[Batch]
) -> Callable[[], None]:
    """A step of one worker's loop; each call takes the next batch."""
    return make_worker(comm, strategy, batches)[1]


def make_worker(
    comm: fs.Comm, strategy: fs.Strategy[Any], batches: Sequence[Batch]
) -> tuple[fs.Worker, Callable[[], None]]:
    """A worker and a step of its loop."""
    model = LeNet5()
    worker, stream = fs.Worker(comm, model, sgd(model), strategy), cycle(batches)

    def step() -> None:
        images, labels = next(stream)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        worker.step(loss)

    return worker, step
