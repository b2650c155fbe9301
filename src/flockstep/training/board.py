"""Looks at a simulated run: copies of all workers, judged aside.

Nobody waits and no message is sent, so the run is the same bit for bit with looks and without. The
representative is what the strategy itself makes of the copies: its own `preview`, run by stand-ins
that have the workers' data, in a small simulation of their own.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flockstep.backends import run_aside
from flockstep.comm import Comm
from flockstep.flat import FlatModel
from flockstep.result import Look
from flockstep.strategies import Strategy, load_state, save_state, shared_tensors
from flockstep.training.figures import Figures, Table
from flockstep.training.job import Final, Job
from flockstep.training.scoring import of_replicas, of_table
from flockstep.worker import StandIn, Worker


@dataclass(frozen=True)
class Copy:
    """All data of one worker at one moment."""

    figures: Figures
    flat: Tensor
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    shared: dict[str, Tensor] | None  # the values of shared tensors, of who comes first
    counters: dict[str, Any]

    @classmethod
    def of(cls, worker: Worker, figures: Figures, with_shared: bool) -> Copy:
        tensors, values = save_state(worker.state)
        shared = shared_tensors(worker.state) if with_shared else {}
        return cls(
            figures,
            worker.flat.state.detach().clone(),
            tensors,
            values,
            {name: tensor.peek() for name, tensor in shared.items()} if with_shared else None,
            worker.counters(),
        )


Take = Callable[[bool], Copy]
"""Makes a copy of the calling worker, with the values of shared tensors or without."""


@dataclass
class Pending:
    """A look for which not all workers have left their copies yet."""

    number: int
    seconds: float | None
    copies: dict[int, Copy] = field(default_factory=dict)


class Board:
    """Where simulated workers leave their copies. What changes it runs in the order of virtual
    time, but for the judging.
    """

    def __init__(self, job: Job, workers: int) -> None:
        self.history: dict[int, Look] = {}
        self.final: Final | None = None
        self._job = job
        self._workers = workers
        self._pending: dict[int, Pending] = {}
        self._complete: list[Pending] = []
        self._left: dict[int, Copy] = {}
        self._steps = 0  # of all workers together
        self._looks = 0
        by_time = job.spec.look_every.unit == "seconds"
        self._due = job.spec.look_every.count if by_time else math.inf
        self._judging = threading.Lock()
        self._model: tuple[nn.Module, FlatModel] | None = None

    def looks(self) -> list[Look]:
        return [look for _, look in sorted(self.history.items())]

    # --- in the order of virtual time -------------------------------------------------------------

    def bring(self, rank: int, number: int, take: Take) -> None:
        """The copy of a worker that knows by itself when which look is due."""
        pending = self._pending.setdefault(number, Pending(number, seconds=None))
        self._put(pending, rank, take)

    def tick(self, rank: int, now: float, take: Take) -> bool:
        """A worker that never waits has taken a step. Return whether it was looked at."""
        self._steps += 1
        if self._is_due(now):
            self._looks += 1
            late = Pending(self._looks, seconds=now)
            self._pending[self._looks] = late
            for gone, last in self._left.items():
                late.copies[gone] = last
        return self._put_all(rank, take)

    def leave(self, rank: int, take: Take) -> None:
        """A worker has taken its last step: it stays as it is for all looks to come."""
        self._put_all(rank, take)
        self._left[rank] = take(False)

    def _is_due(self, now: float) -> bool:
        every = self._job.spec.look_every
        if every.unit == "seconds":
            if now < self._due:
                return False
            self._due = (math.floor(now / every.count) + 1) * every.count
            return True
        step = self._job.step_of_look(self._looks + 1)
        is_last = self._job.steps is not None and step >= self._job.steps
        return not is_last and self._steps >= step * self._workers

    def _put_all(self, rank: int, take: Take) -> bool:
        """Leave a copy for every look that waits for one of this worker."""
        wanted = [each for each in self._pending.values() if rank not in each.copies]
        for pending in wanted:
            self._put(pending, rank, take)
        return bool(wanted)

    def _put(self, pending: Pending, rank: int, take: Take) -> None:
        knows_shared = any(each.shared is not None for each in pending.copies.values())
        pending.copies[rank] = take(not knows_shared)
        if len(pending.copies) == self._workers:
            self._complete.append(self._pending.pop(pending.number))

    # --- by whoever came last ---------------------------------------------------------------------

    def judge_complete(self, worker: Worker) -> None:
        """Judge the looks that are complete, in the caller's thread; its model is the pattern."""
        with self._judging:
            while self._complete:
                self._judge(self._complete.pop(0), worker)

    @torch.no_grad()
    def _judge(self, pending: Pending, worker: Worker) -> None:
        job, measure = self._job, self._job.spec.measure
        copies = [pending.copies[rank] for rank in range(self._workers)]
        table = Table([each.figures for each in copies], range(self._workers))
        shown = representative(job.spec.strategy, copies, worker)
        loss, accuracy = self._scores(shown, worker)
        look = table.look(job.epoch_at(worker, table), pending.seconds)
        look = replace(look, loss=loss, accuracy=accuracy, **of_table(table, measure))
        if "replicas" in measure:
            scores = [self._scores(each.flat, worker)[1] for each in copies]
            look = replace(look, **of_replicas(scores))
        if "spread" in measure:
            count = worker.flat.count
            replicas = torch.stack([each.flat[:count] for each in copies]).double()
            squares = (replicas - replicas.mean(0)).square().sum(1)
            look = replace(look, spread=float(squares.mean().sqrt()))
        self.history[pending.number] = look
        if self.final is None and job.is_reached_by(look):
            self.final = Final(look, table, shown)

    def _scores(self, state: Tensor, worker: Worker) -> tuple[float, float]:
        if self._model is None:
            model = copy.deepcopy(worker.model)
            self._model = model, FlatModel(model, worker.comm.empty)
        model, flat = self._model
        flat.state.copy_(state)
        return self._job.task.evaluate(model, self._job.task.watched)


def representative(strategy: Strategy[Any], copies: list[Copy], worker: Worker) -> Tensor:
    """The state that stands for the run whose workers the copies are of."""
    if len(copies) == 1:
        return copies[0].flat
    shared = next(each.shared for each in copies if each.shared is not None)

    def preview(comm: Comm) -> Tensor:
        own = copies[comm.rank]
        stand_in = StandIn(comm, worker, own.flat, own.counters)
        with torch.no_grad(), comm.unmetered():
            state = strategy.init(stand_in)
            load_state(state, own.tensors, own.values)
            if comm.rank == 0:
                for name, tensor in shared_tensors(state).items():
                    tensor.write(shared[name])
            comm.barrier()
            return strategy.preview(stand_in, state)

    shown: Tensor = run_aside(preview, len(copies), worker.comm.seed)[0]
    return shown
