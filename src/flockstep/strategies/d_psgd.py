"""Mixing with one's neighbours, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from flockstep.errors import WorkerLost
from flockstep.fields import require_choice
from flockstep.strategies._representative import representative, require_representative
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

        order="printed":      x_i ← Σ_j W_ij x_j − η g_i(x_i)
        order="after_step":   x_i ← Σ_j W_ij (x_j − η g_j(x_j))
        W_ij = 1 / (1 + max(degree_i, degree_j)),   W_ii the rest to one

    As printed, both terms are of the old parameters: mixed ones, and a step from the worker's own.
    With another optimizer than plain SGD its change there takes the place of −ηg, so that weight
    decay sees the worker's own parameters, too. W is symmetric and its rows sum to one: mixing
    preserves the mean of all workers. Statistics of batch normalisation are mixed with the
    parameters. finish: the mean of all, or one of them.

    Bytes: parameters and buffers to each neighbour at each step (2 in a ring); at the end one
        all-reduce, or a score per worker ("best") and one broadcast.

    Use: on many workers, where an all-reduce takes too many steps.

    Fields:
        graph: "ring", "exponential" (neighbours 1, 2, 4, … ranks away) or "complete".
        order: whether a worker mixes what it steps from, as in the paper's Algorithm 1, or what
            the step has given.
        representative: which model stands for the run: the "mean" of all, that of the worker with
            the "best" loss over its last steps, or "any" worker's.

    Paper: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", 2017.

    Example:
        fs.run("digits-mlp", fs.DPSGD(graph="ring"), workers=4)
    """

    name: ClassVar[str] = "d_psgd"
    revision: ClassVar[int] = 1
    graph: str = "ring"
    order: str = "printed"
    representative: str = "mean"

    def __post_init__(self) -> None:
        require_choice("graph", self.graph, tuple(GRAPHS))
        require_choice("order", self.order, ("printed", "after_step"))
        require_representative(self.representative)

    def init(self, worker: Worker) -> DPSGDState:
        return DPSGDState(
            metropolis_weights(worker.comm.rank, edges_of(self.graph, worker.comm.size))
        )

    def optimizer_step(self, worker: Worker, state: DPSGDState) -> None:
        own, parameters = worker.flat.state, worker.flat.parameters
        if self.order == "after_step":
            worker.optimizer.step()
            own.copy_(self._mixed(worker, state))
            return

        mixed = self._mixed(worker, state)
        before = parameters.clone()
        worker.optimizer.step()
        mixed[: worker.flat.count] += parameters - before  # − η g_i(x_i)
        own.copy_(mixed)

    def _mixed(self, worker: Worker, state: DPSGDState) -> Tensor:
        """Σ_j W_ij x_j"""
        own = worker.flat.state
        mixed = own * (1 - sum(state.weights.values()))
        for neighbour, weight in state.weights.items():
            try:
                theirs = worker.comm.exchange(own, neighbour)
            except WorkerLost:
                theirs = own  # the weight of a neighbour that is lost falls to the worker itself
            mixed.add_(theirs, alpha=weight)
        return mixed

    def finish(self, worker: Worker, state: DPSGDState) -> None:
        own = worker.flat.state
        own.copy_(representative(worker, own, self.representative))
