"""When which batch is due: the same for all workers, and nothing that grows with the length of a
steady training.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class GrowingBatch(Protocol):
    """A batch size that grows in the course of the training, and never shrinks."""

    def size_at(self, fraction: float) -> int:
        """The size of one worker's batch when `fraction` of the training is done."""

    def __hash__(self) -> int: ...


BatchSize = int | GrowingBatch
Cuts = tuple[Sequence[int], Sequence[int]]  # where the batches of a pass begin, and their sizes


class Timetable(ABC):
    """Passes of each worker over its own samples, in steps, and where epochs end meanwhile.

    An epoch ends when all workers together have gone over the data once more: with B samples a step
    on each of M workers every ⌈N/(B·M)⌉ steps, whatever the overlap; and with the last step."""

    passes: int
    steps: int
    epochs: int
    first_size: int

    @abstractmethod
    def cuts(self, number: int) -> Cuts:
        """The batches of a pass. The last may find fewer samples than its size."""

    @abstractmethod
    def epochs_done(self, steps: int) -> float:
        """How many epochs `steps` steps are, fractions too; a whole number where one ends."""

    @abstractmethod
    def step_of(self, epoch: float) -> int:
        """The first step at which so many epochs are over, fractions too."""


@dataclass(frozen=True)
class Steady(Timetable):
    """Batches of one size."""

    longest: int
    samples: int
    workers: int
    passes: int
    first_size: int

    @functools.cached_property
    def _cuts(self) -> Cuts:
        starts = range(0, self.longest, self.first_size)
        return starts, [self.first_size] * len(starts)

    @functools.cached_property
    def _interval(self) -> int:
        return -(-self.samples // (self.first_size * self.workers))

    @functools.cached_property
    def steps(self) -> int:  # type: ignore[override]
        return self.passes * len(self._cuts[0])

    @functools.cached_property
    def epochs(self) -> int:  # type: ignore[override]
        return -(-self.steps // self._interval)

    def cuts(self, number: int) -> Cuts:
        return self._cuts

    def epochs_done(self, steps: int) -> float:
        whole, rest = divmod(steps, self._interval)
        return (
            whole + rest / min(self._interval, self.steps - whole * self._interval)
            if rest
            else float(whole)
        )

    def step_of(self, epoch: float) -> int:
        return math.ceil(epoch * self._interval)


class Growing(Timetable):
    """Batches that grow, at fractions of all samples."""

    def __init__(
        self, longest: int, samples: int, workers: int, passes: int, batch_size: GrowingBatch
    ) -> None:
        self.passes = passes
        self._cuts = [_grown(longest, number, passes, batch_size) for number in range(passes)]
        sizes = [size for _, lengths in self._cuts for size in lengths]
        self.first_size = sizes[0]
        self.steps = len(sizes)
        self._ends = _epoch_ends(np.cumsum(sizes) * workers, samples)
        self.epochs = len(self._ends)

    def cuts(self, number: int) -> Cuts:
        return self._cuts[number]

    def epochs_done(self, steps: int) -> float:
        whole = bisect_right(self._ends, steps)
        if whole == self.epochs:
            return float(whole)
        began = self._ends[whole - 1] if whole else 0
        return whole + (steps - began) / (self._ends[whole] - began)

    def step_of(self, epoch: float) -> int:
        whole = int(epoch)
        if whole >= self.epochs:
            return self.steps
        began = self._ends[whole - 1] if whole else 0
        return began + math.ceil((epoch - whole) * (self._ends[whole] - began))


@functools.lru_cache(maxsize=8)  # a thousand simulated workers ask for the same
def timetable(
    longest: int, samples: int, workers: int, passes: int, batch_size: BatchSize
) -> Timetable:
    """The timetable of `passes` passes over at most `longest` samples a worker, of `samples` in
    all.
    """
    if isinstance(batch_size, int):
        return Steady(longest, samples, workers, passes, batch_size)
    return Growing(longest, samples, workers, passes, batch_size)


def _grown(longest: int, number: int, passes: int, batch_size: GrowingBatch) -> Cuts:
    starts: list[int] = []
    sizes: list[int] = []
    position = 0
    while position < longest:
        starts.append(position)
        sizes.append(batch_size.size_at((number + position / longest) / passes))
        position += sizes[-1]
    return starts, sizes


def _epoch_ends(processed: np.ndarray, samples: int) -> list[int]:
    """The steps at which another `samples` have been processed since the last such step, and the
    last step.
    """
    ends: list[int] = []
    before = 0
    while before + samples <= processed[-1]:
        step = int(np.searchsorted(processed, before + samples))
        before = int(processed[step])
        ends.append(step + 1)
    return ends if ends[-1:] == [len(processed)] else [*ends, len(processed)]
