"""Mixing with one's neighbours, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flockstep.errors import WorkerLost
from flockstep.fields import require_choice
from flockstep.strategies._topology import GRAPHS, edges_of, metropolis_weights
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class DPSGDState:
    weights: dict[int, float]  # of the neighbours, in the order in which to meet them


@dataclass(frozen=True)
class DPSGD(Strategy[DPSGDState]):
    """Every worker mixes its parameters with its neighbours' at each step; nobody talks to all.

        x_i ← Σ_j W_ij x_j − η g(x_i)
        W_ij = 1 / (1 + max(degree_i, degree_j)),   W_ii the rest to one

    The gradient is that of the worker's own parameters before mixing, as in the paper's Algorithm
    1. W is symmetric and its rows sum to one, so mixing preserves the mean of all workers. finish:
    that mean. Statistics of batch normalisation are mixed with the parameters.

    Bytes: parameters and buffers to each neighbour at each step (2 in a ring); at the end one
        all-reduce.

    Use: on many workers, where an all-reduce takes too many steps.

    Fields:
        graph: "ring", "exponential" (neighbours 1, 2, 4, … ranks away) or "complete".

    Paper: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", 2017.

    Example:
        fs.run("digits-mlp", fs.DPSGD(graph="ring"), workers=4)
    """

    name: ClassVar[str] = "d_psgd"
    graph: str = "ring"

    def __post_init__(self) -> None:
        require_choice("graph", self.graph, tuple(GRAPHS))

    def init(self, worker: Worker) -> DPSGDState:
        return DPSGDState(
            metropolis_weights(worker.comm.rank, edges_of(self.graph, worker.comm.size))
        )

    def on_gradients(self, worker: Worker, state: DPSGDState) -> None:
        own = worker.flat.state
        mixed = own * (1 - sum(state.weights.values()))
        for neighbour, weight in state.weights.items():
            try:
                theirs = worker.comm.exchange(own, neighbour)
            except WorkerLost:
                theirs = own  # the weight of a neighbour that is lost falls to the worker itself
            mixed.add_(theirs, alpha=weight)
        own.copy_(mixed)

    def finish(self, worker: Worker, state: DPSGDState) -> None:
        worker.comm.all_reduce(worker.flat.state, op="mean")
