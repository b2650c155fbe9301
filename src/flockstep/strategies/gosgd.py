"""Gossip with weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.comm import SharedTensor, handle
from flockstep.fields import require_number
from flockstep.randomness import Purpose, torch_stream
from flockstep.strategies._representative import representative, require_representative
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class GoSGDState:
    weight: float  # a
    draw: torch.Generator

    # Of all workers, each living at its own: Σ a·x and Σ a of what has arrived.
    mailboxes: list[SharedTensor] = handle()
    empty: Tensor = handle()  # what a mailbox is when nothing is in it


@dataclass(frozen=True)
class GoSGD(Strategy[GoSGDState]):
    """Now and then a worker halves its weight and sends its parameters with it to a random other.

        after each step, with probability p:   a_i ← a_i/2;   send (x_i, a_i) to a random peer
        on what came, at the end of a step:    x_j ← (a_j x_j + a x)/(a_j + a);   a_j ← a_j + a

    Weights start at 1/w and sum to one at all times, messages in flight included, so Σ a·x is
    changed by gradients alone. Messages that arrive during one step are taken together: the
    weighted mean of several is the same in any order. Statistics of batch normalisation travel with
    the parameters. finish: once all messages have been taken, Σ a·x / Σ a, or one worker's x.

    Bytes: p times parameters, buffers and one weight per worker and step, on average; at the end
        one all-reduce of as much, or a score per worker ("best") and one broadcast.

    Use: on loosely coupled workers, with as little traffic as one likes.

    Fields:
        probability: p, from 0 to 1.
        representative: which model stands for the run: the weighted "mean" of all, that of the
            worker with the "best" loss over its last steps, or "any" worker's.

    Paper: Blot, Picard, Thome, Cord, "Gossip training for deep learning", 2016 (GoSGD, 2018).

    Example:
        fs.run("digits-mlp", fs.GoSGD(probability=0.2), workers=4)
    """

    name: ClassVar[str] = "gosgd"
    revision: ClassVar[int] = 1
    probability: float = 0.1
    representative: str = "mean"

    def __post_init__(self) -> None:
        require_number("probability", self.probability, at_least=0, at_most=1)
        require_representative(self.representative)

    @property
    def waits(self) -> bool:
        return False

    def init(self, worker: Worker) -> GoSGDState:
        comm, own = worker.comm, worker.flat.state
        # Half precision would soon forget weights.
        empty = torch.zeros(own.numel() + 1, dtype=torch.promote_types(own.dtype, torch.float32))
        mailboxes = [comm.shared(f"mailbox {rank}", empty, home=rank) for rank in range(comm.size)]
        draw = torch_stream(Purpose.GOSSIP, comm.seed, comm.rank)
        return GoSGDState(1 / comm.size, draw, mailboxes=mailboxes, empty=empty)

    def after_step(self, worker: Worker, state: GoSGDState) -> None:
        self._take(worker, state)
        if float(torch.rand((), generator=state.draw)) < self.probability:
            peers = [rank for rank in worker.comm.members if rank != worker.comm.rank]
            if peers:
                self._send(
                    worker, state, peers[int(torch.randint(len(peers), (), generator=state.draw))]
                )

    def _send(self, worker: Worker, state: GoSGDState, peer: int) -> None:
        half = state.weight / 2
        message = self._weighted(worker.flat.state, half, state)
        with state.mailboxes[peer].lock():
            state.mailboxes[peer].add(message)
            # Not before: who is looked at while it waits for the lock still has its whole weight.
            state.weight = half

    def _take(self, worker: Worker, state: GoSGDState) -> None:
        """Empty the mailbox; the weighted mean of what was in it and the own parameters."""
        mailbox = state.mailboxes[worker.comm.rank]
        with mailbox.lock():
            message = mailbox.blend(state.empty, 1.0)
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
        message = state.mailboxes[worker.comm.rank].read()
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
        # The weights sum to less than one if a lost worker took its own with it.
        return (total[:-1] / total[-1]).to(own)

    def _weighted(self, own: Tensor, weight: float, state: GoSGDState) -> Tensor:
        """a·x and a, as they travel."""
        own = own.to(state.empty.dtype)
        return torch.cat([own * weight, own.new_tensor([weight])])
