"""All follow the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.comm import broadcast_from_first
from flockstep.fields import require_choice, require_integer
from flockstep.strategies._compressed import broadcast_message, memory_of, require_codec
from flockstep.strategies._ranking import SCORES, last_score, ranked
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class BestOnlyState:
    """For a codec: where all replicas stood after the last exchange, and what was not sent."""

    start: Tensor  # x₀
    memory: Memory


@dataclass(frozen=True)
class BestOnly(Strategy[BestOnlyState | None]):
    """All workers take the parameters of the one that did best on its last batch.

        x_i ← x_k,   k = argmin_j loss_j   (or argmax_j accuracy_j)
        with a codec:   x_i ← x₀ + C(x_k − x₀ + e_k),   e_k ← what that leaves out

    NoSync with best=1 and pull=1, without a codec. finish: the best once more, unless all have just
    become it.

    A codec carries what the best worker's parameters have changed by since the last exchange, where
    all replicas were equal (x₀). All become what the message says, the best one, too: it remembers
    what was left out, and adds it when it is the best again. Its statistics of batch normalisation
    travel as they are.

    Bytes: one number per worker and one broadcast of parameters and buffers every `period` steps,
    or of the codec's message, its length, 8, and the buffers.

    Use: as the extreme of the swarm in comparisons.

    Fields:
        period: optimizer steps between exchanges.
        score: what the best is chosen by, on the last batch: "loss", or "accuracy" (the paper's
            choice), passed as `worker.step(loss, accuracy=…)`; `fs.run` takes the task's metric on
            the batch, at the cost of another forward pass.
        codec: how the best worker's change is written on the wire; None: its parameters as they
            are.

    Paper: Isakov and Kinsy, "NoSync: Particle Swarm Inspired Distributed DNN Training", 2018 (their
        n=1, β=1).

    Example:
        fs.run("digits-mlp", fs.BestOnly(period=4), workers=4)
    """

    name: ClassVar[str] = "best_only"
    codec_revision: ClassVar[int] = 1
    period: int = 1
    score: str = "loss"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_integer("period", self.period, 1)
        require_choice("score", self.score, SCORES)

    @property
    def needs_accuracy(self) -> bool:
        return self.score == "accuracy"

    def next_synchronisation(self, steps: int, total_steps: int | None) -> int | None:
        return -(-steps // self.period) * self.period

    def init(self, worker: Worker) -> BestOnlyState | None:
        if self.codec is None:
            return None
        own = worker.flat.parameters
        return BestOnlyState(own.clone(), memory_of(worker, self.codec, own))

    def after_step(self, worker: Worker, state: BestOnlyState | None) -> None:
        if worker.steps % self.period == 0:
            self._follow_the_best(worker, state)

    def finish(self, worker: Worker, state: BestOnlyState | None) -> None:
        if worker.steps == 0 or worker.steps % self.period:
            self._follow_the_best(worker, state)

    def _follow_the_best(self, worker: Worker, state: BestOnlyState | None) -> None:
        comm = worker.comm
        best_first = ranked(comm, last_score(worker, self.score))
        if self.codec is None or state is None:
            broadcast_from_first(comm, worker.flat.state, best_first)
            return

        own, statistics = worker.flat.parameters, worker.flat.buffers
        codec, x0, memory = self.codec, state.start, state.memory
        _, message = broadcast_message(
            comm, lambda: codec.encode(own - x0, memory), best_first, x0.device
        )
        own.copy_(x0.add_(codec.decode(message, x0)))
        if statistics.numel():
            broadcast_from_first(comm, statistics, best_first)
