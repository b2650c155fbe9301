"""A worker's batches: which samples, in what order, cut where."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flockstep.data.assignment import Assignment, Disjoint, FullOverlap, Indices
from flockstep.data.sampling import Sampling
from flockstep.data.sources import Source, is_stream, source_of, stream_batches
from flockstep.fields import require, require_integer


class GrowingBatch(Protocol):
    """A batch size that grows in the course of the training, and never shrinks."""

    def size_at(self, fraction: float) -> int:
        """The size of one worker's batch when `fraction` of the training is done."""

    def __hash__(self) -> int: ...


BatchSize = int | GrowingBatch


@dataclass(frozen=True)
class Batch:
    """One worker's batch and what it means for the course of the training.

    Fields:
        data: what the model sees.
        samples: how many.
        relative_size: the batch size by now, in terms of the first; 1 unless it grows.
        ends_epoch: whether all workers together have now gone over the data once more.
    """

    data: Any
    samples: int
    relative_size: float
    ends_epoch: bool


@dataclass(frozen=True)
class Timetable:
    """When which batch is due: the same for all workers.

    Fields:
        starts: of each pass over a worker's samples, where its batches begin.
        sizes: the batch size of each step of the training; the last batch of a pass may have fewer samples.
        epoch_ends: the steps after which all workers together have gone over the data once more. With B samples a
            step on each of M workers that is every ⌈N/(B·M)⌉ steps, whatever the overlap; and the last step.
    """

    starts: tuple[Indices, ...]
    sizes: Indices
    epoch_ends: Indices

    @property
    def steps(self) -> int:
        return len(self.sizes)

    def epoch_at(self, step: int) -> float:
        """How often the data have been gone over when `step` steps are done, fractions too."""
        whole = int(np.searchsorted(self.epoch_ends, step, side="right"))
        if whole == len(self.epoch_ends):
            return float(whole)
        began = int(self.epoch_ends[whole - 1]) if whole else 0
        return whole + (step - began) / (int(self.epoch_ends[whole]) - began)


@dataclass(frozen=True)
class Plan:
    """One worker's part of the data, over the whole training."""

    source: Source
    samples: int
    assignment: Assignment
    sampling: Sampling
    timetable: Timetable
    workers: int
    rank: int
    seed: int

    def batches(self, resume_at: int, first_pass: int) -> Iterator[Batch]:
        """All batches from step `resume_at` on. `first_pass` passes over the data have gone before."""
        table = self.timetable
        ends = set(table.epoch_ends.tolist())
        step = 0
        for number, starts in enumerate(table.starts, first_pass):
            if step + len(starts) <= resume_at:
                step += len(starts)
                continue
            order = self._order(number)
            for start in starts.tolist():
                step += 1
                if step <= resume_at:
                    continue
                size = int(table.sizes[step - 1])
                # Another worker holds one sample more, which makes a batch of its own. All must take the same number
                # of steps, so this one sees a sample again.
                chosen = order[start : start + size] if start < len(order) else order[:1]
                data = self.source.fetch(chosen, functools.partial(self._random, number, start))
                yield Batch(data, len(chosen), size / int(table.sizes[0]), step in ends)

    def samples_in(self, steps: int) -> int:
        """How many samples this worker's first `steps` batches have."""
        most = self.timetable.steps
        require(steps <= most, "resume_at", f"be at most the number of steps, {most}", steps)
        held = len(self.sampling.parts(self.assignment, self.samples, self.workers, self.seed, 0)[self.rank])
        starts = np.concatenate(self.timetable.starts)[:steps]
        return int(np.clip(held - starts, 1, self.timetable.sizes[:steps]).sum())

    def epochs_in(self, steps: int) -> int:
        return int(np.searchsorted(self.timetable.epoch_ends, steps, side="right"))

    def _order(self, number: int) -> Indices:
        parts = self.sampling.parts(self.assignment, self.samples, self.workers, self.seed, number)
        return self.sampling.drawn(parts[self.rank], self.seed, self.rank, number)

    def _random(self, number: int, start: int) -> np.random.Generator:
        """For augmentation. The same batch of the same run is changed alike, resumed or not."""
        return np.random.default_rng([self.seed, self.rank, number, start, 0xA6])


