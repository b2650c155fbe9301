"""A worker's batches: which samples, in what order, cut where."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, default_collate

from flockstep.data.assignment import (
    Assignment,
    Disjoint,
    FullOverlap,
    Indices,
)
from flockstep.data.batch import Batch, Key, Wanted
from flockstep.data.loader import LoaderSettings
from flockstep.data.sampling import Sampling
from flockstep.data.sources import (
    Collate,
    Source,
    is_stream,
    source_of,
    stream_batches,
)
from flockstep.data.timetable import BatchRule, BatchSize, Timetable, timetable
from flockstep.errors import InvalidField
from flockstep.fields import require, require_flag, require_integer


@dataclass(frozen=True)
class Plan:
    """One worker's part of the data, over the whole training."""

    source: Source
    assignment: Assignment
    sampling: Sampling
    timetable: Timetable
    workers: int
    rank: int
    seed: int
    loader: LoaderSettings | None = None  # whose processes make the batches

    @property
    def passes(self) -> int:
        return self.timetable.passes

    def batches(self, resume_at: int, first_pass: int) -> Iterator[Batch]:
        """All batches from step `resume_at` on. `first_pass` passes over the data have gone
        before.
        """
        wanted = self._wanted(resume_at, first_pass)
        if self.loader is not None:
            return self.loader.loaded(wanted, self.seed, self.rank, first_pass)
        return (replace(batch, data=key.fetch(self.source)) for key, batch in wanted)

    def _wanted(self, resume_at: int, first_pass: int) -> Wanted:
        table = self.timetable
        passes, step = self._whole_passes(resume_at)
        for number in range(passes, table.passes):
            order = self._order(first_pass + number)
            starts, sizes = table.cuts(number, self.rank)
            for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                step += 1
                if step <= resume_at:
                    continue
                # Another worker holds one sample more, which makes a batch of its own. All must
                # take the same number of steps, so this one sees a sample again.
                chosen = order[start : start + size] if start < len(order) else order[:1]
                key = Key(chosen, self.seed, self.rank, first_pass + number, start)
                batch = Batch(
                    None,
                    len(chosen),
                    size / table.first_size,
                    table.weight(index, self.rank),
                    ends_epoch=table.epochs_done(step).is_integer(),
                    ends_pass=index + 1 == len(starts),
                )
                yield key, batch

    def done_in(self, steps: int) -> tuple[int, int, int]:
        """Samples, epochs and passes in this worker's first `steps` batches."""
        most = self.timetable.steps
        require(steps <= most, "resume_at", f"be at most the number of steps, {most}", steps)
        held = len(
            self.sampling.parts(self.assignment, self.source.samples, self.workers, self.seed, 0)[
                self.rank
            ]
        )
        samples, left = 0, steps
        for number in range(self.timetable.passes):
            starts, sizes = self.timetable.cuts(number, self.rank)
            samples += sum(
                min(max(held - start, 1), size)
                for start, size in zip(starts[:left], sizes, strict=False)
            )
            left -= len(starts)
            if left <= 0:
                break
        return samples, int(self.timetable.epochs_done(steps)), self._whole_passes(steps)[0]

    def _whole_passes(self, steps: int) -> tuple[int, int]:
        """How many passes are over after `steps` steps, and how many steps they took."""
        passes = before = 0
        while passes < self.timetable.passes:
            length = len(self.timetable.cuts(passes, self.rank)[0])
            if before + length > steps:
                break
            before += length
            passes += 1
        return passes, before

    def _order(self, number: int) -> Indices:
        parts = self.sampling.parts(
            self.assignment, self.source.samples, self.workers, self.seed, number
        )
        return self.sampling.drawn(parts[self.rank], self.seed, self.rank, number)


