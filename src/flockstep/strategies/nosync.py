"""A swarm: every worker is pulled towards the centre of mass of the best."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.comm import Background, broadcast_from_first, sum_at_first
from flockstep.fields import require, require_choice, require_integer, require_number
from flockstep.strategies._ranking import SCORES, last_score, ranked
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class NoSyncState:
    centres: deque[Tensor]  # of the last exchanges, the oldest first
    wait: Background  # until the newest of them is there


@dataclass(frozen=True)
class NoSync(Strategy[NoSyncState]):
    """After its own step every worker moves a part of the way towards a centre of mass.

        x_i ← (1−β) x_i + (β/n) Σ_{k∈N} x_k
        N: the n workers with the best score on their last batch

    pull=1 and best=None equal LocalSGD of the same period; best=1 and pull=1 equal BestOnly; pull=0
    equals Independent, and sends nothing. finish: the centre of mass of all. Statistics of batch
    normalisation are pulled with the parameters. How far apart the workers settle:
    `fs.settled_distance`.

    Bytes: best=None, one all-reduce of parameters and buffers every `period` steps. Otherwise one
    number per worker, and n−1 + w−1 messages of parameters, buffers and a count in all: summed at
    the best of N, and broadcast from there. At the end one all-reduce.

    Use: to keep workers apart but not too far, so that they explore a wide optimum together.

    Fields:
        pull: β, from 0 to 1.
        best: n, how many workers make the centre; None: all.
        period: optimizer steps between exchanges.
        staleness: pull towards the centre of so many exchanges before, so that it can travel while
            workers compute.
        score: what N is chosen by: "loss", or "accuracy" (the paper's choice), passed as
            `worker.step(loss, accuracy=…)`; `fs.run` takes the task's metric on the batch, at the
            cost of another forward pass.

    Paper: Isakov and Kinsy, "NoSync: Particle Swarm Inspired Distributed DNN Training", 2018.

    Example:
        fs.run("digits-mlp", fs.NoSync(pull=0.1), workers=4)
    """

    name: ClassVar[str] = "nosync"
    pull: float
    best: int | None = None
    period: int = 1
    staleness: int = 0
    score: str = "loss"

    def __post_init__(self) -> None:
        require_number("pull", self.pull, at_least=0, at_most=1)
        if self.best is not None:
            require_integer("best", self.best, 1)
        require_integer("period", self.period, 1)
        require_integer("staleness", self.staleness, 0)
        require_choice("score", self.score, SCORES)

    @property
    def needs_accuracy(self) -> bool:
        return self.best is not None and self.score == "accuracy"

    def init(self, worker: Worker) -> NoSyncState:
        workers = worker.comm.size
        require(
            self.best is None or self.best <= workers,
            "best",
            f"be at most the workers, {workers}",
            self.best,
        )
        return NoSyncState(deque(maxlen=self.staleness + 1), Background(comm=worker.comm))

    def after_step(self, worker: Worker, state: NoSyncState) -> None:
        if worker.steps % self.period or self.pull == 0:
            return
        state.wait()  # a centre is on its way at a time
        with worker.comm.in_background() as state.wait:
            state.centres.append(self._centre(worker))
        if self.staleness == 0:
            state.wait()
        if len(state.centres) > self.staleness:
            worker.flat.state.lerp_(state.centres[0], self.pull)

    def _centre(self, worker: Worker) -> Tensor:
        """The mean of the workers in N."""
        comm, own = worker.comm, worker.flat.state
        if self.best is None:
            return comm.all_reduce(own.clone(), op="mean")
        best_first = ranked(comm, last_score(worker, self.score))
        wide = own.to(torch.promote_types(own.dtype, torch.float32))
        # And how many it is the sum of, since some may be lost.
        total = torch.cat([wide, wide.new_ones(1)])
        sum_at_first(comm, total, best_first[: self.best], without_lost=True)
        broadcast_from_first(comm, total, best_first)
        return total[:-1].div_(total[-1]).to(own.dtype)

    def preview(self, worker: Worker, state: NoSyncState) -> Tensor:
        return worker.comm.all_reduce(worker.flat.state.clone(), op="mean")

    def finish(self, worker: Worker, state: NoSyncState) -> None:
        state.wait()
        worker.flat.state.copy_(self.preview(worker, state))
