"""Averaging with one neighbour at a time, whenever it suits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.comm import SharedTensor, handle
from flockstep.errors import MessageLost
from flockstep.fields import require_choice, require_number
from flockstep.randomness import Purpose, torch_stream
from flockstep.strategies._compressed import memory_of_differences, require_codec
from flockstep.strategies._representative import representative, require_representative
from flockstep.strategies._topology import (
    GRAPHS,
    ONE_PEER,
    bipartite_neighbours,
    bipartite_peers,
)
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class ADPSGDState:
    read: Tensor  # passive: what this worker's gradient is of
    neighbours: list[int]
    draw: torch.Generator
    memory: Memory | None = None  # of the codec

    models: dict[int, SharedTensor] = handle()  # of the passive workers, each living at its own


@dataclass(frozen=True)
class ADPSGD(Strategy[ADPSGDState]):
    """After its own step an active worker averages with a random passive neighbour; nobody waits
    for anybody's step.

        order="after_step":   x_i ← x_i − η g(x_i);   x_i, x_j ← (x_i + x_j)/2 both
        order="printed":      x_i, x_j ← (x_i + x_j)/2 both;   x_i ← x_i − η g(x̂_i)
        with another pull β than 1/2:   d = β(x_i − x_j);   x_i ← x_i − d;   x_j ← x_j + d
        with a codec:                   d = C(β(x_i − x_j)/τ)

    The first is what the paper's text says that a worker does, the second its Algorithm 1: the
    gradient is of the parameters before averaging, x̂_i, and changes the average.

    Even ranks are active and odd ones passive, and neighbours are of different kinds, so no circle
    of workers can wait for each other. A passive worker's parameters may be averaged while it
    computes; its change is then added to what they have become, as in the paper, in either order.
    With another optimizer than plain SGD its change at x̂_i takes the place of −ηg. Each average
    preserves the mean of all workers, and so does a weaker pull: an elastic one, as asynchronous
    EASGD's, but between two workers in place of a worker and a centre. If the network loses one of
    the two messages, who hears nothing keeps what it has, though the other may have averaged.
    Statistics of batch normalisation are averaged with the parameters. finish: the mean of all, or
    one of them.

    With a codec the active worker reads the other's parameters, which is whole, and sends how far
    they shall go, d; it goes as far itself. So the mean is preserved here, too, and what the codec
    leaves out is still between the two when they meet again: no copies are kept. τ is 1, but for
    codecs that are right on average alone (E|C(x)|² ≤ τ|x|²), whose noise would grow otherwise. A
    message that the network loses is then sent again.

    Bytes: one blend (there and back), or one read and the codec's message, per active worker and
    step; nothing for passive ones; at the end one all-reduce, or a score per worker ("best") and
    one broadcast.

    Use: where workers differ in speed and no server shall be a bottleneck.

    Fields:
        graph: "ring", "exponential" (1, 3, 5, 9, … ranks away: 1, and 1 + 2^k) or "complete"; of
            each, the edges between an even rank and an odd one. "one_peer_exponential": in place of
            a random neighbour the one 1, 3, 5, 9, … ranks ahead, in turn.
        order: whether an active worker averages after its step, or between the gradient and the
            step.
        representative: which model stands for the run: the "mean" of all, that of the worker with
            the "best" loss over its last steps, or "any" worker's.
        codec: how d is written on the wire; None: parameters travel both ways, as they are.
        pull: β, from 0 to 1; one half averages.

    Papers: Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient
        Descent", 2018; Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep
        Training", 2021 (one peer). The pull between two workers is our reading of elastic
        averaging without a centre.

    Example:
        fs.run("digits-mlp", fs.ADPSGD(graph="ring"), workers=4)
    """

    name: ClassVar[str] = "ad_psgd"
    revision: ClassVar[int] = 1
    shares_tensors: ClassVar[bool] = True
    graph: str = "ring"
    order: str = "after_step"
    representative: str = "mean"
    codec: Codec | None = None
    pull: float = 0.5

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_choice("graph", self.graph, (*GRAPHS, ONE_PEER))
        require_number("pull", self.pull, at_least=0, at_most=1)
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
        if self.graph == ONE_PEER:
            neighbours = bipartite_peers(comm.rank, comm.size)
        else:
            neighbours = bipartite_neighbours(self.graph, comm.rank, comm.size)
        memory = None if self.codec is None else memory_of_differences(worker, self.codec, own)
        return ADPSGDState(own.clone(), neighbours, draw, memory, models=models)

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
            # With a codec neighbours hold the lock between their read and what they add.
            with mine.changing() if self.codec is None else mine.lock():
                mine.add(worker.flat.state - state.read)
        elif self.order == "after_step":
            self._average(worker, state)

    def _average(self, worker: Worker, state: ADPSGDState) -> None:
        """x_i, x_j ← (x_i + x_j)/2 with a random neighbour that is there, or the next in turn."""
        own = worker.flat.state
        there = [rank for rank in state.neighbours if rank in worker.comm.members]
        if not there:
            return
        if self.graph == ONE_PEER:
            turn = worker.steps - (self.order == "after_step")  # that step counts already
            peer = there[turn % len(there)]
        else:
            peer = there[int(torch.randint(len(there), (), generator=state.draw))]
        model = state.models[peer]
        if self.codec is None:
            try:
                with model.changing():
                    theirs = model.blend(own, self.pull, may_be_lost=True)
            except MessageLost:
                return  # a neighbour that is not heard leaves its weight to the worker itself
            own.lerp_(theirs.to(own.device), self.pull)
            return

        share = self.pull / self.codec.second_moment(own.numel())
        with model.lock():
            apart = own - model.read().to(own.device)
            d = model.add(apart.mul_(share), codec=self.codec, memory=state.memory)
        own.sub_(d)

    def preview(self, worker: Worker, state: ADPSGDState) -> Tensor:
        worker.comm.barrier()  # nobody averages with a passive worker any more
        own, mine = worker.flat.state, state.models.get(worker.comm.rank)
        if mine is not None:
            own = mine.read(out=torch.empty_like(own))
        return representative(worker, own, self.representative)

    def finish(self, worker: Worker, state: ADPSGDState) -> None:
        worker.flat.state.copy_(self.preview(worker, state))
