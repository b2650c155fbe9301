"""Averaging at intervals that shrink as the loss does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from flockstep.codecs import Codec
from flockstep.fields import require_integer, require_number
from flockstep.optimizers import learning_rate
from flockstep.strategies._compressed import ReplicaAverager, require_codec
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class AdaCommState:
    replicas: ReplicaAverager
    period: int
    interval_ends: float
    averaged_at: int = 0
    losses: float = 0.0  # summed since the last average
    first_loss: float = 0.0  # F_0, and the learning rate then: those of the first average
    first_rate: float = 0.0
    last_rate: float = 0.0  # at the last decision, or at the first average


@dataclass(frozen=True)
class AdaComm(Strategy[AdaCommState]):
    """LocalSGD whose period follows the loss: rare averages at first, when progress is fast,
    frequent ones later.

        at each interval of time:   τ_j = ⌈ √(η_0 F_j / (η_j F_0)) · τ_0 ⌉
        if η_j = η_{j−1} and this does not shrink:   τ_j = τ_{j−1}/2, at least 1
        after τ_j steps:            x_i ← (1/w) Σ_k x_k
        with a codec:               x_i ← x₀ + (1/w) Σ_k C(x_k − x₀)

    F is the training loss: the mean over the workers and the steps since the last average. F_0 and
    η_0 are those of the first average. τ_0 stands outside the root. τ/2 is rounded down.

    The period is halved only while the learning rate stands. After a change of the rate the
    formula's value is taken as it is, and may be larger than the period before: with a rate that
    has fallen, replicas drift apart more slowly. That is our reading: the paper gives the rule for
    a change of the rate apart from that for a loss which does not fall.

    All workers decide alike, at averages, from the mean of their losses and clocks. A codec carries
    what the parameters have changed by since the last average, where all replicas were equal (x₀);
    statistics of batch normalisation, F and clocks travel as they are.

    Bytes: every τ_j steps one all-reduce of parameters and buffers, or the codec's and one of the
    buffers, and one of two numbers; one at the end.

    Use: to have LocalSGD's speed early and SyncSGD's accuracy late, without choosing a period.

    Fields:
        initial_period: τ_0.
        interval_seconds: time between decisions, virtual in the simulator.
        codec: how changes are written on the wire; None: parameters as they are.

    Paper: Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime
    Trade-off in Local-Update SGD", 2018.

    Example:
        fs.run("digits-mlp", fs.AdaComm(initial_period=16, interval_seconds=0.5), workers=4)
    """

    name: ClassVar[str] = "adacomm"
    revision: ClassVar[int] = 1
    codec_revision: ClassVar[int] = 1
    initial_period: int
    interval_seconds: float
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_integer("initial_period", self.initial_period, 1)
        require_number("interval_seconds", self.interval_seconds, above=0)

    @property
    def needs_rate(self) -> bool:
        return True

    def init(self, worker: Worker) -> AdaCommState:
        replicas = ReplicaAverager.of(worker, self.codec)
        return AdaCommState(
            replicas, self.initial_period, self.interval_seconds, averaged_at=worker.steps
        )

    def after_step(self, worker: Worker, state: AdaCommState) -> None:
        state.losses += worker.loss
        steps = worker.steps - state.averaged_at
        if steps < state.period:
            return
        self._average(worker, state)
        told = torch.tensor([state.losses / steps, worker.comm.now()], dtype=torch.float64)
        loss, now = worker.comm.all_reduce(told, op="mean").tolist()
        state.losses = 0.0
        rate = learning_rate(worker.optimizer)
        if not state.first_rate:
            state.first_loss, state.first_rate, state.last_rate = loss, rate, rate
        if now >= state.interval_ends:
            state.period = self._next_period(state, loss, rate)
            while now >= state.interval_ends:
                state.interval_ends += self.interval_seconds

    def _next_period(self, state: AdaCommState, loss: float, rate: float) -> int:
        rate_stands, state.last_rate = rate == state.last_rate, rate
        halved = max(1, state.period // 2)
        divisor = rate * state.first_loss
        ratio = state.first_rate * loss / divisor if divisor else math.inf
        if not math.isfinite(ratio):
            return halved  # the formula has no value

        wished = max(1, math.ceil(math.sqrt(max(0.0, ratio)) * self.initial_period))
        return halved if rate_stands and wished >= state.period else wished

    def finish(self, worker: Worker, state: AdaCommState) -> None:
        if state.averaged_at != worker.steps:
            self._average(worker, state)

    def _average(self, worker: Worker, state: AdaCommState) -> None:
        state.replicas.average(worker)
        state.averaged_at = worker.steps
