"""Mixing with one's neighbours, all at once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.codecs import Codec
from flockstep.errors import MessageLost, WorkerLost
from flockstep.fields import require, require_choice, require_number
from flockstep.strategies._compressed import PublicCopies, require_codec, written
from flockstep.strategies._representative import representative, require_representative
from flockstep.strategies._topology import (
    GRAPHS,
    ONE_PEER,
    distance_in_turn,
    edges_of,
    metropolis_weights,
)
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class DPSGDState:
    weights: dict[int, float]  # of the neighbours, in the order in which to meet them
    gossip_rate: float  # γ
    public: PublicCopies | None = None  # for a codec: of this worker and its neighbours


@dataclass(frozen=True)
class DPSGD(Strategy[DPSGDState]):
    """Every worker mixes its parameters with its neighbours' at each step; nobody talks to all.

        order="printed":      x_i ← Σ_j W_ij x_j − η g_i(x_i)
        order="after_step":   x_i ← Σ_j W_ij (x_j − η g_j(x_j))
        W_ij = 1 / (1 + max(degree_i, degree_j)),   W_ii the rest to one
        one peer:             W_ij = W_ii = 1/2,  j = i + 2^(t mod τ),  τ = ⌊log₂(w−1)⌋ + 1
        with a codec:   x̂_i ← x̂_i + C(x_i − x̂_i),   x̂_j likewise
                        Σ_j W_ij x_j becomes x_i + γ Σ_j W_ij (x̂_j − x̂_i)

    As printed, both terms are of the old parameters: mixed ones, and a step from the worker's own.
    With another optimizer than plain SGD its change there takes the place of −ηg, so that weight
    decay sees the worker's own parameters, too. W is symmetric and its rows sum to one: mixing
    preserves the mean of all workers. In the one-peer exponential graph W is another one at each
    step t, from 0 on; it is not symmetric, but its columns sum to one as well. Where w is a power
    of two, τ = log₂w such steps without gradients give everybody the exact mean. The weight of a
    neighbour whose message the network loses falls to the worker itself. Statistics of batch
    normalisation are mixed with the parameters. finish: the mean of all, or one of them.

    With a codec this is CHOCO-SGD (its Algorithm 2 is order="after_step"). Every worker keeps a
    public copy x̂ of itself and of each neighbour, at first the common start, and sends each
    neighbour the same message, how it differs from its own. What the message leaves out is a part
    of the next difference. Mixing goes by what both sides know, so that the mean is preserved, too.
    γ=1 and a codec that keeps everything is the rule above; the fewer bits a codec has, the smaller
    γ must be. A copy that missed a message would be wrong for good, so these are always sent until
    they arrive. In the one-peer graph a neighbour would miss what others are told: no codec there.

    Bytes: parameters and buffers, or the codec's message, to each neighbour at each step (2 in a
    ring, or one peer); at the end one all-reduce, or a score per worker ("best") and one broadcast.

    Use: on many workers, where an all-reduce takes too many steps.

    Fields:
        graph: "ring", "exponential" (neighbours 1, 2, 4, … ranks away), "complete", or
            "one_peer_exponential" (one of 1, 2, 4, … ranks ahead, in turn).
        order: whether a worker mixes what it steps from, as in the paper's Algorithm 1, or what
            the step has given.
        representative: which model stands for the run: the "mean" of all, that of the worker with
            the "best" loss over its last steps, or "any" worker's.
        codec: how differences to public copies are written on the wire; None: parameters as they
            are.
        gossip_rate: γ, above 0 and at most 1: how much of the way a worker goes that mixing says.
            None: 1 without a codec; with one the length of its messages over that of parameters and
            buffers, at most 1 (our choice: consensus without gradients was stable there, and with
            much more often not; the paper tunes it).

    Papers: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", 2017;
    Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with
    Compressed Communication", 2019 (with a codec); Ying et al., "Exponential Graph is Provably
    Efficient for Decentralized Deep Training", 2021 (one peer).

    Example:
        fs.run("digits-mlp", fs.DPSGD(graph="ring"), workers=4)
    """

    name: ClassVar[str] = "d_psgd"
    revision: ClassVar[int] = 1
    graph: str = "ring"
    order: str = "printed"
    representative: str = "mean"
    codec: Codec | None = None
    gossip_rate: float | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)
        if self.gossip_rate is not None:
            require_number("gossip_rate", self.gossip_rate, above=0, at_most=1)
        require_choice("graph", self.graph, (*GRAPHS, ONE_PEER))
        keeps_copies = self.codec is None or self.graph != ONE_PEER
        require(keeps_copies, "codec", f"be None with graph={ONE_PEER!r}", self.codec)
        require_choice("order", self.order, ("printed", "after_step"))
        require_representative(self.representative)

    def init(self, worker: Worker) -> DPSGDState:
        comm, public = worker.comm, None
        if self.graph == ONE_PEER:
            return DPSGDState({}, self.gossip_rate or 1.0, public)
        weights = metropolis_weights(comm.rank, edges_of(self.graph, comm.size))
        rate = self.gossip_rate
        if self.codec is not None:
            public = PublicCopies.of(worker, self.codec, [comm.rank, *weights])
            rate = rate or public.share_of_bytes(worker.flat.state)
        return DPSGDState(weights, rate or 1.0, public)

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
        own, rate = worker.flat.state, state.gossip_rate
        if self.graph == ONE_PEER:
            return own.lerp(self._of_the_peer_ahead(worker), 0.5 * rate)
        if state.public is not None:
            return self._mixed_by_copies(worker, state, state.public)
        mixed = own * (1 - rate * sum(state.weights.values()))
        for neighbour, weight in state.weights.items():
            try:
                theirs = worker.comm.exchange(own, neighbour, may_be_lost=True)
            except (WorkerLost, MessageLost):
                theirs = own  # the weight of who is not heard falls to the worker itself
            mixed.add_(theirs, alpha=rate * weight)
        return mixed

    def _mixed_by_copies(self, worker: Worker, state: DPSGDState, public: PublicCopies) -> Tensor:
        """x_i + γ Σ_j W_ij (x̂_j − x̂_i), with copies that have just been renewed."""
        comm, own, codec = worker.comm, worker.flat.state, public.codec
        message = public.message(own, comm.rank)
        public.hear(message, comm.rank)  # x̂_i ← x̂_i + C(x_i − x̂_i)
        mixed = own.clone()
        for neighbour, weight in state.weights.items():
            try:
                change = comm.exchange(own, neighbour, codec=written(codec, message))
            except WorkerLost:
                continue  # its weight falls to the worker itself
            theirs = public[neighbour].add_(change)
            mixed.add_(theirs - public[comm.rank], alpha=state.gossip_rate * weight)
        return mixed

    def _of_the_peer_ahead(self, worker: Worker) -> Tensor:
        """x_j, j = i + 2^(t mod τ); the worker's own if that is lost."""
        comm, own = worker.comm, worker.flat.state
        distance = distance_in_turn(worker.steps, comm.size)
        with suppress(WorkerLost):
            comm.send(own, (comm.rank - distance) % comm.size, may_be_lost=True)
        try:
            ahead = (comm.rank + distance) % comm.size
            return comm.recv(torch.empty_like(own), ahead, may_be_lost=True)
        except (MessageLost, WorkerLost):
            return own

    def finish(self, worker: Worker, state: DPSGDState) -> None:
        own = worker.flat.state
        own.copy_(representative(worker, own, self.representative))
