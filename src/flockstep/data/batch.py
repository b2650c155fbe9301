"""A batch: what it is made of, and what it means for the course of the training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.data.assignment import Indices
from flockstep.data.sources import Source
from flockstep.randomness import Purpose, numpy_stream


@dataclass(frozen=True)
class Batch:
    """One worker's batch and what it means for the course of the training.

    Fields:
        data: what the model sees.
        samples: how many.
        relative_size: the batch size by now, in terms of the first; 1 unless it grows.
        weight: what its mean gradient counts for among those of all workers.
        ends_epoch: whether all workers together have now gone over the data once more.
        ends_pass: whether this worker has now gone over its own samples once more.
    """

    data: Any
    samples: int
    relative_size: float
    weight: float
    ends_epoch: bool
    ends_pass: bool


@dataclass(frozen=True)
class Key:
    """What a batch is made of.

    Fields:
        chosen: its samples.
        seed, rank, number, start: of the run, the worker, the pass and its place there; they name
            what is drawn for its augmentation.
    """

    chosen: Indices
    seed: int
    rank: int
    number: int
    start: int

    def random(self) -> np.random.Generator:
        """The same batch of the same run is changed alike, resumed or not."""
        names = (self.rank, self.number, self.start)
        return numpy_stream(Purpose.AUGMENTATION, self.seed, *names)

    def fetch(self, source: Source) -> Any:
        return source.fetch(self.chosen, self.random)


Wanted = Iterator[tuple[Key, Batch]]
"""Batches to come, without their data."""
