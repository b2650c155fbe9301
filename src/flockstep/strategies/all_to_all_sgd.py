"""Every change to every other worker, and nobody in the middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.comm import SharedTensor, handle
from flockstep.fields import require_integer
from flockstep.strategies._compressed import require_codec
from flockstep.strategies._step_clocks import (
    FOREVER,
    advance,
    step_clocks,
    tick_of,
    wait_for_the_slowest,
)
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class AllToAllState:
    memory: Memory | None  # of the codec
    tick: Tensor  # adds one to this worker's clock

    # Of all workers, each living at its own: the sum of the changes that have arrived.
    mailboxes: list[SharedTensor] = handle()
    empty: Tensor = handle()  # what a mailbox is when nothing is in it
    clocks: SharedTensor | None = handle()  # the steps that each worker has finished


@dataclass(frozen=True)
class AllToAllSGD(Strategy[AllToAllState]):
    """Every worker sends each of its changes to every other, with no server; they are applied as
    they arrive, in any order.

        x_i ← x_i + Δ_i,  Δ_i = −η g(x_i);   send Δ_i to all others      each step
        x_j ← x_j + Δ_i                                                  on what came, in any order

    Once all is delivered every replica is the start plus the sum of all changes, so all are equal,
    to rounding. With another optimizer than plain SGD its change takes the place of −ηg, and they
    are equal as well. Changes of all workers add up, so many workers want a smaller learning rate.

    A change goes into a mailbox at its receiver, who empties it after its own step: changes sum up
    there, and nobody waits for anybody's step. With a codec each change is encoded once, with what
    was not sent before, and all get the same message; the worker itself applies what that stands
    for, C(Δ + e), rather than Δ, so that replicas are still equal.

    With a bound s a worker begins a step when it is at most s steps ahead of the slowest. s = 0 is
    synchronous: all compute at the same x, which then gains the sum of their changes, as with
    SyncSGD at w times the learning rate. Workers that are lost or have finished are not waited for.

    The staleness of an update is the number of updates by others that have arrived at its worker
    between the parameters of its gradient and those of the next. Statistics of batch normalisation
    stay each worker's own until the end. finish: once all is delivered, the mean of all, which is
    the same for all to the bit.

    Bytes: parameters to each of w − 1 others, per worker and step, or the codec's message; at the
        end one all-reduce of parameters and buffers; with a bound, 16w per worker and step for the
        clocks.

    Use: where workers differ in speed, nobody shall be a server, and links are fast or a codec
        makes messages small.

    Fields:
        staleness: s, at least 0; None: no bound.
        codec: how changes travel.

    Paper: Viviani, Drocco, Aldinucci, "Pushing the boundaries of parallel Deep Learning – A
        practical approach", 2019 (decentralised complete communication).

    Example:
        fs.run("digits-mlp", fs.AllToAllSGD(), workers=4)
    """

    name: ClassVar[str] = "all_to_all_sgd"
    shares_tensors: ClassVar[bool] = True
    staleness: int | None = None
    codec: Codec | None = None

    def __post_init__(self) -> None:
        if self.staleness is not None:
            require_integer("staleness", self.staleness, 0)
        require_codec(self.codec)

    @property
    def waits(self) -> bool:
        return self.staleness is not None

    def init(self, worker: Worker) -> AllToAllState:
        comm, own = worker.comm, worker.flat.parameters
        empty = torch.zeros_like(own)
        mailboxes = [comm.shared(f"mailbox {rank}", empty, home=rank) for rank in range(comm.size)]
        for mailbox in mailboxes:
            mailbox.counts_staleness = True

        memory = None
        if self.codec is not None:
            shapes = worker.flat.shapes
            memory = self.codec.memory(own, shapes, seed=comm.seed, rank=comm.rank)
        clocks = None if self.staleness is None else step_clocks(worker)
        return AllToAllState(memory, tick_of(comm), mailboxes=mailboxes, empty=empty, clocks=clocks)

    def optimizer_step(self, worker: Worker, state: AllToAllState) -> None:
        parameters = worker.flat.parameters
        before = parameters.clone()
        worker.optimizer.step()
        change = parameters - before  # Δ_i
        sent = worker.comm.add_to_each(
            self._others(worker, state), change, codec=self.codec, memory=state.memory
        )
        if self.codec is not None:
            parameters.copy_(before + sent)  # C(Δ_i + e)

    def after_step(self, worker: Worker, state: AllToAllState) -> None:
        if self.staleness is not None and state.clocks is not None:
            advance(state.clocks, state.tick, 1)
            wait_for_the_slowest(worker, state.clocks, self.staleness)
        self._take(worker, state)
        if self.staleness == 0:
            worker.comm.barrier()  # nobody sends more before all have taken

    def _others(self, worker: Worker, state: AllToAllState) -> list[SharedTensor]:
        """The mailboxes of all others, of whom each worker begins with another."""
        comm = worker.comm
        peers = [(comm.rank + distance) % comm.size for distance in range(1, comm.size)]
        there = set(comm.members)
        return [state.mailboxes[peer] for peer in peers if peer in there]

    def _take(self, worker: Worker, state: AllToAllState) -> None:
        """Empty the mailbox, and apply what was in it."""
        mailbox, parameters = state.mailboxes[worker.comm.rank], worker.flat.parameters
        with mailbox.changing():
            parameters.add_(mailbox.blend(state.empty, 1.0))

    def preview(self, worker: Worker, state: AllToAllState) -> Tensor:
        worker.comm.barrier()  # all changes have arrived
        own = worker.flat.state.clone()
        arrived = state.mailboxes[worker.comm.rank].read()
        own[: worker.flat.count].add_(arrived.to(own))
        return worker.comm.all_reduce(own, op="mean")

    def finish(self, worker: Worker, state: AllToAllState) -> None:
        if state.clocks is not None:
            advance(state.clocks, state.tick, FOREVER)
        worker.flat.state.copy_(self.preview(worker, state))
