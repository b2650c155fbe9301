"""In what order a worker goes through its samples. An order depends on (seed, rank, epoch)
alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from flockstep.data.assignment import Assignment, Indices
from flockstep.fields import require, require_choice
from flockstep.randomness import Purpose, numpy_stream

ORDERS = ("reshuffle", "shuffle_once", "with_replacement", "in_order")
SHUFFLES = ("local", "global")


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn. Nothing is carried from one epoch to the next, so a run can be resumed
    anywhere.

    Fields:
        order: "reshuffle" goes through all of a worker's samples in a new order every epoch,
            "shuffle_once" in the same order every epoch; "with_replacement" draws as many at
            random, some twice and some not at all; "in_order" takes them as they lie in the data.
        shuffle: "local", a worker keeps its samples; or "global", all samples are dealt anew every
            epoch, by the same assignment. In a real cluster that means moving them.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(), sampling=fs.Sampling(shuffle="global"))
    """

    order: str = "reshuffle"
    shuffle: str = "local"

    def __post_init__(self) -> None:
        require_choice("order", self.order, ORDERS)
        require_choice("shuffle", self.shuffle, SHUFFLES)
        keeps = self.shuffle == "local" or self.order != "shuffle_once"
        require(keeps, "shuffle", "be 'local' with order='shuffle_once'", self.shuffle)

    def parts(
        self, assignment: Assignment, samples: int, workers: int, seed: int, epoch: int
    ) -> list[Indices]:
        """Which samples each worker holds in that epoch."""
        dealt_in = epoch if self.shuffle == "global" else 0
        return _assigned(assignment, samples, workers, seed, dealt_in)

    def drawn(self, part: Indices, seed: int, rank: int, epoch: int) -> Indices:
        """The samples of one epoch of the worker that holds `part`, one after the other."""
        if self.order == "in_order":
            return np.sort(part)
        drawn_in = 0 if self.order == "shuffle_once" else epoch
        random = numpy_stream(Purpose.SAMPLE_ORDER, seed, rank, drawn_in)
        if self.order == "with_replacement":
            return part[random.integers(len(part), size=len(part))]
        return random.permutation(part)


@functools.lru_cache(maxsize=8)  # a thousand simulated workers ask for the same assignment
def _assigned(
    assignment: Assignment, samples: int, workers: int, seed: int, epoch: int
) -> list[Indices]:
    return assignment.assign(samples, workers, seed, epoch)
