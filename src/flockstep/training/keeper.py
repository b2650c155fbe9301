"""Checkpoints of a run whose time passes by itself: all workers meet for them."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from flockstep.checkpoints import Writer, save_together
from flockstep.errors import CheckpointError
from flockstep.training.budget import Agreement, next_multiple
from flockstep.training.figures import Table
from flockstep.training.job import Job, Keeping
from flockstep.worker import Worker

if TYPE_CHECKING:
    from flockstep.training.observer import Observer

# Of the steps between two looks or checkpoints: one that comes so much too early is on time.
NEAR_ENOUGH = 0.02


def keeper_of(worker: Worker, job: Job) -> Keeper | None:
    """None where nothing is kept, or simulated workers keep themselves."""
    if job.keeping is None or job.board is not None:
        return None
    return Keeper(worker, job, job.keeping)


def close(writer: Writer) -> None:
    """See that all is written. What was trained is not lost to a checkpoint that is not."""
    try:
        writer.wait()
    except CheckpointError as error:
        warnings.warn(str(error), stacklevel=2)


class Keeper:
    """One worker's part in taking checkpoints.

    Those who wait for each other take them after the same step, others when their clocks show the
    time that they agreed on: nothing is half exchanged then. Meanwhile the clocks stand still.

    Fields:
        moment: when those meet who never wait, by their clocks.
    """

    def __init__(self, worker: Worker, job: Job, keeping: Keeping) -> None:
        self._worker = worker
        self._job = job
        self._keeping = keeping
        self._writer = Writer(keeping.folder, keeping.keep)
        by_time = keeping.every.unit == "seconds"
        self._seconds = keeping.every.count if by_time else math.inf
        self._agreement = Agreement(worker, self._seconds)
        self._number = 0  # of those that were taken, or passed over
        self.moment = self._seconds if by_time else 0.0

    def in_step(self, observer: Observer) -> None:
        """Take one if it is time to. All workers ask after the same step."""
        _, is_time = self._agreement.after_step()
        if is_time or self._is_step_of_one():
            with self._worker.comm.off_the_clock():
                self._save(observer)

    def on_the_clock(self, observer: Observer, table: Table, first: Table, is_done: bool) -> None:
        """Take one if it is time to. All workers have met, off the clock."""
        if self._seconds < math.inf:
            if table.first_seconds >= self.moment:
                self.moment = next_multiple(table.seconds, self._seconds)
                self._save(observer, is_done)
            return
        steps = table.steps / len(table.figures)
        before, goal = (self._job.step_of(self._keeping.every, self._number + n) for n in (0, 1))
        if goal - steps <= NEAR_ENOUGH * (goal - before):
            self._number += 1
            goal = self._pass_over(steps)
            self._save(observer, is_done)
        self.moment = table.seconds  # one step more, and the pace is known
        if table is not first:
            half_way = (steps + goal) / 2 if self._number == 0 and goal - steps > 1 else goal
            self.moment = table.moment_of(half_way * len(table.figures), first)

    def pass_over(self, steps: int) -> None:
        """The run begins with so many steps taken."""
        self._agreement.pass_over(steps)

    def close(self) -> None:
        """See that all is written."""
        close(self._writer)

    def _is_step_of_one(self) -> bool:
        every, worker = self._keeping.every, self._worker
        if every.unit == "seconds":
            return False
        if every.unit == "epochs" and self._job.timetable is None:  # of a stream
            is_due = worker.course.epochs_ended >= (self._number + 1) * every.count
            self._number += is_due
            return is_due
        is_due = worker.steps >= self._job.step_of(every, self._number + 1)
        self._pass_over(worker.steps)
        return is_due

    def _pass_over(self, steps: float) -> int:
        """The step of the next checkpoint behind those that are done."""
        every, end = self._keeping.every, self._job.steps
        while (goal := self._job.step_of(every, self._number + 1)) <= steps:
            if end is not None and goal >= end:
                break
            self._number += 1
        return goal

    def _save(self, observer: Observer, is_over: bool = False) -> None:
        save_together(
            self._worker,
            self._writer,
            self._keeping.about,
            observer=observer.saved(),
            is_over=is_over,
            keeper=[self._number, self.moment, self._agreement.saved()],
        )

    def go_on(self, saved: list[Any]) -> None:
        """From a checkpoint."""
        self._number, self.moment, agreement = saved
        self._agreement.load(agreement)