@dataclass(frozen=True)
class StreamPlan:
    """One worker's part of an IterableDataset, which is taken as it comes. A pass over it counts
    as an epoch.
    """

    dataset: Any
    batch_size: int
    passes: int
    workers: int
    rank: int
    collate: Collate = default_collate
    drop_last: bool = False
    timetable: None = None  # nobody knows how long a stream is

    def batches(self, resume_at: int, first_pass: int) -> Iterator[Batch]:
        """A stream cannot be entered midway: what was taken before is read again, and dropped."""
        return itertools.islice(self._from_the_start(), resume_at, None)

    def _from_the_start(self) -> Iterator[Batch]:
        for _ in range(self.passes):
            held: tuple[Any, int] | None = None
            # One batch is held back: only the stream's end tells which was the last.
            for batch in stream_batches(
                self.dataset,
                self.batch_size,
                self.workers,
                self.rank,
                self.collate,
                self.drop_last,
            ):
                if held is not None:
                    yield Batch(*held, relative_size=1, weight=1, ends_epoch=False, ends_pass=False)
                held = batch
            least = "one batch of every worker" if self.drop_last else "one sample"
            rule = f"give at least {least} in every pass"
            require(held is not None, "dataset", rule, self.dataset)
            if held is not None:
                yield Batch(*held, relative_size=1, weight=1, ends_epoch=True, ends_pass=True)

    def done_in(self, steps: int) -> tuple[int, int, int]:
        require(
            steps == 0,
            "resume_at",
            "be 0 with an IterableDataset, which cannot be entered midway",
            steps,
        )
        return 0, 0, 0


def plan_batches(
    dataset: Any,
    batch_size: BatchSize | None,
    epochs: int,
    assignment: Assignment,
    sampling: Sampling | None,
    *,
    workers: int,
    rank: int,
    seed: int,
    drop_last: bool = False,
) -> Plan | StreamPlan:
    """The part of `rank`. `epochs` are passes of each worker over its own samples, without the
    last, smaller batch of each with `drop_last`. A DataLoader has a batch size of its own.
    """
    loader = None
    require_flag("drop_last", drop_last)
    if isinstance(dataset, DataLoader):
        rule = "be left out with a DataLoader, which has its own"
        require(batch_size is None, "batch_size", rule, batch_size)
        require(not drop_last, "drop_last", rule, drop_last)
        loader = LoaderSettings(dataset)
        drop_last = loader.drops_last
        dataset, batch_size = dataset.dataset, dataset.batch_size
    if batch_size is None:
        raise InvalidField("'batch_size' must be given")
    require_integer("epochs", epochs, 1)
    require(
        isinstance(assignment, Assignment),
        "assignment",
        "be an assignment such as fs.Disjoint()",
        assignment,
    )
    require(
        sampling is None or isinstance(sampling, Sampling),
        "sampling",
        "be an fs.Sampling(…)",
        sampling,
    )
    if is_stream(dataset):
        # Fixed: of a stream nobody knows how much has been seen.
        require_integer("batch_size", batch_size, 1)
        is_plain = isinstance(assignment, Disjoint | FullOverlap)
        require(
            is_plain,
            "assignment",
            "be Disjoint() or FullOverlap() with an IterableDataset",
            assignment,
        )
        require(
            sampling is None,
            "sampling",
            "be left out with an IterableDataset, which has its own order",
            sampling,
        )
        whole = isinstance(assignment, FullOverlap)
        size = int(batch_size)  # type: ignore[arg-type]
        share = (1, 0) if whole else (workers, rank)
        collate = default_collate if loader is None else loader.collate
        return StreamPlan(dataset, size, epochs, *share, collate, drop_last)
    if not isinstance(batch_size, BatchRule):
        require_integer("batch_size", batch_size, 1)
    source = source_of(dataset) if loader is None else loader.source()
    sampling = sampling or (Sampling() if loader is None else loader.sampling)
    parts = sampling.parts(assignment, source.samples, workers, seed, epoch=0)
    table = timetable(tuple(map(len, parts)), source.samples, epochs, batch_size, drop_last)
    return Plan(source, assignment, sampling, table, workers, rank, seed, loader)
