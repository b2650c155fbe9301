"""`run`: a whole training job in one call. The loop of DESIGN stands here, once."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn

from flockstep.backends import Backend, Compute
from flockstep.comm import Comm, SharedTensor
from flockstep.data import (
    Assignment,
    BatchSize,
    Disjoint,
    Sampling,
    batches,
)
from flockstep.device import on_device
from flockstep.errors import WorkerLost
from flockstep.fields import require, require_integer
from flockstep.launch import launch, make_backend
from flockstep.network import Network
from flockstep.progress_bar import steps_bar
from flockstep.result import Result, versions
from flockstep.schedules import Schedule
from flockstep.spec import RunSpec
from flockstep.strategies import Strategy
from flockstep.tasks import TASKS, Task, find_task
from flockstep.worker import Worker

DEFAULT_WORKERS = 8

# What a worker counts, in the order in which workers tell each other: once at the end, and at the
# end of each epoch.
TOTALS = ("rank", "train_loss", "seconds", "bytes_sent", "exchanges", "steps", "samples")
LOOKS = ("step", "epoch", "seconds", "bytes_sent", "loss", "accuracy", "is_evaluated")
SCORES = slice(LOOKS.index("loss"), None)


@dataclass(frozen=True)
class Job:
    """What every worker needs to know."""

    task: Task
    strategy: Strategy[Any]
    passes: int  # of each worker over its own samples
    epochs: int  # of all workers together over the data, and so often is evaluated
    batch_size: BatchSize
    assignment: Assignment
    sampling: Sampling | None
    schedule: Schedule | None
    may_lose_workers: bool
    model_from_all: bool  # every worker brings the model, not the lowest rank alone


def run(
    task: str | Task | RunSpec,
    strategy: Strategy[Any] | None = None,
    workers: int | None = None,
    backend: str | Backend = "sim",
    *,
    epochs: int | None = None,
    batch_size: BatchSize | None = None,
    assignment: Assignment | None = None,
    sampling: Sampling | None = None,
    schedule: Schedule | None = None,
    network: Network | None = None,
    compute: Compute | None = None,
    lanes: int | None = None,
    seed: int = 0,
    on_failure: str = "stop",
    progress: bool | None = None,
    trace: Path | None = None,
) -> Result:
    """Train `task` with `strategy` on `workers` workers, by default 8, and evaluate the model that
    represents them.

    `epochs` is how often all workers together go over the data: with C copies of each sample among
    them, each goes ⌈epochs/C⌉ times over its own, so that assignments compare at equal samples
    processed. It is evaluated every ⌈N/(batch of all)⌉ steps, whatever the overlap. `batch_size` is
    that of one worker. These two and the `schedule` of the learning rate are the task's own by
    default. `progress` shows a bar on stderr; by default only where that is a terminal. For the
    rest see `fs.launch`.

    Example:
        result = fs.run("digits-mlp", fs.LocalSGD(period=8), workers=8, seed=0)
        result.metrics["test_accuracy"], result.metrics["bytes_sent"]
    """
    require(trace is None, "trace", "be left out for now", trace)
    if isinstance(task, RunSpec):
        return _run_spec(task, progress)
    require_integer("seed", seed, 0)
    require(
        isinstance(strategy, Strategy),
        "strategy",
        "be a strategy such as fs.LocalSGD(period=8)",
        strategy,
    )
    strategy = cast(Strategy[Any], strategy)
    place = make_backend(backend, network=network, compute=compute, lanes=lanes)
    workers = place.size(workers, DEFAULT_WORKERS)
    chosen = (find_task(task, TASKS) if isinstance(task, str) else task).loaded()
    assignment = Disjoint() if assignment is None else assignment
    require(
        isinstance(assignment, Assignment), "assignment", "be one such as fs.Disjoint()", assignment
    )
    schedule = chosen.schedule if schedule is None else schedule
    require(
        schedule is None or isinstance(schedule, Schedule),
        "schedule",
        "be one such as fs.Cosine()",
        schedule,
    )
    chosen.check()
    epochs = chosen.epochs if epochs is None else epochs
    require_integer("epochs", epochs, 1)
    passes = assignment.overlap_epochs(epochs, workers)
    batch_size = chosen.batch_size_for(workers) if batch_size is None else batch_size
    plan = batches.plan(
        chosen.train, batch_size, passes, assignment, sampling, workers=workers, rank=0, seed=seed
    )
    table = plan.timetable
    job = Job(
        chosen,
        strategy,
        passes,
        passes if table is None else table.epochs,
        batch_size,
        assignment,
        sampling,
        schedule,
        may_lose_workers=on_failure == "continue",
        # The lowest rank may be lost when all is done; and a process that does not lead has only
        # its own worker's.
        model_from_all=on_failure == "continue" or not place.is_lead,
    )
    began = time.perf_counter()
    shown = progress if place.is_lead else False  # one bar for all processes of a torchrun
    with steps_bar(
        f"{chosen.name} {strategy.name}", table.steps if table else None, shown
    ) as watch:
        outcomes = launch(
            functools.partial(train, job=job),
            workers,
            place,
            seed=seed,
            on_failure=on_failure,
            watch=watch,
        )
    wall_seconds = time.perf_counter() - began
    config = {
        "task": chosen.name,
        "strategy": strategy.name,
        "fields": asdict(strategy) if is_dataclass(strategy) else {},
        "workers": workers,
        "backend": backend if isinstance(backend, str) else type(backend).__name__,
        "settings": repr(place),  # of the backend: network, step times and lanes, the defaults too
        "epochs": epochs,
        "batch_size": batch_size if isinstance(batch_size, int) else repr(batch_size),
        "assignment": repr(assignment),
        "sampling": repr(sampling or Sampling()),
        "schedule": repr(schedule),
        "seed": seed,
        "versions": versions(),
    }
    return _result(job, outcomes, config, wall_seconds, is_copy=not place.is_lead)


def _run_spec(spec: RunSpec, progress: bool | None) -> Result:
    task = spec.find_task()
    task = replace(task, optimizer=functools.partial(spec.make_optimizer, task))
    return run(
        task,
        spec.strategy,
        spec.workers,
        spec.backend,
        epochs=spec.epochs,
        batch_size=spec.batch_size,
        assignment=spec.assignment,
        sampling=spec.sampling,
        schedule=spec.schedule,
        network=spec.network,
        compute=spec.compute,
        lanes=spec.lanes,
        seed=spec.seed,
        on_failure=spec.on_failure,
        progress=progress,
    )


def train(comm: Comm, job: Job) -> dict[str, Any]:
    """One worker's whole training. It returns plain values and tensors, which every backend can
    carry.

    Each worker brings the figures of the whole run: not every launcher gets to see all workers'
    reports."""
    task = job.task
    model = task.model()
    worker = Worker(comm, model, task.optimizer(model.parameters()), job.strategy, job.schedule)
    with comm.unmetered():
        scores = _shared_scores(comm, job.epochs) if job.may_lose_workers else None
    looks: list[list[float]] = []
    losses: list[float] = []
    for batch in worker.batches(
        task.train, job.batch_size, job.passes, job.assignment, job.sampling
    ):
        if len(looks) < worker.epoch:
            looks.append(_look(worker, task, scores))
            losses.clear()
        batch = on_device(batch, worker.flat.state.device)
        loss = worker.adjust_loss(task.loss(model, batch), batch)
        loss.backward()
        worker.step(loss, _score(task, model, batch) if job.strategy.needs_accuracy else None)
        losses.append(worker.loss)
    looks.append(_look(worker, task, scores))
    replica = worker.flat.parameters.detach().cpu().clone()
    finished = worker.finish()
    meter = comm.meter
    totals = [
        comm.rank, fmean(losses), comm.now(), meter.bytes_sent, meter.exchanges, worker.steps, worker.samples,
    ]  # fmt: skip
    with comm.unmetered():
        told = comm.all_gather(
            torch.tensor([totals, *_with_scores(looks, scores)], dtype=torch.float64)
        )
    leads = comm.rank == min(int(table[0, 0]) for table in told)
    return {
        "replica": replica,
        "model": _state_of(finished) if leads or job.model_from_all else None,
        "metrics": _metrics([dict(zip(TOTALS, table[0].tolist(), strict=True)) for table in told]),
        "history": [_row(rows.tolist()) for rows in torch.stack(told, dim=1)[1:]],
    }


@torch.no_grad()
def _score(task: Task, model: nn.Module, batch: Any) -> float:
    """The metric on a training batch, in evaluation mode: another pass must not count in batch
    normalisation.
    """
    model.eval()
    score = float(task.metric(model, batch))
    model.train()
    return score


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}


def _look(worker: Worker, task: Task, scores: SharedTensor | None) -> list[float]:
    """At the end of an epoch: what it cost, and on the lowest rank that is there how good the
    model is by now.
    """
    comm = worker.comm
    look = [
        worker.steps,
        worker.epoch,
        comm.now(),
        comm.meter.bytes_sent,
        math.nan,
        math.nan,
        False,
    ]
    if comm.rank == comm.members[0]:
        with comm.unmetered(), torch.no_grad():
            shown = None if worker.is_alone else worker.strategy.preview(worker, worker.state)
            own = worker.flat.state
            before = own.clone() if shown is not None else own
            if shown is not None:
                own.copy_(shown)
            look[SCORES] = (*task.evaluate(worker.model), True)
            own.copy_(before)
            if scores is not None:
                known = scores.read()
                known[worker.epoch - 1] = torch.tensor(look[SCORES])
                scores.write(known)  # only the lowest rank writes
    return look


def _shared_scores(comm: Comm, epochs: int) -> SharedTensor:
    """Where the scores of each epoch outlive the worker that evaluated."""
    return comm.shared("scores", torch.zeros(epochs, len(LOOKS[SCORES]), dtype=torch.float64))


def _with_scores(looks: list[list[float]], scores: SharedTensor | None) -> list[list[float]]:
    """The worker's looks, with the scores of others where it did not evaluate itself."""
    if scores is None:
        return looks
    known = scores.read().tolist()
    return [
        look if look[-1] else [*look[: SCORES.start], *others]
        for look, others in zip(looks, known, strict=True)
    ]


