"""From a spec to a job: what can be wrong is found before workers start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from flockstep.backends import Backend
from flockstep.data import BatchGrowth, plan_batches
from flockstep.fields import require
from flockstep.models import is_batch_norm
from flockstep.optimizers import require_decay
from flockstep.spec import RunSpec
from flockstep.tasks import Task
from flockstep.training.board import Board
from flockstep.training.job import ENDLESS, Job, sampling_of
from flockstep.training.recalibrating import recalibration_data
from flockstep.training.sample import sample_of

TRAINING_SAMPLES = 4_096  # on which looks say how well the training data are known


def prepared(
    spec: RunSpec,
    place: Backend,
    trace_limit: int | None = None,
    tells_looks: bool = False,
    also_measured: tuple[str, ...] = (),
) -> Job:
    """What every worker needs to know. What can be wrong is found here, before workers start."""
    assert spec.workers is not None
    task = spec.find_task().loaded()
    model = task.check()
    optimizer = spec.make_optimizer(task, model.parameters())
    if spec.workers > 1:  # who is alone trains plainly
        spec.strategy.require_optimizer(optimizer)
    if spec.weight_decay_schedule is not None:
        require_decay(optimizer)
    if spec.batch_norm_group is not None:
        _require_batch_norm(model, spec.batch_norm_group, spec.workers)
    batch_size = task.batch_size_for(spec.workers) if spec.batch_size is None else spec.batch_size
    if spec.batch_size is None:
        task.require_samples()
    passes, table = _passes(spec, task, batch_size)
    known = None if table is None or passes == ENDLESS else table.steps
    steps = min((each for each in (known, spec.steps) if each is not None), default=None)
    _require_synchronisation(spec, steps)
    job = Job(
        spec,
        task,
        batch_size,
        task.schedule if spec.schedule is None else spec.schedule,
        passes,
        steps,
        table,
        # The lowest rank may be lost when all is done; and a process that does not lead has only
        # its own worker's.
        model_from_all=spec.on_failure == "continue" or not place.is_lead,
        trace_limit=trace_limit,
        tells_looks=tells_looks,
        also_measured=also_measured,
        recalibration=recalibration_data(task.train, spec.recalibrate),
        training_sample=_training_sample(task, (*spec.measure, *also_measured)),
    )
    if not place.is_virtual:
        return job
    return replace(job, board=Board(job, spec.workers))


def _training_sample(task: Task, measure: tuple[str, ...]) -> Any:
    if "training" not in measure:
        return None
    return sample_of(task.train, TRAINING_SAMPLES, "measure", "without 'training'", measure)


def _require_synchronisation(spec: RunSpec, steps: int | None) -> None:
    """Looks that are to take place at one need a step after which all replicas are equal."""
    if spec.look_at == "synchronisation":
        has_one = spec.strategy.next_synchronisation(1, steps) is not None
        rule = f"be 'due' with {spec.strategy!r}, of which no step makes all replicas equal"
        require(has_one, "look_at", rule, spec.look_at)


def _require_batch_norm(model: nn.Module, group: int, workers: int) -> None:
    rule = f"divide the number of workers, {workers}"
    require(workers % group == 0, "batch_norm_group", rule, group)
    rule = "be None for a model without batch normalisation"
    require(any(map(is_batch_norm, model.modules())), "batch_norm_group", rule, group)


def _passes(spec: RunSpec, task: Task, batch_size: Any) -> tuple[int, Any]:
    """How often each worker goes over its own samples, and the timetable of that."""

    def table(passes: int) -> Any:
        return plan_batches(
            task.train,
            batch_size,
            passes,
            spec.assignment,
            sampling_of(spec),
            workers=spec.workers or 1,
            rank=0,
            seed=spec.seed,
            drop_last=spec.drop_last,
        ).timetable

    if any(getattr(spec, budget) is not None for budget in ("steps", "seconds", "bytes")):
        rule = "be a number where the budget does not tell how many samples there will be"
        require(not isinstance(batch_size, BatchGrowth), "batch_size", rule, batch_size)
    if spec.seconds is not None or spec.bytes is not None:
        return ENDLESS, table(ENDLESS)
    if spec.steps is None:
        epochs = task.epochs if spec.epochs is None else spec.epochs
        passes = spec.assignment.overlap_epochs(epochs, spec.workers or 1)
        return passes, table(passes)
    passes = 1
    while (planned := table(passes)) is not None and planned.steps < spec.steps:
        passes = max(passes + 1, passes * spec.steps // planned.steps)
    return (ENDLESS if planned is None else passes), planned
