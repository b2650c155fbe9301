"""When which batch is due: the same for all workers, and nothing that grows with the length of a
steady training.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flockstep.fields import require


class BatchRule(ABC):
    """Base class: a batch size that is not one number for every worker and step. Children are
    frozen dataclasses.
    """

    @abstractmethod
    def timetable(
        self, held: tuple[int, ...], samples: int, passes: int, drop_last: bool
    ) -> Timetable:
        """For workers of which each holds so many samples, of `samples` in all. With `drop_last` a
        pass ends before its first batch for which somebody has too few.
        """


BatchSize = int | BatchRule
Cuts = tuple[Sequence[int], Sequence[int]]  # where the batches of a pass begin, and their sizes


class Timetable(ABC):
    """Passes of each worker over its own samples, in steps, and where epochs end meanwhile.

    An epoch ends when all workers together have gone over the data once more: with B samples a step
    on each of M workers every ⌈N/(B·M)⌉ steps, whatever the overlap; and with the last step. Where
    the last, smaller batches of passes are dropped, what they leave out counts as gone over."""

    passes: int
    steps: int
    epochs: int
    first_size: float

    @abstractmethod
    def cuts(self, number: int, rank: int) -> Cuts:
        """A rank's batches of a pass, as many as every other's. The last may find fewer samples
        than its size.
        """

    @abstractmethod
    def epochs_done(self, steps: int) -> float:
        """How many epochs `steps` steps are, fractions too; a whole number where one ends."""

    @abstractmethod
    def step_of(self, epoch: float) -> int:
        """The first step at which so many epochs are over, fractions too."""

    def weight(self, index: int, rank: int) -> float:
        """What the mean gradient of a rank's batch counts for among all ranks', if that is the
        batch's number in its pass: more than 1 where it has more samples than the others'.
        """
        return 1.0


@dataclass(frozen=True)
class Regular(Timetable):
    """As many samples in every step, of all workers together.

    Fields:
        held: how many samples each rank holds.
        samples: in all.
        together: a step.
        drop_last: whether a pass ends before the first step that would find fewer.
    """

    held: tuple[int, ...]
    samples: int
    passes: int
    together: int
    drop_last: bool = False

    @functools.cached_property
    def first_size(self) -> float:  # type: ignore[override]
        return self.together / len(self.held)

    @functools.cached_property
    def _interval(self) -> int:
        if self.drop_last:  # a pass is sum(held)/samples epochs
            return -(-self._steps_of_pass * self.samples // sum(self.held))
        return -(-self.samples // self.together)

    @functools.cached_property
    def _steps_of_pass(self) -> int:
        return self._whole_steps if self.drop_last else self._all_steps

    @functools.cached_property
    def _all_steps(self) -> int:
        """Until the last rank has taken all that it holds."""
        return -(-max(self.held) * len(self.held) // self.together)

    @functools.cached_property
    def _whole_steps(self) -> int:
        """In which every rank finds as many samples as it should."""
        return min(self.held) * len(self.held) // self.together

    @functools.cached_property
    def steps(self) -> int:  # type: ignore[override]
        return self.passes * self._steps_of_pass

    @functools.cached_property
    def epochs(self) -> int:  # type: ignore[override]
        return -(-self.steps // self._interval)

    def epochs_done(self, steps: int) -> float:
        whole, rest = divmod(steps, self._interval)
        return (
            whole + rest / min(self._interval, self.steps - whole * self._interval)
            if rest
            else float(whole)
        )

    def step_of(self, epoch: float) -> int:
        return math.ceil(epoch * self._interval)


@dataclass(frozen=True)
class Steady(Regular):
    """Batches of one size."""

    @functools.cached_property
    def _cuts(self) -> Cuts:
        size = self.together // len(self.held)
        starts = range(0, self._steps_of_pass * size, size)
        return starts, [size] * len(starts)

    def cuts(self, number: int, rank: int) -> Cuts:
        return self._cuts


@dataclass(frozen=True)
class Dealt(Regular):
    """Batches of all workers together that do not divide by their number.

    Of G samples in step t of a pass, the worker in place r of M takes

        b = ⌊((t + 1)·G + M − 1 − r)/M⌋ − ⌊(t·G + M − 1 − r)/M⌋

    which are G in all. They differ by at most one, between workers and between steps, so that all
    come to the end of equal parts in the same step. Who holds one sample more has an early
    place."""

    @functools.cached_property
    def _places(self) -> list[int]:
        """Of each rank."""
        order = sorted(range(len(self.held)), key=lambda rank: -self.held[rank])
        return sorted(range(len(self.held)), key=order.__getitem__)

    def _start(self, step: int, rank: int) -> int:
        workers = len(self.held)
        return (step * self.together + workers - 1 - self._places[rank]) // workers

    @functools.cached_property
    def _all_steps(self) -> int:
        pairs = zip(self.held, self._places, strict=True)
        needed = (len(self.held) * (held - 1) + place + 1 for held, place in pairs)
        return -(-max(needed) // self.together)

    def cuts(self, number: int, rank: int) -> Cuts:
        starts = [self._start(step, rank) for step in range(self._steps_of_pass + 1)]
        return starts[:-1], np.diff(starts).tolist()

    def weight(self, index: int, rank: int) -> float:
        workers, found = len(self.held), self.together
        if index >= self._whole_steps:
            found = sum(self._found(index, each) for each in range(workers))
        return self._found(index, rank) * workers / found

    @functools.cached_property
    def _whole_steps(self) -> int:
        pairs = zip(self.held, self._places, strict=True)
        return min((len(self.held) * held + place) // self.together for held, place in pairs)

    def _found(self, index: int, rank: int) -> int:
        """How many samples that batch has. At the end of a pass some find fewer, or see one
        again.
        """
        start, end = self._start(index, rank), self._start(index + 1, rank)
        return max(min(end, self.held[rank]) - start, 1)


class Growing(Timetable):
    """Batches that grow; `size_at` says how large one worker's is at a fraction of all samples."""

    def __init__(
        self,
        held: tuple[int, ...],
        samples: int,
        passes: int,
        size_at: Callable[[float], int],
        drop_last: bool = False,
    ) -> None:
        self.passes = passes
        self._cuts = [_grown(max(held), number, passes, size_at) for number in range(passes)]
        if drop_last:
            self._cuts = [_whole(*cuts, min(held)) for cuts in self._cuts]
        sizes = [size for _, lengths in self._cuts for size in lengths]
        self.first_size = sizes[0]
        self.steps = len(sizes)

        processed = np.cumsum(sizes) * len(held)
        if drop_last:  # what is left out of a pass counts with its last step
            before = np.repeat(np.arange(passes), [len(lengths) for _, lengths in self._cuts])
            places = [
                start + size for cuts in self._cuts for start, size in zip(*cuts, strict=True)
            ]
            processed = before * sum(held) + np.asarray(places) * len(held)
            last_steps = np.cumsum([len(lengths) for _, lengths in self._cuts]) - 1
            processed[last_steps] = np.arange(1, passes + 1) * sum(held)
        self._ends = _epoch_ends(processed, samples)
        self.epochs = len(self._ends)

    def cuts(self, number: int, rank: int) -> Cuts:
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


