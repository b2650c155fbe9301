"""How far a worker has come through its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flockstep.data.background import Ahead, InBackground
from flockstep.data.batch import Batch
from flockstep.data.batches import Plan, StreamPlan

NOT_SAVED = ("_plan", "is_resumed")


class Course:
    """What a worker has taken of its data so far, over all its loops.

    Fields:
        samples: that it has taken.
        epoch: how often all workers together have gone over the data, once the batch that ends an
            epoch has been used.
        epochs_ended: the same, as soon as that batch is taken.
        passes: of this worker over its own samples, once the last batch of each has been used.
        relative_size: the batch size by now, in terms of the first.
        weight: what the gradients of the batches that are not used yet count for, on average.
        taken: batches of the loop that is under way.
        used: those of them that are in a step already. Gradients of several may make one step.
        passes_before: that loop began.
        is_resumed: whether the next loop is the one that a checkpoint was taken in.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.epoch = 0
        self.epochs_ended = 0
        self.passes = 0
        self.relative_size = 1.0
        self.weight = 1.0
        self.taken = 0
        self.used = 0
        self._passes_ended = 0
        self.passes_before = 0
        self._plan: Plan | StreamPlan | None = None
        self._epochs_before = 0
        self.is_resumed = False

    def begin(self, plan: Plan | StreamPlan, resume_at: int) -> None:
        """Go by `plan` from now on, of which `resume_at` batches are taken already."""
        if self.is_resumed:  # the loop that a checkpoint was taken in: all is counted already
            self._plan, self.is_resumed = plan, False
            self.epoch = self.epochs_ended
            return
        self._plan, self.taken, self.used = plan, resume_at, resume_at
        self._epochs_before, self.passes_before = self.epoch, self.passes
        samples, epochs, passes = plan.done_in(resume_at)
        self.samples += samples
        self.epoch += epochs
        self.passes += passes
        self.epochs_ended, self._passes_ended = self.epoch, self.passes

    def saved(self) -> dict[str, float]:
        """How far it has come, after a step."""
        return {name: value for name, value in vars(self).items() if name not in NOT_SAVED}

    def load(self, saved: Mapping[str, float], is_in_loop: bool, is_exhausted: bool) -> None:
        """Go on from there: with the next loop, if one was under way. One that is exhausted gives
        no more batches, but is gone through: until then its epoch is not over.
        """
        vars(self).update(saved)
        self.is_resumed = is_in_loop
        if is_exhausted:
            self.epoch = self._epochs_before

    def take(self, batch: Batch) -> None:
        self.samples += batch.samples
        self.relative_size = batch.relative_size
        waiting = self.taken - self.used
        self.weight = (self.weight * waiting + batch.weight) / (waiting + 1)
        self._count(batch)

    def skip(self, batch: Batch) -> None:
        """Nobody looks at this batch."""
        self._count(batch)
        self.go_on()

    def use(self) -> None:
        """A step has been made of what was taken."""
        self.used = self.taken
        self.go_on()

    def go_on(self) -> None:
        """What was taken lies behind."""
        self.epoch, self.passes = self.epochs_ended, self._passes_ended

    def _count(self, batch: Batch) -> None:
        self.taken += 1
        self.epochs_ended += batch.ends_epoch
        self._passes_ended += batch.ends_pass

    @property
    def epochs_done(self) -> float:
        """How many epochs had passed before the batches that the next step is made of, fractions
        too.
        """
        if self._plan is None or self._plan.timetable is None:
            return self.epoch
        return self._epochs_before + self._plan.timetable.epochs_done(self.used)


class Batches(Iterator[Any]):
    """One loop of a worker over its data, as `worker.batches` gives it.

        for x, y in batches: …

        for epoch in batches.by_epoch():
            for x, y in epoch: …

    However a loop ends, threads and processes that prepare its batches end with it.

    Fields:
        steps: how many batches there are; None where nobody knows.
        has_ended: whether the loop over them is over.
    """

    def __init__(
        self,
        course: Course,
        plan: Plan | StreamPlan,
        resume_at: int,
        steps: int | None,
        prefetch: int = 0,
        convert: Callable[[Any], Any] = lambda data: data,
    ) -> None:
        known = None if plan.timetable is None else plan.timetable.steps
        self.steps = min((each for each in (known, steps) if each is not None), default=None)
        self.has_ended = False
        course.begin(plan, resume_at)
        self._passes_left = plan.passes - (course.passes - course.passes_before)
        self._course = course
        self._coming = plan.batches(course.taken, course.passes_before)
        if prefetch:
            self._coming = Ahead(self._coming, prefetch)
        self._is_in_epoch = False
        self._convert = convert

    def __iter__(self) -> Iterator[Any]:
        try:
            while (batch := self._take()) is not None:
                yield self._convert(batch.data)
        finally:
            self.pause()

    def __next__(self) -> Any:
        batch = self._take()
        if batch is None:
            self.pause()
            raise StopIteration
        return self._convert(batch.data)

    def by_epoch(self) -> Iterator[Iterator[Any]]:
        """The batches of each epoch: of each pass over this worker's samples. What is left of an
        epoch whose loop was broken off is passed over.
        """
        try:
            while self.has_more:
                yield self._epoch()
                while self._is_in_epoch and self.has_more:
                    batch = next(self._coming)
                    self._course.skip(batch)
                    self._note(batch)
            self.has_ended = True
        finally:
            self.pause()

    def pause(self) -> None:
        """End what prepares batches in the background, until somebody asks for another."""
        if isinstance(self._coming, InBackground):
            self._coming.pause()

    def _epoch(self) -> Iterator[Any]:
        while (batch := self._take()) is not None:
            yield self._convert(batch.data)
            if not self._is_in_epoch:
                self._course.go_on()
                return

    def _take(self) -> Batch | None:
        self._course.go_on()
        if not self.has_more:
            self.has_ended = True
            return None
        batch = next(self._coming)
        self._course.take(batch)
        self._note(batch)
        return batch

    @property
    def has_more(self) -> bool:
        """Whether there are batches left."""
        is_long_enough = self.steps is None or self._course.taken < self.steps
        return self._passes_left > 0 and is_long_enough

    def _note(self, batch: Batch) -> None:
        self._is_in_epoch = not batch.ends_pass
        self._passes_left -= batch.ends_pass
