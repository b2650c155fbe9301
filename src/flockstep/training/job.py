"""What every worker of a run needs to know."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flockstep.checkpoints import Checkpoint
from flockstep.data import BatchSize, Sampling, Timetable
from flockstep.intervals import Interval
from flockstep.result import Look
from flockstep.schedules import Schedule
from flockstep.spec import RunSpec
from flockstep.tasks import Task
from flockstep.worker import Worker

if TYPE_CHECKING:
    from flockstep.training.another_size import Start
    from flockstep.training.board import Board
    from flockstep.training.figures import Table
    from flockstep.training.snapshots import Resumed, Snapshots

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
class Keeping:
    """Where and how often checkpoints are taken.

    Fields:
        every: epochs or steps of the run, or seconds of the wall's clock, whatever the run's is.
        keep: how many whole ones stay.
        about: what `resume` has to know of the run.
    """

    folder: Path
    every: Interval
    keep: int
    about: dict[str, Any] = field(default_factory=dict)


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
        keeping: where and how often checkpoints are taken; None: never.
        resumed: the checkpoint that the run goes on from.
        start: what a run begins with that goes on with another number of workers.
        snapshots: what takes checkpoints of simulated workers.
        tells_looks: the launcher wants to hear of every look as it happens.
        also_measured: what looks show besides what the spec asks for.
        recalibration: the data on which the statistics of batch normalisation are computed anew for
            the model that stands for the run; None: they are as training has left them.
        training_sample: the training data on which that model is scored, too; None: it is not.
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
    keeping: Keeping | None = None
    resumed: Checkpoint | Resumed | None = None
    start: Start | None = field(default=None, repr=False)
    tells_looks: bool = False
    also_measured: tuple[str, ...] = ()
    recalibration: Any = field(default=None, repr=False)
    training_sample: Any = field(default=None, repr=False)
    board: Board | None = field(default=None, repr=False)
    snapshots: Snapshots | None = field(default=None, repr=False)

    @property
    def measure(self) -> tuple[str, ...]:
        """What looks show besides scores and costs."""
        return (*self.spec.measure, *self.also_measured)

    def step_of_look(self, number: int) -> int:
        """The step after which that look is due, if looks are counted in steps or epochs."""
        return self.step_of(self.spec.look_every, number)

    def step_of(self, every: Interval, number: int) -> int:
        """The step after which that one of things that happen so often is due."""
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