def require_within(field: str, size: int, samples: int) -> None:
    """A batch that there are samples for."""
    require(size <= samples, field, f"be at most the number of samples, {samples}", size)


def require_whole(field: str, size: int, samples: int) -> None:
    """A batch that is not dropped in every pass: each worker has samples for it."""
    rule = f"be at most the samples of a worker, {samples}, with drop_last=True"
    require(size <= samples, field, rule, size)


@functools.lru_cache(maxsize=8)  # a thousand simulated workers ask for the same
def timetable(
    held: tuple[int, ...],
    samples: int,
    passes: int,
    batch_size: BatchSize,
    drop_last: bool = False,
) -> Timetable:
    """The timetable of `passes` passes over the samples that each worker holds, of `samples` in
    all.
    """
    if isinstance(batch_size, int):
        require_within("batch_size", batch_size, samples)
        if drop_last:
            require_whole("batch_size", batch_size, min(held))
        return Steady(held, samples, passes, batch_size * len(held), drop_last)
    return batch_size.timetable(held, samples, passes, drop_last)


def _grown(longest: int, number: int, passes: int, size_at: Callable[[float], int]) -> Cuts:
    starts: list[int] = []
    sizes: list[int] = []
    position = 0
    while position < longest:
        starts.append(position)
        sizes.append(size_at((number + position / longest) / passes))
        position += sizes[-1]
    return starts, sizes


def _whole(starts: Sequence[int], sizes: Sequence[int], shortest: int) -> Cuts:
    """The batches of a pass for which every worker has samples enough."""
    require_whole("batch_size", sizes[0], shortest)
    count = sum(start + size <= shortest for start, size in zip(starts, sizes, strict=True))
    return starts[:count], sizes[:count]


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
