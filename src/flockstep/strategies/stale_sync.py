"""A parameter server whose workers keep within a bound of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.comm import SharedTensor, handle
from flockstep.fields import require_integer
from flockstep.strategies._parameter_server import ParameterServer
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker

FOREVER = 1 << 40  # steps ahead of everybody: nobody waits for who has finished


@dataclass
class StaleSyncState:
    server: ParameterServer
    tick: Tensor  # adds one to this worker's clock

    clocks: SharedTensor = handle()  # the steps that each worker has finished


@dataclass(frozen=True)
class StaleSync(Strategy[StaleSyncState]):
    """AsyncSGD in which no worker gets more than `staleness` steps ahead of the slowest.

        before step t+1:   wait until min_k clock_k ≥ t − s;   read x
        after it:          x ← x − η g(x_read);   clock_i ← t+1

    clock_i counts the steps that worker i has finished. staleness=0 is synchronous: all read the
    same x, at a barrier, which then gains the sum of their changes. That is SyncSGD with w times
    the learning rate, since SyncSGD takes the mean. With another optimizer
    than plain SGD its change takes the place of −ηg. Workers that are lost or have finished are not
    waited for. finish: the server's parameters.

    Bytes: one add and one read of the parameters per step, and one read at the end; 16w per step
        for the clocks.

    Use: where workers differ in speed for a while, but none is slow for good.

    Fields:
        staleness: s, at least 0.

    Paper: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
        Server", 2013.

    Example:
        fs.run("digits-mlp", fs.StaleSync(staleness=3), workers=4)
    """

    name: ClassVar[str] = "stale_sync"
    revision: ClassVar[int] = 1
    staleness: int

    def __post_init__(self) -> None:
        require_integer("staleness", self.staleness, 0)

    def init(self, worker: Worker) -> StaleSyncState:
        comm = worker.comm
        # A worker that begins anew has taken steps before.
        clocks = comm.shared("clocks", torch.full((comm.size,), worker.steps))
        tick = torch.zeros(comm.size, dtype=torch.int64)
        tick[comm.rank] = 1
        return StaleSyncState(ParameterServer.of(worker), tick, clocks=clocks)

    def before_step(self, worker: Worker, state: StaleSyncState) -> None:
        comm = worker.comm

        def lead(clocks: Tensor) -> int:
            return worker.steps - int(clocks[list(comm.members)].min())

        state.clocks.wait_until(lambda clocks: lead(clocks) <= self.staleness)
        state.server.fetch(worker)
        if self.staleness == 0:
            comm.barrier()  # nobody changes what another has still to read

    def after_step(self, worker: Worker, state: StaleSyncState) -> None:
        with state.server.value.lock():  # one at a time, as AsyncSGD
            state.server.value.add(state.server.change(worker))
        self._advance(state, 1)

    def preview(self, worker: Worker, state: StaleSyncState) -> Tensor:
        return state.server.preview(worker)

    def finish(self, worker: Worker, state: StaleSyncState) -> None:
        self._advance(state, FOREVER)
        state.server.finish(worker)

    def _advance(self, state: StaleSyncState, steps: int) -> None:
        # Adding nothing to the others' clocks must not undo what they add.
        with state.clocks.lock():
            state.clocks.add(state.tick, scale=steps)
