"""Gossip with weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.comm import Comm, SharedTensor, handle
from flockstep.fields import require_choice, require_number
from flockstep.randomness import Purpose, torch_stream
from flockstep.strategies._compressed import memory_of_differences, require_codec
from flockstep.strategies._representative import representative, require_representative
from flockstep.strategies._topology import distance_in_turn
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class Copies:
    """For a codec: x̂_ij, what worker j knows of worker i, for every pair of them."""

    told: dict[int, Tensor]  # x̂_ij of this worker i, by j
    memory: Memory

    codec: Codec = handle()
    # Of each worker j, living there: the weights that came from each i and were not taken yet, and
    # x̂_ij by i.
    weights: list[SharedTensor] = handle()
    known: list[dict[int, SharedTensor]] = handle()

    @classmethod
    def of(cls, worker: Worker, codec: Codec) -> Copies:
        comm, own = worker.comm, worker.flat.state
        none = torch.zeros(comm.size, dtype=torch.float64)
        weights = [comm.shared(f"weights {j}", none, home=j) for j in range(comm.size)]
        known = [
            {i: comm.shared(f"{i} at {j}", own, home=j) for i in range(comm.size) if i != j}
            for j in range(comm.size)
        ]
        told = {j: own.clone() for j in range(comm.size) if j != comm.rank}
        memory = memory_of_differences(worker, codec, own)
        return cls(told, memory, codec=codec, weights=weights, known=known)

    def send(self, comm: Comm, own: Tensor, peer: int, weight: float) -> None:
        """x̂_ij ← x̂_ij + C(x_i − x̂_ij), and a. The caller holds the lock of `weights[peer]`."""
        told = self.told[peer]
        difference = (own - told).div_(self.codec.second_moment(own.numel()))
        known = self.known[peer][comm.rank]
        told += known.add(difference, codec=self.codec, memory=self.memory)
        share = torch.zeros(comm.size, dtype=torch.float64)
        share[comm.rank] = weight
        self.weights[peer].add(share)

    def arrived(self, comm: Comm, empty: Tensor, *, is_taken: bool) -> Tensor:
        """Σ a·x̂ and Σ a of what has come. The caller holds the lock, or nobody sends."""
        weights = self.weights[comm.rank]
        came = weights.read()
        if is_taken:
            weights.write(torch.zeros_like(came))
        total = empty.clone()
        for i, known in self.known[comm.rank].items():
            weight = float(came[i])
            if weight:
                total[:-1] += known.read().to(total.dtype) * weight
                total[-1] += weight
        return total


@dataclass
class GoSGDState:
    weight: float  # a
    draw: torch.Generator
    copies: Copies | None = None  # for a codec
    turn: int = 0  # of the next message, where peers come in turn

    # Of all workers, each living at its own: Σ a·x and Σ a of what has arrived.
    mailboxes: list[SharedTensor] = handle()
    empty: Tensor = handle()  # what a mailbox is when nothing is in it


@dataclass(frozen=True)
class GoSGD(Strategy[GoSGDState]):
    """Now and then a worker halves its weight and sends its parameters with it to a random other.

        after each step, with probability p:   a_i ← a_i/2;   send (x_i, a_i) to a random peer
        on what came, at the end of a step:    x_j ← (a_j x_j + a x)/(a_j + a);   a_j ← a_j + a
        with a codec:   x̂_ij ← x̂_ij + C(x_i − x̂_ij) is what j takes for x_i

    Weights start at 1/w and sum to one at all times, messages in flight included, so Σ a·x is
    changed by gradients alone. Messages that arrive during one step are taken together: the
    weighted mean of several is the same in any order. A message that the network loses takes its
    weight with it: weights then sum to less than one, and finish divides by what is left.
    Statistics of batch normalisation travel with the parameters. finish: once all messages have
    been taken, Σ a·x / Σ a, or one worker's x.

    With a codec a worker sends how it differs from what that peer knows of it, x̂_ij, at first the
    common start. What a message leaves out is a part of the next difference for the same peer. The
    two of each pair keep it: 2(w−1) copies of parameters and buffers per worker, so this is for few
    workers. Weights are sent as they are, and sum to one; Σ a·x gains what a copy differs from
    x_i. A message that follows another before that is taken renews it, for both their weights. A
    copy that missed a message would be wrong for good, so these are always sent until they arrive.

    Bytes: p times parameters, buffers and one weight per worker and step, on average, or the
    codec's message and w weights; at the end one all-reduce of parameters, buffers and weight, or a
    score per worker ("best") and one broadcast.

    Use: on loosely coupled workers, with as little traffic as one likes.

    Fields:
        probability: p, from 0 to 1.
        representative: which model stands for the run: the weighted "mean" of all, that of the
            worker with the "best" loss over its last steps, or "any" worker's.
        codec: how differences to copies are written on the wire; None: parameters as they are.
        peers: to whom: "random" others, or "exponential": those 1, 2, 4, … ranks ahead, in turn.

    Papers: Blot, Picard, Thome, Cord, "Gossip training for deep learning", 2016 (GoSGD, 2018);
        Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training", 2021
        (peers in turn).

    Example:
        fs.run("digits-mlp", fs.GoSGD(probability=0.2), workers=4)
    """

    name: ClassVar[str] = "gosgd"
    revision: ClassVar[int] = 1
    shares_tensors: ClassVar[bool] = True
    probability: float = 0.1
    representative: str = "mean"
    codec: Codec | None = None
    peers: str = "random"

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_choice("peers", self.peers, ("random", "exponential"))
        require_number("probability", self.probability, at_least=0, at_most=1)
        require_representative(self.representative)

    @property
    def waits(self) -> bool:
        return False

    def init(self, worker: Worker) -> GoSGDState:
        comm, own = worker.comm, worker.flat.state
        # Half precision would soon forget weights.
        empty = torch.zeros(own.numel() + 1, dtype=torch.promote_types(own.dtype, torch.float32))
        draw = torch_stream(Purpose.GOSSIP, comm.seed, comm.rank)
        if self.codec is not None:
            copies = Copies.of(worker, self.codec)
            return GoSGDState(1 / comm.size, draw, copies, mailboxes=[], empty=empty)
        mailboxes = [comm.shared(f"mailbox {rank}", empty, home=rank) for rank in range(comm.size)]
        return GoSGDState(1 / comm.size, draw, mailboxes=mailboxes, empty=empty)

    def after_step(self, worker: Worker, state: GoSGDState) -> None:
        self._take(worker, state)
        if float(torch.rand((), generator=state.draw)) < self.probability:
            others = [rank for rank in worker.comm.members if rank != worker.comm.rank]
            if others:
                self._send(worker, state, self._peer(worker, state, others))

    def _peer(self, worker: Worker, state: GoSGDState, others: list[int]) -> int:
        if self.peers == "random":
            return others[int(torch.randint(len(others), (), generator=state.draw))]
        rank, size = worker.comm.rank, worker.comm.size
        ahead = distance_in_turn(state.turn, size)
        state.turn += 1
        # Who is lost leaves its turn to the next who is there.
        return min(others, key=lambda other: (other - rank - ahead) % size)

    def _send(self, worker: Worker, state: GoSGDState, peer: int) -> None:
        half = state.weight / 2
        if state.copies is not None:
            with state.copies.weights[peer].lock():
                state.copies.send(worker.comm, worker.flat.state, peer, half)
                state.weight = half
            return
        message = self._weighted(worker.flat.state, half, state)
        with state.mailboxes[peer].changing():
            state.mailboxes[peer].add(message, may_be_lost=True)
            # Not before: who is looked at while it waits for the lock still has its whole weight.
            state.weight = half

    def _take(self, worker: Worker, state: GoSGDState) -> None:
        """Empty the mailbox; the weighted mean of what was in it and the own parameters."""
        comm = worker.comm
        if state.copies is None:
            mailbox = state.mailboxes[comm.rank]
            with mailbox.changing():
                message = mailbox.blend(state.empty, 1.0)
        else:
            with state.copies.weights[comm.rank].lock():
                message = state.copies.arrived(comm, state.empty, is_taken=True)
        state.weight = self._join(message, worker.flat.state, state.weight)

    def _join(self, message: Tensor, own: Tensor, weight: float) -> float:
        """Change `own` to the weighted mean of itself and the message; return its new weight."""
        arrived = float(message[-1])
        if not arrived:
            return weight
        total = weight + arrived
        own.mul_(weight / total).add_(message[:-1].to(own), alpha=1 / total)
        return total

    def preview(self, worker: Worker, state: GoSGDState) -> Tensor:
        worker.comm.barrier()  # all messages have arrived
        if state.copies is None:
            message = state.mailboxes[worker.comm.rank].read()
        else:
            message = state.copies.arrived(worker.comm, state.empty, is_taken=False)
        own = worker.flat.state.clone()
        weight = self._join(message, own, state.weight)
        return self._standing_for_all(worker, own, weight, state)

    def finish(self, worker: Worker, state: GoSGDState) -> None:
        worker.comm.barrier()  # all messages have arrived
        self._take(worker, state)
        own = worker.flat.state
        own.copy_(self._standing_for_all(worker, own, state.weight, state))

    def _standing_for_all(
        self, worker: Worker, own: Tensor, weight: float, state: GoSGDState
    ) -> Tensor:
        """Σ a·x / Σ a over the workers, or the x of one of them."""
        if self.representative != "mean":
            return representative(worker, own, self.representative)
        total = worker.comm.all_reduce(self._weighted(own, weight, state))
        # The weights sum to less than one if a lost worker or message took its own with it.
        return (total[:-1] / total[-1]).to(own)

    def _weighted(self, own: Tensor, weight: float, state: GoSGDState) -> Tensor:
        """a·x and a, as they travel."""
        own = own.to(state.empty.dtype)
        return torch.cat([own * weight, own.new_tensor([weight])])
