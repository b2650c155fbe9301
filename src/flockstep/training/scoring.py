"""How good a model is, asked by all workers together or by one alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from flockstep.result import Look
from flockstep.tasks import Task, mean_scores
from flockstep.training.distances import of_replicas_of_all
from flockstep.training.figures import Table
from flockstep.training.job import Job
from flockstep.training.positions import position_of
from flockstep.worker import Worker


def judged(worker: Worker, job: Job, table: Table, look: Look, shown: Tensor) -> Look:
    """The look with the scores of the model whose state is `shown`, and what else is measured.

    All workers call it together: they share the work, and all of them know the outcome.
    """
    task, known = job.task, None
    with shown_in(worker, shown):
        loss, accuracy = mean_scores(_rows_of_all(worker, task, task.watched))
        if job.training_sample is not None:
            with torch.random.fork_rng(devices=[]):  # what the data draw is nothing to the run
                _, known = mean_scores(_rows_of_all(worker, task, job.training_sample))
    look = replace(look, loss=loss, accuracy=accuracy, train_accuracy=known)
    with shown_in(worker, worker.replica()):
        found = of_all_replicas(worker, task, job.measure)
    return replace(look, **found, **of_table(table, job.measure))


class shown_in:  # noqa: N801  reads as a phrase: `with shown_in(worker, state)`
    """The worker's model has another state inside, and its own again behind."""

    def __init__(self, worker: Worker, state: Tensor) -> None:
        self._flat = worker.flat.state
        self._state = state
        self._is_another = state is not worker.flat.state

    @torch.no_grad()
    def __enter__(self) -> None:
        if self._is_another:
            self._own = self._flat.clone()
            self._flat.copy_(self._state)

    @torch.no_grad()
    def __exit__(self, *exception: object) -> None:
        if self._is_another:
            self._flat.copy_(self._own)


def _rows_of_all(worker: Worker, task: Task, data: Any) -> Tensor:
    """The scores of all batches, each by one of the workers."""
    comm, rows = worker.comm, None
    while rows is None or not bool(
        (rows[:, 2] > 0).all()
    ):  # who was lost leaves its batches undone
        members = comm.all_gather(torch.empty(0)).ranks  # the same on all, whoever is lost
        place = members.index(comm.rank)
        own = task.scores(worker.model, data, place, len(members))
        rows = comm.all_reduce(own)
    return rows


def of_all_replicas(worker: Worker, task: Task, measure: Sequence[str]) -> dict[str, Any]:
    """How good the workers' own replicas are, and how far apart. All workers call it together."""
    comm, own = worker.comm, worker.flat.parameters
    found: dict[str, Any] = {}
    if "replicas" in measure:
        found |= of_replicas(scores_of_all(worker, task, task.watched))
    if "spread" in measure:
        centre = comm.all_reduce(own.double(), op="mean")
        square = comm.all_reduce((own.double() - centre).square().sum(), op="mean")
        found["spread"] = float(square.sqrt())
    if "distance" in measure:
        found |= of_replicas_of_all(comm, own)
    if "positions" in measure:
        told = comm.all_gather(torch.tensor(position_of(own), dtype=torch.float64))
        found["positions"] = [each.tolist() for each in told]
    return found


def scores_of_all(worker: Worker, task: Task, data: Any) -> list[float]:
    """The score of every worker's own replica, in rank order. All workers call it together."""
    _, score = task.evaluate(worker.model, data)
    return [*map(float, worker.comm.all_gather(torch.tensor(score, dtype=torch.float64)))]


def on_test_data(scores: list[float]) -> dict[str, Any]:
    """The metrics of a run that says how good the workers' own replicas are at its end."""
    found = {f"test_{name}": value for name, value in of_replicas(scores).items()}
    return found | {"test_replicas": scores}


def of_replicas(accuracies: Sequence[float]) -> dict[str, Any]:
    return {
        "replicas_mean": fmean(accuracies),
        "replicas_max": max(accuracies),
        "replicas_min": min(accuracies),
    }


def of_table(table: Table, measure: Sequence[str]) -> dict[str, Any]:
    """What is measured without looking at any model."""
    found = table.staleness() if "staleness" in measure else {}
    return found | (table.shares_of_time() if "time" in measure else {})
