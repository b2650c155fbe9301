"""Averaging with one neighbour at a time, whenever it suits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.comm import SharedTensor, handle
from flockstep.fields import require_choice
from flockstep.randomness import Purpose, torch_stream
from flockstep.strategies._representative import representative, require_representative
from flockstep.strategies._topology import GRAPHS, bipartite_neighbours
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class ADPSGDState:
    read: Tensor  # passive: what this worker's gradient is of
    neighbours: list[int]
    draw: torch.Generator

    models: dict[int, SharedTensor] = handle()  # of the passive workers, each living at its own


@dataclass(frozen=True)
class ADPSGD(Strategy[ADPSGDState]):
    """After its own step an active worker averages with a random passive neighbour; nobody waits
    for anybody's step.

        order="after_step":   x_i ← x_i − η g(x_i);   x_i, x_j ← (x_i + x_j)/2 both
        order="printed":      x_i, x_j ← (x_i + x_j)/2 both;   x_i ← x_i − η g(x̂_i)

    The first is what the paper's text says that a worker does, the second its Algorithm 1: the
    gradient is of the parameters before averaging, x̂_i, and changes the average.

    Even ranks are active and odd ones passive, and neighbours are of different kinds, so no circle
    of workers can wait for each other. A passive worker's parameters may be averaged while it
    computes; its change is then added to what they have become, as in the paper, in either order.
    With another optimizer than plain SGD its change at x̂_i takes the place of −ηg. Each average
    preserves the mean of all workers. Statistics of batch normalisation are averaged with the
    parameters. finish: the mean of all, or one of them.

    Bytes: one blend (there and back) per active worker and step; nothing for passive ones; at the
        end one all-reduce, or a score per worker ("best") and one broadcast.

    Use: where workers differ in speed and no server shall be a bottleneck.

    Fields:
        graph: "ring", "exponential" (1, 3, 5, 9, … ranks away: 1, and 1 + 2^k) or "complete"; of
            each, the edges between an even rank and an odd one.
        order: whether an active worker averages after its step, or between the gradient and the
            step.
        representative: which model stands for the run: the "mean" of all, that of the worker with
            the "best" loss over its last steps, or "any" worker's.

    Paper: Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient
        Descent", 2018.

    Example:
        fs.run("digits-mlp", fs.ADPSGD(graph="ring"), workers=4)
    """

    name: ClassVar[str] = "ad_psgd"
    revision: ClassVar[int] = 1
    graph: str = "ring"
    order: str = "after_step"
    representative: str = "mean"

    def __post_init__(self) -> None:
        require_choice("graph", self.graph, tuple(GRAPHS))
        require_choice("order", self.order, ("after_step", "printed"))
        require_representative(self.representative)

    @property
    def waits(self) -> bool:
        return False

    def init(self, worker: Worker) -> ADPSGDState:
        comm, own = worker.comm, worker.flat.state
        models = {
            rank: comm.shared(f"model {rank}", own, home=rank) for rank in range(1, comm.size, 2)
        }
        draw = torch_stream(Purpose.NEIGHBOUR, comm.seed, comm.rank)
        neighbours = bipartite_neighbours(self.graph, comm.rank, comm.size)
        return ADPSGDState(own.clone(), neighbours, draw, models=models)

    def before_step(self, worker: Worker, state: ADPSGDState) -> None:
        mine = state.models.get(worker.comm.rank)
        if mine is not None:
            mine.read(out=state.read)
            worker.flat.state.copy_(state.read)

    def optimizer_step(self, worker: Worker, state: ADPSGDState) -> None:
        is_active = worker.comm.rank not in state.models
        if self.order == "after_step" or not is_active:
            worker.optimizer.step()
            return

        parameters = worker.flat.parameters
        before = parameters.clone()
        worker.optimizer.step()
        change = parameters - before  # − η g(x̂_i)
        parameters.copy_(before)
        self._average(worker, state)
        parameters.add_(change)

    def after_step(self, worker: Worker, state: ADPSGDState) -> None:
        mine = state.models.get(worker.comm.rank)
        if mine is not None:
            with mine.lock():
                mine.add(worker.flat.state - state.read)
        elif self.order == "after_step":
            self._average(worker, state)

    def _average(self, worker: Worker, state: ADPSGDState) -> None:
        """x_i, x_j ← (x_i + x_j)/2 with a random neighbour that is there."""
        own = worker.flat.state
        there = [rank for rank in state.neighbours if rank in worker.comm.members]
        if not there:
            return
        peer = there[int(torch.randint(len(there), (), generator=state.draw))]
        with state.models[peer].lock():
            theirs = state.models[peer].blend(own, 0.5)
        own.lerp_(theirs.to(own.device), 0.5)

    def preview(self, worker: Worker, state: ADPSGDState) -> Tensor:
        worker.comm.barrier()  # nobody averages with a passive worker any more
        own, mine = worker.flat.state, state.models.get(worker.comm.rank)
        if mine is not None:
            own = mine.read(out=torch.empty_like(own))
        return representative(worker, own, self.representative)

    def finish(self, worker: Worker, state: ADPSGDState) -> None:
        worker.flat.state.copy_(self.preview(worker, state))
