"""The parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from flockstep.codecs import Codec
from flockstep.comm import SharedTensor, handle
from flockstep.fields import require, require_flag, require_number
from flockstep.node import NodeOptimizer
from flockstep.strategies._compressed import require_codec
from flockstep.strategies._parameter_server import ParameterServer
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker

ONE = torch.ones(1, dtype=torch.int64)


@dataclass
class AsyncSGDState:
    server: ParameterServer
    read_at: int = 0  # the clock when this worker last read

    velocity: SharedTensor | None = handle()  # the server's momentum
    clock: SharedTensor | None = handle()  # updates so far


@dataclass(frozen=True)
class AsyncSGD(Strategy[AsyncSGDState]):
    """Workers send their changes to a server, which applies one at a time, and read the parameters
    back.

        u = −η g(x_read);   v ← μv + u;   x ← x + v                  one worker at a time
        staleness_aware:       u / max(1, s),  s the updates by others since x_read
        delay_compensation:    g + λ g ⊙ g ⊙ (x − x_read)  in g's place
        with a codec:          C(u + e) in u's place, after both;   e ← what that leaves out

    With another optimizer than plain SGD its change takes the place of −ηg. Delay compensation
    changes the gradient, not what is sent, so it is for plain SGD: an optimizer with momentum or
    weight decay is refused. The paper has neither; a penalty on the weights belongs into the loss,
    whose gradient g is. Changes of all workers add up, so many workers want a smaller learning
    rate, or staleness_aware. finish: the server's parameters.

    A codec carries u as it would be sent without one: compensated, and divided by its staleness. So
    the error e that a worker remembers is of changes that have their final size, and the server's
    momentum is over what it has heard. The server knows what a worker has read, and sends it the
    elements that have changed since then: few, where messages of the codec change few. So what a
    worker reads is exact, with a codec too. What is not sent when the training ends stays unsent:
    no gradient has seen it.

    A change lands at once when it has arrived, and nobody waits while another's is under way.
    Where it depends on what is at the server (momentum, staleness_aware, delay_compensation) a
    worker holds the server's lock from its first read until it has read the outcome.

    Bytes: one read of the parameters and one add per step, and one read at the end. With a codec,
    its message in place of the add and a read of changes in place of the read: for k changed
    elements of n, 8 + min(4k, n/8) + 4k bytes (float32), or the parameters where that is less, as
    in the first step; momentum, one more read and write (the server's velocity), and v travels
    whole, with a codec too, as it moves every parameter; delay compensation, one more read;
    staleness_aware, 16 per step.

    Use: where workers differ in speed and nobody shall wait.

    Fields:
        momentum: μ, kept at the server (asynchronous MSGD); at least 0 and below 1.
        staleness_aware: divide the change by its staleness.
        delay_compensation: λ, at least 0; above 0 with plain SGD only.
        codec: how changes are written on the wire; None: as they are.

    Papers: Dean et al., "Large Scale Distributed Deep Networks", 2012; Zhang, Gupta, Lian, Liu,
    "Staleness-aware Async-SGD for Distributed Deep Learning", 2015; Zheng et al., "Asynchronous
    Stochastic Gradient Descent with Delay Compensation", 2017; Yan et al., "DGS: Dual-way Gradient
    Sparsification for Asynchronous Distributed Deep Learning", 2020 (what a codec's reads are,
    without its secondary compression).

    Example:
        fs.run("digits-mlp", fs.AsyncSGD(), workers=4)
    """

    name: ClassVar[str] = "async_sgd"
    shares_tensors: ClassVar[bool] = True
    momentum: float = 0.0
    staleness_aware: bool = False
    delay_compensation: float = 0.0
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_number("momentum", self.momentum, at_least=0, below=1)
        require_flag("staleness_aware", self.staleness_aware)
        require_number("delay_compensation", self.delay_compensation, at_least=0)

    @property
    def waits(self) -> bool:
        return False

    def require_optimizer(self, optimizer: Optimizer) -> None:
        if self.delay_compensation:
            _require_plain_sgd(optimizer)

    def init(self, worker: Worker) -> AsyncSGDState:
        comm, own = worker.comm, worker.flat.parameters
        velocity = comm.shared("velocity", torch.zeros_like(own)) if self.momentum else None
        clock = comm.shared("clock", torch.zeros_like(ONE)) if self.staleness_aware else None
        server = ParameterServer.of(worker, self.codec)
        return AsyncSGDState(server, velocity=velocity, clock=clock)

    def optimizer_step(self, worker: Worker, state: AsyncSGDState) -> None:
        server = state.server
        if not self.delay_compensation:
            worker.optimizer.step()
        with server.value.lock() if self._reads_first else server.value.changing():
            if self.delay_compensation:
                self._compensate(worker, server)
                worker.optimizer.step()
            self._push(state, server.change(worker))
            server.fetch(worker)

    @property
    def _reads_first(self) -> bool:
        """Whether a change depends on what is at the server, which must not change meanwhile."""
        return bool(self.momentum or self.staleness_aware or self.delay_compensation)

    def _compensate(self, worker: Worker, server: ParameterServer) -> None:
        gradients = worker.flat.gradients
        moved = server.value.read().to(gradients.device) - server.read
        gradients.addcmul_(gradients.square(), moved, value=self.delay_compensation)

    def _push(self, state: AsyncSGDState, change: Tensor) -> None:
        if state.clock is not None:
            now = int(state.clock.read())
            change /= max(1, now - state.read_at)
            state.clock.add(ONE)
            state.read_at = now + 1
        if state.velocity is None:
            state.server.push(change)
            return

        velocity = state.velocity.read().to(change.device).mul_(self.momentum)
        velocity += state.server.as_heard(change)
        state.velocity.write(velocity)
        state.server.value.add(velocity)

    def preview(self, worker: Worker, state: AsyncSGDState) -> Tensor:
        return state.server.preview(worker)

    def finish(self, worker: Worker, state: AsyncSGDState) -> None:
        state.server.finish(worker)


def _require_plain_sgd(optimizer: Optimizer | NodeOptimizer) -> None:
    """The change of plain SGD is −η times the gradient, whatever that is made of."""
    if isinstance(optimizer, NodeOptimizer):
        node = optimizer.node
        rule = "be known to be plain SGD for 'delay_compensation', as fs.numpy's own is"
        require(node.is_plain_sgd, "optimizer", rule, type(node).__name__)
        return
    unwanted = {
        f"{setting}={group[setting]}"
        for group in optimizer.param_groups
        for setting in ("momentum", "weight_decay")
        if group.get(setting)
    }
    name = type(optimizer).__name__
    require(
        type(optimizer) is SGD and not unwanted,
        "optimizer",
        "be SGD without momentum and weight decay for 'delay_compensation'",
        f"{name}({', '.join(sorted(unwanted))})",
    )
