"""Momentum on the averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.codecs import Codec
from flockstep.fields import require_integer, require_number
from flockstep.optimizers import learning_rate
from flockstep.strategies._compressed import ReplicaAverager, require_codec
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class SlowMoState:
    start: Tensor  # x_0, where all replicas stood after the last exchange, and the buffers
    velocity: Tensor  # u
    replicas: ReplicaAverager
    rate: float = 1.0  # γ
    exchanged_at: int = 0


@dataclass(frozen=True)
class SlowMo(Strategy[SlowMoState]):
    """LocalSGD with a slow momentum over its averages.

        x̄ = (1/w) Σ_i x_i;   u ← βu + (x_0 − x̄)/γ;   x_0 ← x_0 − αγu;   x_i ← x_0
        with a codec:   x̄ = x_0 + (1/w) Σ_i C(x_i − x_0)

    γ is the current learning rate of the workers' optimizer, that of the last step before the
    exchange (of its first group of parameters). u is in units of gradients, so it outlives a change
    of the rate. Where the rate is 0 nothing has moved, and γ is the last one that was not, so that
    schedules may end there. slow_lr=1 and slow_momentum=0 equal LocalSGD. The optimizer's own state
    is kept. Statistics of batch normalisation are averaged. A codec carries what the
    parameters have changed by since the last exchange, where all replicas were equal (x_0), and
    statistics travel as they are; the slow momentum is over the mean.

    Bytes: one all-reduce of parameters and buffers every `period` steps, or the codec's and one of
    the buffers.

    Use: in LocalSGD's place where its accuracy falls behind.

    Fields:
        period: optimizer steps between exchanges (τ in the paper).
        slow_lr: α.
        slow_momentum: β.
        codec: how changes are written on the wire; None: parameters as they are.

    Paper: Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD
    with Slow Momentum", 2019.

    Example:
        fs.run("digits-mlp", fs.SlowMo(period=8), workers=4)
    """

    name: ClassVar[str] = "slowmo"
    codec_revision: ClassVar[int] = 1
    period: int
    slow_lr: float = 1.0
    slow_momentum: float = 0.5
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_integer("period", self.period, 1)
        require_number("slow_lr", self.slow_lr, above=0)
        require_number("slow_momentum", self.slow_momentum, at_least=0, at_most=1)

    def next_synchronisation(self, steps: int, total_steps: int | None) -> int | None:
        return -(-steps // self.period) * self.period

    @property
    def needs_rate(self) -> bool:
        return True

    def init(self, worker: Worker) -> SlowMoState:
        start, velocity = worker.flat.state.clone(), torch.zeros_like(worker.flat.parameters)
        return SlowMoState(start, velocity, ReplicaAverager.of(worker, self.codec))

    def after_step(self, worker: Worker, state: SlowMoState) -> None:
        state.rate = learning_rate(worker.optimizer) or state.rate
        if worker.steps % self.period == 0:
            self._exchange(worker, state)

    def finish(self, worker: Worker, state: SlowMoState) -> None:
        if state.exchanged_at != worker.steps:
            self._exchange(worker, state)

    def _exchange(self, worker: Worker, state: SlowMoState) -> None:
        mean, start, count = worker.flat.state, state.start, worker.flat.count
        state.replicas.average(worker)
        state.velocity.mul_(self.slow_momentum).add_(
            start[:count] - mean[:count], alpha=1 / state.rate
        )
        start[:count].sub_(state.velocity, alpha=self.slow_lr * state.rate)
        start[count:] = mean[count:]
        worker.flat.state.copy_(start)
        state.replicas.are_equal(start)
        state.exchanged_at = worker.steps