@dataclass(frozen=True)
class StreamPlan:
    """One worker's part of an IterableDataset, which is taken as it comes. A pass over it counts as an epoch."""

    dataset: Any
    batch_size: int
    passes: int
    workers: int
    rank: int
    timetable: None = None

    def samples_in(self, steps: int) -> int:
        require(steps == 0, "resume_at", "be 0 with an IterableDataset, which cannot be entered midway", steps)
        return 0

    def epochs_in(self, steps: int) -> int:
        return 0

    def batches(self, resume_at: int, first_pass: int) -> Iterator[Batch]:
        for _ in range(self.passes):
            held: tuple[Any, int] | None = None
            # One batch is held back: only the stream's end tells which was the last.
            for batch in stream_batches(self.dataset, self.batch_size, self.workers, self.rank):
                if held is not None:
                    yield Batch(*held, relative_size=1, ends_epoch=False)
                held = batch
            require(held is not None, "dataset", "give at least one sample in every pass", self.dataset)
            if held is not None:
                yield Batch(*held, relative_size=1, ends_epoch=True)


def plan(
    dataset: Any,
    batch_size: BatchSize,
    epochs: int,
    assignment: Assignment,
    sampling: Sampling | None,
    *,
    workers: int,
    rank: int,
    seed: int,
) -> Plan | StreamPlan:
    """The part of `rank`. `epochs` are passes of each worker over its own samples."""
    require_integer("epochs", epochs, 1)
    require(isinstance(assignment, Assignment), "assignment", "be an assignment such as fs.Disjoint()", assignment)
    if is_stream(dataset):
        return _stream_plan(dataset, batch_size, epochs, assignment, sampling, workers, rank)
    if isinstance(batch_size, int) or not hasattr(batch_size, "size_at"):
        require_integer("batch_size", batch_size, 1)
    source = source_of(dataset)
    sampling = sampling or Sampling()
    parts = sampling.parts(assignment, source.samples, workers, seed, epoch=0)
    table = timetable(max(map(len, parts)), source.samples, workers, epochs, batch_size)
    return Plan(source, source.samples, assignment, sampling, table, workers, rank, seed)


def _stream_plan(
    dataset: Any,
    batch_size: BatchSize,
    epochs: int,
    assignment: Assignment,
    sampling: Sampling | None,
    workers: int,
    rank: int,
) -> StreamPlan:
    require_integer("batch_size", batch_size, 1)  # how much of a stream has been seen, nobody knows
    is_plain = isinstance(assignment, Disjoint | FullOverlap)
    require(is_plain, "assignment", "be Disjoint() or FullOverlap() with an IterableDataset", assignment)
    require(sampling is None, "sampling", "be left out with an IterableDataset, which has its own order", sampling)
    if isinstance(assignment, FullOverlap):
        workers, rank = 1, 0
    return StreamPlan(dataset, int(batch_size), epochs, workers, rank)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=8)  # a thousand simulated workers ask for the same
def timetable(longest: int, samples: int, workers: int, passes: int, batch_size: BatchSize) -> Timetable:
    """The timetable of `passes` passes over at most `longest` samples a worker, of `samples` in all."""
    starts, sizes = [], []
    for number in range(passes):
        begins, lengths = _cut(longest, number / passes, 1 / passes, batch_size)
        starts.append(begins)
        sizes.append(lengths)
    all_sizes = np.concatenate(sizes)
    return Timetable(tuple(starts), all_sizes, _epoch_ends(np.cumsum(all_sizes) * workers, samples))


def _cut(longest: int, before: float, width: float, batch_size: BatchSize) -> tuple[Indices, Indices]:
    """Where the batches of one pass begin, and their sizes. The pass is `width` of the training, after `before`."""

    def size_at(position: int) -> int:
        if isinstance(batch_size, int):
            return batch_size
        return batch_size.size_at(before + width * position / longest)

    first = size_at(0)
    if first == size_at(longest - 1):
        starts = np.arange(0, longest, first)
        return starts, np.full(len(starts), first)
    begins, lengths = [], []
    position = 0
    while position < longest:
        begins.append(position)
        lengths.append(size_at(position))
        position += lengths[-1]
    return np.array(begins), np.array(lengths)


def _epoch_ends(processed: Indices, samples: int) -> Indices:
    """The steps at which another `samples` have been processed since the last such step, and the last step."""
    ends: list[int] = []
    before = 0
    while before + samples <= processed[-1]:
        step = int(np.searchsorted(processed, before + samples))
        before = int(processed[step])
        ends.append(step + 1)
    if not ends or ends[-1] != len(processed):
        ends.append(len(processed))
    return np.array(ends)
