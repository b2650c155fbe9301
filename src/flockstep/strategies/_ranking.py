"""Who is best: a score of each worker, and the order that follows from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from flockstep.comm import Comm
from flockstep.errors import FlockstepError

if TYPE_CHECKING:
    from flockstep.worker import Worker

SCORES = ("loss", "accuracy")


def ranked(comm: Comm, loss: float) -> list[int]:
    """The workers from the lowest loss to the highest; of equal ones the lower rank first. One
    number per worker.
    """
    return lowest_first(told_by_all(comm, loss))


def told_by_all(comm: Comm, loss: float) -> dict[int, float]:
    """The losses of all who are there, by rank."""
    told = comm.all_gather(torch.tensor(loss, dtype=torch.float64))
    return {rank: float(value) for rank, value in told.by_rank().items()}


def lowest_first(losses: dict[int, float]) -> list[int]:
    return sorted(sorted(losses), key=losses.__getitem__)


def last_score(worker: Worker, score: str) -> float:
    """How well the worker did on its last batch; lower is better."""
    if score == "loss":
        return math.inf if math.isnan(worker.loss) else worker.loss
    if worker.accuracy is None:
        raise FlockstepError(
            f"rank {worker.comm.rank}: score='accuracy' needs that of every batch: "
            "worker.step(loss, accuracy=…)"
        )
    return -worker.accuracy
