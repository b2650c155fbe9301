"""Lock-free updates of shared parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from flockstep.codecs import Codec
from flockstep.comm import handle
from flockstep.strategies._compressed import require_codec
from flockstep.strategies._parameter_server import ParameterServer
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class HogwildState:
    server: ParameterServer

    is_direct: bool = handle()  # whether the model's parameters are the shared memory itself


@dataclass(frozen=True)
class Hogwild(Strategy[HogwildState]):
    """Read the shared parameters, compute, add the change; no lock.

        x ← x − η g(x_read)       by whoever comes, whenever it comes
        with a codec:             x ← x + C(e − η g(x_read)),   e ← what that leaves out

    On local processes the model's parameters *are* the shared pages: every worker computes on what
    the others are just changing, and updates may tear or be lost, as in the paper. A model with
    statistics of batch normalisation, which are each worker's own, reads and adds there too. With
    another optimizer than plain SGD its change takes the place of −ηg. Changes of all workers add
    up, so many workers want a smaller learning rate. finish: the shared parameters.

    With a codec nobody computes on shared pages: changes are encoded and added, and only elements
    that have changed are read. What is not sent when the training ends, e, stays unsent: no
    gradient has seen it.

    Bytes: one read of the parameters and one add per step (as many are counted where they are
    shared pages), and one read at the end; with a codec, per step its message and a read of
    changes, as AsyncSGD.

    Use: on one machine with many cores.

    Fields:
        codec: how changes are written on the wire; None: as they are.

    Paper: Niu, Recht, Ré, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic
        Gradient Descent", 2011.

    Example:
        fs.run("digits-mlp", fs.Hogwild(), workers=4)
    """

    name: ClassVar[str] = "hogwild"
    revision: ClassVar[int] = 1
    shares_tensors: ClassVar[bool] = True
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)

    @property
    def waits(self) -> bool:
        return False

    def init(self, worker: Worker) -> HogwildState:
        server = ParameterServer.of(worker, self.codec)
        pages = server.value.pages()
        is_direct = (
            pages is not None
            and self.codec is None
            and worker.flat.state.device.type == "cpu"
            and not worker.flat.buffers.numel()
        )
        if pages is not None and is_direct:
            worker.flat.live_in(pages)
        return HogwildState(server, is_direct=is_direct)

    def before_step(self, worker: Worker, state: HogwildState) -> None:
        if state.is_direct:
            worker.comm.meter.count(worker.flat.parameters.nbytes)
        else:
            state.server.fetch(worker)

    def after_step(self, worker: Worker, state: HogwildState) -> None:
        if state.is_direct:
            worker.comm.meter.count(worker.flat.parameters.nbytes)
        else:
            state.server.push(state.server.change(worker))

    def preview(self, worker: Worker, state: HogwildState) -> Tensor:
        return state.server.preview(worker)

    def finish(self, worker: Worker, state: HogwildState) -> None:
        state.server.finish(worker)
