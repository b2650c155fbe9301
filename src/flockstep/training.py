"""`run`: a whole training job in one call. The loop of DESIGN stands here, once."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from flockstep.backends.base import Backend
from flockstep.backends.sim import Compute
from flockstep.comm import Comm
from flockstep.data import Assignment, Disjoint, batches
from flockstep.fields import require, require_integer
from flockstep.launch import launch, make_backend
from flockstep.network import Network
from flockstep.progress import steps_bar
from flockstep.result import Result, versions
from flockstep.strategies import Strategy
from flockstep.task import Task, find_task, on_device
from flockstep.tasks import TASKS
from flockstep.worker import Worker


@dataclass(frozen=True)
class Job:
    """What every worker needs to know."""

    task: Task
    strategy: Strategy[Any]
    epochs: int
    batch_size: int
    assignment: Assignment


@dataclass(frozen=True)
class Report:
    """What every worker brings back. Rank 0 alone evaluates, and alone brings the model."""

    replica: Tensor
    model: nn.Module | None
    history: list[dict[str, float]]
    train_loss: float
    seconds: float
    bytes_sent: int
    exchanges: int
    steps: int
    samples: int


def run(
    task: str | Task,
    strategy: Strategy[Any],
    workers: int = 8,
    backend: str | Backend = "sim",
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    assignment: Assignment | None = None,
    network: Network | None = None,
    compute: Compute | None = None,
    lanes: int | None = None,
    seed: int = 0,
    on_failure: str = "stop",
    progress: bool | None = None,
) -> Result:
    """Train `task` with `strategy` on `workers` workers and evaluate the model that represents them.

    `batch_size` is that of one worker; it and `epochs` are the task's own by default. `progress` shows a bar on
    stderr; by default only where that is a terminal. For the rest see `fs.launch`.

    Example:
        result = fs.run("digits-mlp", fs.LocalSGD(period=8), workers=8, seed=0)
        result.metrics["test_accuracy"], result.metrics["bytes_sent"]
    """
    require_integer("workers", workers, 1)
    require_integer("seed", seed, 0)
    require(isinstance(strategy, Strategy), "strategy", "be a strategy such as fs.LocalSGD(period=8)", strategy)
    chosen = (find_task(task, TASKS) if isinstance(task, str) else task).loaded()
    job = Job(
        chosen,
        strategy,
        chosen.epochs if epochs is None else epochs,
        chosen.batch_size if batch_size is None else batch_size,
        assignment or Disjoint(),
    )
    require_integer("epochs", job.epochs, 1)
    place = make_backend(backend, network=network, compute=compute, lanes=lanes)
    plan = batches.plan(chosen.train, job.batch_size, job.assignment, workers, rank=0, seed=seed)
    began = time.perf_counter()
    with steps_bar(f"{chosen.name} {strategy.name}", plan.steps_per_epoch * job.epochs, progress) as watch:
        reports: list[Report] = launch(
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
        "epochs": job.epochs,
        "batch_size": job.batch_size,
        "assignment": repr(job.assignment),
        "seed": seed,
        "versions": versions(),
    }
    return _result(job, reports, config, wall_seconds)


def train(comm: Comm, job: Job) -> Report:
    """One worker's whole training."""
    task = job.task
    model = task.model()
    worker = Worker(comm, model, task.optimizer(model.parameters()), job.strategy)
    history: list[dict[str, float]] = []
    losses: list[float] = []
    for batch in worker.batches(task.train, job.batch_size, job.epochs, job.assignment):
        if len(history) < worker.epoch:
            history.append(_look(worker, task))
            losses.clear()
        batch = on_device(batch, worker.flat.state.device)
        loss = worker.adjust_loss(task.loss(model, batch), batch)
        loss.backward()
        worker.step(loss)
        losses.append(worker.loss)
    history.append(_look(worker, task))
    replica = worker.flat.parameters.detach().cpu().clone()
    finished = worker.finish()
    return Report(
        replica,
        finished if comm.rank == 0 else None,
        history,
        fmean(losses),
        comm.now(),
        comm.meter.bytes_sent,
        comm.meter.exchanges,
        worker.steps,
        worker.samples,
    )


def _look(worker: Worker, task: Task) -> dict[str, float]:
    """A row of the history, at the end of an epoch: what it cost, and on rank 0 how good the model is by now."""
    comm = worker.comm
    row = {
        "step": worker.steps,
        "epoch": worker.epoch,
        "seconds": comm.now(),
        "bytes_sent": comm.meter.bytes_sent,
    }
    if comm.rank == 0:
        with comm.unmetered(), torch.no_grad():
            shown = None if worker.is_alone else worker.strategy.preview(worker, worker.state)
            own = worker.flat.state
            before = own.clone() if shown is not None else own
            if shown is not None:
                own.copy_(shown)
            row["loss"], row["accuracy"] = task.evaluate(worker.model)
            own.copy_(before)
    return row


def _result(job: Job, reports: Sequence[Report], config: dict[str, Any], wall_seconds: float) -> Result:
    model = reports[0].model
    if model is None:
        raise RuntimeError("rank 0 brought no model")
    loss, accuracy = job.task.evaluate(model)
    history = reports[0].history
    for rows in zip(*(report.history for report in reports), strict=True):
        rows[0]["bytes_sent"] = sum(row["bytes_sent"] for row in rows)
    metrics = {
        "test_accuracy": accuracy,
        "test_loss": loss,
        "train_loss": fmean(report.train_loss for report in reports),
        "seconds": max(report.seconds for report in reports),
        "wall_seconds": wall_seconds,
        "bytes_sent": sum(report.bytes_sent for report in reports),
        "exchanges": max(report.exchanges for report in reports),
        "steps": max(report.steps for report in reports),
        "samples": sum(report.samples for report in reports),
        "workers": len(reports),
    }
    return Result(config, metrics, history, [report.replica for report in reports], model)
