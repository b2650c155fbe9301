"""What workers share: a scheme in figures, for tests and pictures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flockstep.data.assignment import Assignment


@dataclass(frozen=True)
class Overlap:
    """A scheme for so many samples and workers.

    Fields:
        held: workers × samples, whether a worker holds a sample. Samples that the same workers hold
            are neighbours.
        common: workers × workers, how many samples two of them both hold; on the diagonal, how many
            one holds.
    """

    held: NDArray[np.bool_]
    common: NDArray[np.int64]

    @property
    def pairs(self) -> NDArray[np.int64]:
        """How many samples each pair of different workers has in common."""
        return self.common[np.triu_indices(len(self.common), k=1)]


def overlap_of(assignment: Assignment, samples: int, workers: int, seed: int) -> Overlap:
    """Apply the scheme, and look at who holds what."""
    held = np.zeros((workers, samples), dtype=bool)
    for row, part in zip(held, assignment.assign(samples, workers, seed), strict=True):
        row[part] = True
    counts = held.astype(np.float32)  # exact up to 16 million samples, and fast to multiply
    common = np.rint(counts @ counts.T).astype(np.int64)
    return Overlap(held[:, np.lexsort(~held[::-1])], common)
