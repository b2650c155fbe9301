"""Push-sum: shares of parameters and weights go one way, to a few others."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.errors import MessageLost, WorkerLost
from flockstep.fields import require, require_choice, require_integer
from flockstep.strategies._compressed import memory_of_differences, require_codec, written
from flockstep.strategies._representative import representative, require_representative
from flockstep.strategies._topology import GRAPHS
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker

LIFT = 2.0**64  # x and a are multiplied by it before a is too small for single precision


@dataclass
class Copies:
    """With a codec, of workers at one distance: what is known of each other's z."""

    own: Tensor  # by the worker so many ranks ahead, of this one
    theirs: Tensor  # by this one, of the worker so many ranks behind
    memory: Memory


@dataclass
class SGPState:
    weight: float  # a
    copies: dict[int, Copies]  # by distance
    lifts: int = 0  # how often x and a were lifted


@dataclass(frozen=True)
class SGP(Strategy[SGPState]):
    """At each step every worker sends a share of its parameters, and of its weight, to one peer or
    a few, and adds what arrives; nobody needs an answer.

        z_i = x_i / a_i;   x_i ← x_i − η a_i g(z_i)
        send s·(x_i, a_i) to each of n peers and keep as much,  s = 1/(n + 1)
        (x_i, a_i) ← the sum of what was kept and of what came
        with a codec:   ẑ_i ← ẑ_i + C((z_i − ẑ_i)/τ);   z_i ← z_i − η g(z_i) + s·Σ_j (ẑ_j − ẑ_i)

    The worker's model is z. Weights are one at first, and sum to w as long as nothing is lost; on
    these graphs, of which all workers have as many peers, each then stays one, and the step is the
    paper's, x_i ← x_i − η g(z_i). A message that the network loses takes parameters and weight with
    it alike: z stays a weighted mean of what all have learnt, and the receiver goes on without.
    Weights shrink so over time, and with them the step of x, so that z always moves by −ηg. With
    another optimizer than plain SGD its change at z takes the place of −ηg. What cannot be sent to
    a lost worker is kept. Statistics of batch normalisation travel with the parameters. finish:
    Σ x / Σ a, or one worker's z.

    Of the graph's distances, those of step t = 0, 1, … are n in a row from the t-th on, in a
    circle. In the exponential graph with one peer that is 2^(t mod τ), τ = ⌊log₂(w−1)⌋ + 1; with
    two, 1 and 2 ranks ahead, then 2 and 4.

    With a codec differences to a copy travel that both sides keep, ẑ, one for each distance; what a
    message leaves out is still there in the next difference. Copies would differ for good if a
    message were lost, so these are sent until they arrive: weights stay one and need not travel. τ
    is 1, but for codecs that are right on average alone (E|C(x)|² ≤ τ|x|²), whose copies would run
    away otherwise.

    Bytes: parameters, buffers and two numbers (a weight, and its exponent) to each of n peers, per
        worker and step, or the codec's message; at the end two all-reduces, of 8 and of parameters,
        buffers and weight, or a score per worker ("best") and one broadcast.

    Use: on many workers, over links that lose messages or go one way.

    Fields:
        graph: "exponential" (1, 2, 4, … ranks ahead), "ring" (one ahead) or "complete" (1, 2, 3,
            … ahead: all in turn).
        peers: n, at least 1 and at most as many distances as the graph has.
        representative: which model stands for the run: the weighted "mean" of all, that of the
            worker with the "best" loss over its last steps, or "any" worker's.
        codec: how differences travel.

    Papers: Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep
        Learning", 2019; Taheri, Mokhtari, Hassani, Pedarsani, "Quantized Decentralized Stochastic
        Learning over Directed Graphs", 2020 (with a codec).

    Example:
        fs.run("digits-mlp", fs.SGP(), workers=4)
    """

    name: ClassVar[str] = "sgp"
    graph: str = "exponential"
    peers: int = 1
    representative: str = "mean"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_choice("graph", self.graph, ("exponential", "ring", "complete"))
        require_integer("peers", self.peers, 1)
        require_representative(self.representative)
        require_codec(self.codec)

    @property
    def _share(self) -> float:
        return 1 / (self.peers + 1)

    def init(self, worker: Worker) -> SGPState:
        comm, z = worker.comm, _wide(worker.flat.state)
        distances = self._distances(comm.size)
        rule = f"be at most {len(distances)}, with {self.graph!r} and {comm.size} workers"
        require(self.peers <= len(distances), "peers", rule, self.peers)

        copies = {}
        if self.codec is not None:
            for place, distance in enumerate(distances):
                memory = memory_of_differences(worker, self.codec, z, stream=place)
                copies[distance] = Copies(z.clone(), z.clone(), memory)
        return SGPState(1.0, copies)

    def _distances(self, workers: int) -> list[int]:
        return sorted(GRAPHS[self.graph](workers))

    def optimizer_step(self, worker: Worker, state: SGPState) -> None:
        distances = self._distances(worker.comm.size)
        now = [distances[(worker.steps + n) % len(distances)] for n in range(self.peers)]
        worker.optimizer.step()  # z_i ← z_i − η g(z_i)
        if self.codec is None:
            self._push(worker, state, now)
        else:
            self._mix(worker, state, now, self.codec)

    def _push(self, worker: Worker, state: SGPState, distances: list[int]) -> None:
        comm = worker.comm
        mass = _mass(worker.flat.state, state.weight)  # (x_i, a_i)
        share = mass * self._share
        message = torch.cat([share, share.new_tensor([state.lifts])])
        parts = [(mass, state.lifts)]
        # All send first: a send waits for nothing but the peer's taking that of an earlier step.
        for distance in distances:
            with suppress(WorkerLost):  # what cannot be sent is kept
                comm.send(message, (comm.rank + distance) % comm.size, may_be_lost=True)
                mass -= share
        for distance in distances:
            with suppress(MessageLost, WorkerLost):
                came = torch.empty_like(message)
                comm.recv(came, (comm.rank - distance) % comm.size, may_be_lost=True)
                parts.append((came[:-1], int(came[-1])))
        self._add(worker, state, parts)

    def _add(self, worker: Worker, state: SGPState, parts: list[tuple[Tensor, int]]) -> None:
        """(x_i, a_i) ← the sum of all parts, each lifted so often;  z_i = x_i / a_i"""
        lifts = min(lifts for _, lifts in parts)
        total = torch.zeros_like(parts[0][0])
        for mass, lifted in parts:
            total.add_(mass, alpha=LIFT ** (lifts - lifted))
        if total[-1] < 1 / LIFT:
            total *= LIFT
            lifts += 1
        state.weight, state.lifts = float(total[-1]), lifts
        worker.flat.state.copy_(total[:-1] / total[-1])

    def _mix(self, worker: Worker, state: SGPState, distances: list[int], codec: Codec) -> None:
        """z_i ← z_i + s Σ_j (ẑ_j − ẑ_i), with copies that have just been renewed."""
        comm, z = worker.comm, _wide(worker.flat.state)
        mixed = z.clone()
        for distance in distances:
            copies = state.copies[distance]
            difference = (z - copies.own).div_(codec.second_moment(z.numel()))
            message = codec.encode(difference, copies.memory)
            copies.own += codec.decode(message, difference, copies.memory)  # ẑ_i

            # A message of unknown length may come in two parts, the second once the first was
            # taken. So in each circle of workers somebody listens first.
            is_one = codec.message_nbytes(difference) is not None
            sends_first = is_one or comm.rank // distance % 2 == 0
            for sends in (sends_first, not sends_first):
                with suppress(WorkerLost):
                    if sends:
                        ahead = (comm.rank + distance) % comm.size
                        comm.send(difference, ahead, codec=written(codec, message))
                    else:
                        behind = (comm.rank - distance) % comm.size
                        copies.theirs += comm.recv(torch.empty_like(z), behind, codec=codec)  # ẑ_j
                        mixed.add_(copies.theirs - copies.own, alpha=self._share)
        worker.flat.state.copy_(mixed)

    def finish(self, worker: Worker, state: SGPState) -> None:
        comm, own = worker.comm, worker.flat.state
        if self.representative != "mean":
            own.copy_(representative(worker, own, self.representative))
            return
        lifts = int(comm.all_reduce(torch.tensor(state.lifts), op="min"))
        mass = _mass(own, state.weight * LIFT ** (lifts - state.lifts))
        total = comm.all_reduce(mass)
        own.copy_(total[:-1] / total[-1])  # Σ x / Σ a


def _wide(tensor: Tensor) -> Tensor:
    """Half precision would soon forget weights."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _mass(z: Tensor, weight: float) -> Tensor:
    """x = a·z, and a"""
    x = _wide(z) * weight
    return torch.cat([x, x.new_tensor([weight])])
