"""Elastic averaging SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from flockstep.fields import require_choice, require_integer
from flockstep.strategies._elastic import Centre, moving_rate, require_alpha
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class EASGDState:
    # Shared (round_robin), or the same on every worker and moved alike (sync).
    centre: Centre | Tensor


@dataclass(frozen=True)
class EASGD(Strategy[EASGDState]):
    """Workers and a centre pull at each other every `period` steps.

        round_robin, in rank order:   d = α(x_i − x̃);     x_i ← x_i − d;     x̃ ← x̃ + d
        sync, all at once:            d_i = α(x_i − x̃);   x_i ← x_i − d_i;   x̃ ← x̃ + Σ_k d_k

    In turns a worker holds the lock; at once, both sides are computed from the old values.
    finish: the centre. Statistics of batch normalisation follow the same rule as the parameters.

    Bytes: round_robin, one blend (there and back) per worker and exchange, and one read at the end;
        sync, one all-reduce.

    Use: where workers shall explore around a common centre; "round_robin" as the baseline of
        EAWild.

    Fields:
        period: optimizer steps between exchanges (τ in the paper).
        alpha: the moving rate α = η·ρ; None is 0.9/w, the paper's choice.
        mode: "round_robin" or "sync".

    Paper: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", 2015. Round robin
    is the form in which You et al. and Wongpanich et al. (2020) run it as "original EASGD".

    Example:
        fs.run("digits-mlp", fs.EASGD(period=4), workers=4)
    """

    name: ClassVar[str] = "easgd"
    period: int
    alpha: float | None = None
    mode: str = "round_robin"

    def __post_init__(self) -> None:
        require_integer("period", self.period, 1)
        require_alpha(self.alpha)
        require_choice("mode", self.mode, ("round_robin", "sync"))

    def init(self, worker: Worker) -> EASGDState:
        if self.mode == "sync":
            return EASGDState(worker.flat.state.clone())
        return EASGDState(Centre.of(worker, self.alpha, worker.comm.size))

    def after_step(self, worker: Worker, state: EASGDState) -> None:
        if worker.steps % self.period:
            return
        if isinstance(state.centre, Tensor):
            self._pull_together(worker, state.centre)
        else:
            with state.centre.value.lock(in_turn=True):
                state.centre.pull(worker)

    def _pull_together(self, worker: Worker, centre: Tensor) -> None:
        pull = (worker.flat.state - centre).mul_(moving_rate(self.alpha, worker.comm.size))
        worker.flat.state.sub_(pull)
        # A sum, so that nobody needs to know how many took part.
        centre.add_(worker.comm.all_reduce(pull))

    def preview(self, worker: Worker, state: EASGDState) -> Tensor:
        if isinstance(state.centre, Tensor):
            return state.centre.clone()
        return state.centre.preview(worker)

    def finish(self, worker: Worker, state: EASGDState) -> None:
        if isinstance(state.centre, Tensor):
            worker.flat.state.copy_(state.centre)
        else:
            state.centre.value.retire()
            state.centre.become(worker)
