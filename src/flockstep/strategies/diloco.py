"""An outer optimizer on what the workers have learned since they last met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from flockstep.codecs import Codec
from flockstep.fields import require_flag, require_integer, require_number
from flockstep.strategies._compressed import Averager, require_codec
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class DiLoCoState:
    start: Tensor  # θ, where all replicas stood after the last exchange, and the buffers
    outer: torch.optim.SGD  # of the parameters in `start`
    averager: Averager
    exchanged_at: int = 0


@dataclass(frozen=True)
class DiLoCo(Strategy[DiLoCoState]):
    """Every `period` steps the mean change of the workers is the gradient of an outer optimizer.

        Δ = (1/w) Σ_i (θ − x_i)
        m ← βm + Δ;   θ ← θ − ε(Δ + βm);   x_i ← θ

    outer_lr=1 and outer_momentum=0 equal LocalSGD. Statistics of batch normalisation are averaged,
    and travel as they are. At the end there is one more exchange, unless one has just taken place.

    Bytes: one all-reduce of parameters and buffers every `period` steps, or the codec's and one of
    the buffers.

    Use: with long periods, on links as slow as the internet; workers usually run AdamW.

    Fields:
        period: optimizer steps between exchanges (H in the paper).
        outer_lr: ε, the learning rate of the outer optimizer.
        outer_momentum: β, its momentum.
        nesterov: whether that is Nesterov's; False: θ ← θ − εm.
        codec: how changes of parameters are written on the wire; None: as they are.

    Paper: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
        2023.

    Example:
        fs.run("digits-mlp", fs.DiLoCo(period=8), workers=4)
    """

    name: ClassVar[str] = "diloco"
    codec_revision: ClassVar[int] = 1
    period: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_integer("period", self.period, 1)
        require_number("outer_lr", self.outer_lr, at_least=0)
        require_number("outer_momentum", self.outer_momentum, at_least=0, at_most=1)
        require_flag("nesterov", self.nesterov)
        require_codec(self.codec)

    def next_synchronisation(self, steps: int, total_steps: int | None) -> int | None:
        return -(-steps // self.period) * self.period

    def init(self, worker: Worker) -> DiLoCoState:
        start = worker.flat.state.clone()
        outer = torch.optim.SGD(
            [nn.Parameter(start[: worker.flat.count])],  # shares its memory
            lr=self.outer_lr,
            momentum=self.outer_momentum,
            nesterov=self.nesterov and self.outer_momentum > 0,
        )
        return DiLoCoState(start, outer, Averager.of(worker, self.codec, start))

    def after_step(self, worker: Worker, state: DiLoCoState) -> None:
        if worker.steps % self.period == 0:
            self._exchange(worker, state)

    def finish(self, worker: Worker, state: DiLoCoState) -> None:
        if state.exchanged_at != worker.steps:
            self._exchange(worker, state)

    def _exchange(self, worker: Worker, state: DiLoCoState) -> None:
        change = state.start - worker.flat.state
        state.averager.average(change)
        theta, count = state.outer.param_groups[0]["params"][0], worker.flat.count
        theta.grad = change[:count]
        state.outer.step()
        state.start[count:] -= change[count:]
        worker.flat.state.copy_(state.start)
        state.exchanged_at = worker.steps
