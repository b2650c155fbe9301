"""Averaging parameters at intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from flockstep.codecs import Codec
from flockstep.fields import require_choice, require_integer
from flockstep.optimizers import average_state, reset_state
from flockstep.strategies._compressed import Averager, require_codec
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class LocalSGDState:
    averager: Averager
    start: Tensor | None  # where all replicas stood after the last average, for a codec
    averaged_at: int = 0  # the step after which replicas were last equal


@dataclass(frozen=True)
class LocalSGD(Strategy[LocalSGDState]):
    """Take `period` steps alone, then average the parameters of all workers.

        after steps k, 2k, 3k, …:   x_i ← (1/w) Σ_j x_j
        with a codec:               x_i ← x₀ + (1/w) Σ_j (x_j − x₀)

    Period 1 with plain SGD equals SyncSGD. At the end the replicas are averaged once more, unless
    they just were. Statistics of batch normalisation are averaged with the parameters. A codec
    carries what the parameters have changed by since the last average, where all replicas were
    equal (x₀); statistics travel as they are.

    Bytes: one all-reduce of parameters and buffers every `period` steps, or the codec's and one of
    the buffers; with momentum="average" also one of the optimizer's state.

    Use: on a network too slow for an exchange at every step.

    Fields:
        period: optimizer steps between averages; None averages only at the end (one-shot
            averaging).
        momentum: what happens to the optimizer's state at an average: "keep" the worker's own,
            "reset" it as if the optimizer were new, or "average" it over the workers too.
        codec: how changes are written on the wire; None: parameters as they are.

    Papers: Stich, "Local SGD Converges Fast and Communicates Little", 2018; McMahan et al., 2017;
    Zinkevich et al., "Parallelized Stochastic Gradient Descent", 2010 (one-shot). They stop at
    plain SGD; Lin et al. 2018 keep local momentum, Yu et al. 2019 analyse both averaging and
    resetting it.

    Example:
        fs.run("digits-mlp", fs.LocalSGD(period=8), workers=4)
    """

    name: ClassVar[str] = "local_sgd"
    codec_revision: ClassVar[int] = 1
    period: int | None
    momentum: str = "keep"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        if self.period is not None:
            require_integer("period", self.period, 1)
        require_choice("momentum", self.momentum, ("keep", "reset", "average"))
        require_codec(self.codec)

    def next_synchronisation(self, steps: int, total_steps: int | None) -> int | None:
        return None if self.period is None else -(-steps // self.period) * self.period

    def init(self, worker: Worker) -> LocalSGDState:
        start = None if self.codec is None else worker.flat.state.clone()
        return LocalSGDState(Averager.of(worker, self.codec, worker.flat.state), start)

    def after_step(self, worker: Worker, state: LocalSGDState) -> None:
        if self.period is None or worker.steps % self.period:
            return
        self._average(worker, state)
        if self.momentum == "reset":
            reset_state(worker.optimizer)
        elif self.momentum == "average":
            average_state(worker.optimizer, worker.comm)

    def finish(self, worker: Worker, state: LocalSGDState) -> None:
        if state.averaged_at != worker.steps:
            self._average(worker, state)

    def _average(self, worker: Worker, state: LocalSGDState) -> None:
        own = worker.flat.state
        if state.start is None:
            state.averager.average(own)
        else:
            state.averager.average(own.sub_(state.start))  # the change since the last average
            own.copy_(state.start.add_(own))
        state.averaged_at = worker.steps
