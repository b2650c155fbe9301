"""Synchronous at first, averaging at intervals later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flockstep.codecs import Codec
from flockstep.errors import InvalidField
from flockstep.fields import require, require_integer, require_number
from flockstep.strategies._compressed import Averager, ReplicaAverager, require_codec
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class PostLocalSGDState:
    gradients: Averager
    replicas: ReplicaAverager
    averaged_at: int | None = None


@dataclass(frozen=True)
class PostLocalSGD(Strategy[PostLocalSGDState]):
    """SyncSGD until step s, LocalSGD from there.

        steps 1 … s:                  g_i ← (1/w) Σ_j g_j
        after steps s+k, s+2k, …:     x_i ← (1/w) Σ_j x_j
        with a codec:                 g_i ← (1/w) Σ_j C(g_j);   x_i ← x₀ + (1/w) Σ_j C(x_j − x₀)

    A codec carries gradients before the switch, and after it what parameters have changed by since
    the replicas were last equal (x₀), each with its own memory of what was not sent. Gradients not
    sent before the switch stay unsent. Statistics of batch normalisation are first averaged after
    the switch, and travel as they are.

    Bytes: one all-reduce of the gradients per step until the switch; then one of parameters and
    buffers every `period` steps; one at the end, unless the replicas were just averaged. Or the
    codec's in place of those of gradients and parameters.

    Use: where LocalSGD from the start costs accuracy.

    Fields:
        switch_at: s, a number of steps (int), or a fraction of all steps of `worker.batches`
            (float, 0 to 1).
        period: k, optimizer steps between averages after the switch.
        codec: how gradients and changes are written on the wire; None: gradients and parameters as
            they are.

    Paper: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", 2018.

    Example:
        fs.run("digits-mlp", fs.PostLocalSGD(switch_at=0.25, period=8), workers=4)
    """

    name: ClassVar[str] = "post_local_sgd"
    revision: ClassVar[int] = 1
    codec_revision: ClassVar[int] = 1
    switch_at: int | float
    period: int
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_number("switch_at", self.switch_at)
        if isinstance(self.switch_at, int):
            require_integer("switch_at", self.switch_at, 0)
        else:
            require(
                0 <= self.switch_at <= 1,
                "switch_at",
                "be between 0 and 1, or a whole number",
                self.switch_at,
            )
        require_integer("period", self.period, 1)

    @property
    def needs_length(self) -> bool:
        return not isinstance(self.switch_at, int)

    def next_synchronisation(self, steps: int, total_steps: int | None) -> int | None:
        switch = self.switch_at
        if not isinstance(switch, int):
            if total_steps is None:
                return None
            switch = round(switch * total_steps)
        since = max(0, steps - switch)
        return steps - since + -(-since // self.period) * self.period

    def init(self, worker: Worker) -> PostLocalSGDState:
        gradients = Averager.of(worker, self.codec, worker.flat.gradients)
        return PostLocalSGDState(gradients, ReplicaAverager.of(worker, self.codec, stream=1))

    def on_gradients(self, worker: Worker, state: PostLocalSGDState) -> None:
        if worker.steps < self._switch(worker):
            state.gradients.average(worker.flat.gradients)

    def after_step(self, worker: Worker, state: PostLocalSGDState) -> None:
        since = worker.steps - self._switch(worker)
        if since <= 0:
            state.replicas.are_equal(worker.flat.parameters)
        elif since % self.period == 0:
            self._average(worker, state)

    def finish(self, worker: Worker, state: PostLocalSGDState) -> None:
        if state.averaged_at != worker.steps:
            self._average(worker, state)

    def _average(self, worker: Worker, state: PostLocalSGDState) -> None:
        state.replicas.average(worker)
        state.averaged_at = worker.steps

    def _switch(self, worker: Worker) -> int:
        if isinstance(self.switch_at, int):
            return self.switch_at
        if worker.total_steps is None:
            raise InvalidField(
                "'switch_at' must be a number of steps where batches do not come from "
                f"worker.batches (got {self.switch_at!r})"
            )
        return round(self.switch_at * worker.total_steps)
