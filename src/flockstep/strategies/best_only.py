"""All follow the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flockstep.comm import broadcast_from_first
from flockstep.fields import require_choice, require_integer
from flockstep.strategies._ranking import SCORES, last_score, ranked
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass(frozen=True)
class BestOnly(Strategy[None]):
    """All workers take the parameters of the one that did best on its last batch.

        x_i ← x_k,   k = argmin_j loss_j   (or argmax_j accuracy_j)

    NoSync with best=1 and pull=1. finish: the best once more, unless all have just become it.

    Bytes: one number per worker and one broadcast of parameters and buffers every `period` steps.

    Use: as the extreme of the swarm in comparisons.

    Fields:
        period: optimizer steps between exchanges.
        score: what the best is chosen by, on the last batch: "loss", or "accuracy" (the paper's
            choice), passed as `worker.step(loss, accuracy=…)`; `fs.run` takes the task's metric on
            the batch, at the cost of another forward pass.

    Paper: Isakov and Kinsy, "NoSync: Particle Swarm Inspired Distributed DNN Training", 2018 (their
        n=1, β=1).

    Example:
        fs.run("digits-mlp", fs.BestOnly(period=4), workers=4)
    """

    name: ClassVar[str] = "best_only"
    period: int = 1
    score: str = "loss"

    def __post_init__(self) -> None:
        require_integer("period", self.period, 1)
        require_choice("score", self.score, SCORES)

    @property
    def needs_accuracy(self) -> bool:
        return self.score == "accuracy"

    def next_synchronisation(self, steps: int, total_steps: int | None) -> int | None:
        return -(-steps // self.period) * self.period

    def after_step(self, worker: Worker, state: None) -> None:
        if worker.steps % self.period == 0:
            self._follow_the_best(worker)

    def finish(self, worker: Worker, state: None) -> None:
        if worker.steps == 0 or worker.steps % self.period:
            self._follow_the_best(worker)

    def _follow_the_best(self, worker: Worker) -> None:
        best_first = ranked(worker.comm, last_score(worker, self.score))
        broadcast_from_first(worker.comm, worker.flat.state, best_first)
