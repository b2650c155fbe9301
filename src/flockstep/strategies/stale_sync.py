"""A parameter server whose workers keep within a bound of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from flockstep.codecs import Codec
from flockstep.comm import SharedTensor, handle
from flockstep.fields import require_integer
from flockstep.strategies._compressed import require_codec
from flockstep.strategies._parameter_server import ParameterServer
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
class StaleSyncState:
    server: ParameterServer
    tick: Tensor  # adds one to this worker's clock

    clocks: SharedTensor = handle()  # the steps that each worker has finished


@dataclass(frozen=True)
class StaleSync(Strategy[StaleSyncState]):
    """AsyncSGD in which no worker gets more than `staleness` steps ahead of the slowest.

        before step t+1:   wait until min_k clock_k ≥ t − s;   read x
        after it:          x ← x − η g(x_read);   clock_i ← t+1
        with a codec:      x ← x + C(e − η g(x_read)),   e ← what that leaves out

    clock_i counts the steps that worker i has finished. staleness=0 is synchronous: all read the
    same x, at a barrier, which then gains the sum of their changes. That is SyncSGD with w times
    the learning rate, since SyncSGD takes the mean. With another optimizer
    than plain SGD its change takes the place of −ηg. Workers that are lost or have finished are not
    waited for. finish: the server's parameters.

    A codec carries changes; only elements that have changed are read. What is not sent when the
    training ends, e, stays unsent: no gradient has seen it.

    Bytes: one read of the parameters and one add per step, and one read at the end; with a codec,
    per step its message and a read of changes, as AsyncSGD; 16w per step for the clocks.

    Use: where workers differ in speed for a while, but none is slow for good.

    Fields:
        staleness: s, at least 0.
        codec: how changes are written on the wire; None: as they are.

    Paper: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
        Server", 2013.

    Example:
        fs.run("digits-mlp", fs.StaleSync(staleness=3), workers=4)
    """

    name: ClassVar[str] = "stale_sync"
    revision: ClassVar[int] = 1
    shares_tensors: ClassVar[bool] = True
    staleness: int
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_integer("staleness", self.staleness, 0)

    def init(self, worker: Worker) -> StaleSyncState:
        clocks = step_clocks(worker)
        server = ParameterServer.of(worker, self.codec)
        return StaleSyncState(server, tick_of(worker.comm), clocks=clocks)

    def before_step(self, worker: Worker, state: StaleSyncState) -> None:
        wait_for_the_slowest(worker, state.clocks, self.staleness)
        state.server.fetch(worker)
        if self.staleness == 0:
            worker.comm.barrier()  # nobody changes what another has still to read

    def after_step(self, worker: Worker, state: StaleSyncState) -> None:
        with state.server.value.changing():  # one at a time, as AsyncSGD
            state.server.push(state.server.change(worker))
        advance(state.clocks, state.tick, 1)

    def preview(self, worker: Worker, state: StaleSyncState) -> Tensor:
        return state.server.preview(worker)

    def finish(self, worker: Worker, state: StaleSyncState) -> None:
        advance(state.clocks, state.tick, FOREVER)
        state.server.finish(worker)