def _row(looks: list[list[float]]) -> dict[str, float]:
    """A row of the history, of what all workers saw at the end of an epoch. Without scores, if
    nobody evaluated.
    """
    first, *_ = by_name = [dict(zip(LOOKS, look, strict=True)) for look in looks]
    row = {
        "step": int(first["step"]),
        "epoch": int(first["epoch"]),
        "seconds": first["seconds"],
        "bytes_sent": int(sum(look["bytes_sent"] for look in by_name)),
    }
    evaluated = next((look for look in by_name if look["is_evaluated"]), None)
    return (
        row
        if evaluated is None
        else row | {"loss": evaluated["loss"], "accuracy": evaluated["accuracy"]}
    )


def _metrics(totals: Sequence[dict[str, float]]) -> dict[str, float]:
    """The run's figures, from those of the workers that have come to its end."""
    return {
        "train_loss": fmean(worker["train_loss"] for worker in totals),
        "seconds": max(worker["seconds"] for worker in totals),
        "bytes_sent": int(sum(worker["bytes_sent"] for worker in totals)),
        "exchanges": int(max(worker["exchanges"] for worker in totals)),
        "steps": int(max(worker["steps"] for worker in totals)),
        "samples": int(sum(worker["samples"] for worker in totals)),
    }


def _result(
    job: Job, outcomes: list[Any], config: dict[str, Any], wall_seconds: float, is_copy: bool
) -> Result:
    """`outcomes`: a report, a loss, or None for a worker whose report went to the process that
    leads.
    """
    losses = [outcome for outcome in outcomes if isinstance(outcome, WorkerLost)]
    lost = [
        {name: getattr(loss, name) for name in ("rank", "step", "seconds", "exit_code")}
        for loss in losses
    ]
    reports = [outcome for outcome in outcomes if isinstance(outcome, dict)]
    metrics: dict[str, float] = {
        "wall_seconds": wall_seconds,
        "workers": len(outcomes),
        "lost": len(lost),
    }
    if not reports:  # this process does not lead, and its own worker is among the lost
        return Result(config, metrics, [], [], lost, _is_copy=is_copy)
    report = next(report for report in reports if report["model"] is not None)
    model = job.task.model_of(report["model"])
    loss, accuracy = job.task.evaluate(model)
    metrics = {"test_accuracy": accuracy, "test_loss": loss, **report["metrics"], **metrics}
    replicas: list[Tensor] = [each["replica"] for each in reports]
    return Result(
        config, metrics, report["history"], replicas, lost, _model=model, _is_copy=is_copy
    )
