"""What every worker of a run needs to know."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from flockstep.data import BatchSize, Sampling, Timetable
from flockstep.result import Look
from flockstep.schedules import Schedule
from flockstep.spec import RunSpec
from flockstep.tasks import Task
from flockstep.worker import Worker

if TYPE_CHECKING:
    from flockstep.training.board import Board
    from flockstep.training.figures import Table

ENDLESS = 10**9  # passes over the data, where something else ends the run


def sampling_of(spec: RunSpec) -> Sampling | None:
    """None where it is the usual one: streams take no other, and none at all."""
    return None if spec.sampling == Sampling() else spec.sampling


@dataclass(frozen=True)
class Final:
    """The look at which a run has reached its target, and what it saw."""

    look: Look
    table: Table
    shown: Tensor  # the state of the representative


@dataclass(frozen=True)
class Job:
    """A run, made ready: the spec, the task with its data, and what follows from both.

    Fields:
        passes: of each worker over its own samples.
        steps: after which every worker ends, if that is known.
        timetable: when epochs end, in steps; None for streams.
        model_from_all: every worker brings the model, not the lowest rank alone.
        board: where simulated workers leave copies of themselves to be looked at.
        trace_limit: how many events each worker records; None: none.
        tells_looks: the launcher wants to hear of every look as it happens.
    """

    spec: RunSpec
    task: Task
    batch_size: BatchSize
    schedule: Schedule | None
    passes: int
    steps: int | None
    timetable: Timetable | None
    model_from_all: bool
    trace_limit: int | None = None
    tells_looks: bool = False
    board: Board | None = field(default=None, repr=False)

    def step_of_look(self, number: int) -> int:
        """The step after which that look is due, if looks are counted in steps or epochs."""
        every = self.spec.look_every
        if every.unit == "steps" or self.timetable is None:
            return math.ceil(number * every.count)
        return self.timetable.step_of(number * every.count)

    def epoch_at(self, worker: Worker, table: Table) -> float:
        """How often all workers together have gone over the data."""
        if self.timetable is None:
            return worker.course.epochs_ended
        epochs = self.timetable.epochs_done(int(table.steps) // len(table.figures))
        return int(epochs) if epochs.is_integer() else epochs

    def is_reached_by(self, look: Look) -> bool:
        """Whether the look shows what the run was to reach."""
        target, accuracy = self.spec.target, look.accuracy
        return target is not None and accuracy is not None and accuracy >= target
