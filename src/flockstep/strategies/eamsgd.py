"""Elastic averaging with Nesterov momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.fields import require_integer, require_number
from flockstep.strategies._elastic import Centre, require_alpha
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class EAMSGDState:
    centre: Centre
    velocity: Tensor  # v


@dataclass(frozen=True)
class EAMSGD(Strategy[EAMSGDState]):
    """EASGD in turns, whose workers take their own steps with Nesterov momentum.

        every step, with the gradient of the point ahead:   v ← δv − η g(x + δv);   x ← x + v
        every `period` steps, in rank order:   d = α(x_i − x̃);   x_i ← x_i − d;   x̃ ← x̃ + d

    momentum=0 equals EASGD. −ηg stands for whatever change the worker's optimizer makes at the
    point ahead, so give it none of its own: plain SGD is the paper's. finish: the centre.

    Bytes: one blend (there and back) per worker and exchange, and one read at the end.

    Use: as EASGD, where momentum helps.

    Fields:
        period: optimizer steps between exchanges (τ in the paper).
        alpha: the moving rate; None is 0.9/w.
        momentum: δ, at least 0 and below 1.

    Paper: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", 2015.

    Example:
        fs.run("digits-mlp", fs.EAMSGD(period=4, momentum=0.5), workers=4)
    """

    name: ClassVar[str] = "eamsgd"
    period: int
    alpha: float | None = None
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require_integer("period", self.period, 1)
        require_alpha(self.alpha)
        require_number("momentum", self.momentum, at_least=0, below=1)

    def init(self, worker: Worker) -> EAMSGDState:
        return EAMSGDState(
            Centre.of(worker, self.alpha, worker.comm.size),
            torch.zeros_like(worker.flat.parameters),
        )

    def before_step(self, worker: Worker, state: EAMSGDState) -> None:
        worker.flat.parameters.add_(state.velocity, alpha=self.momentum)  # look ahead

    def optimizer_step(self, worker: Worker, state: EAMSGDState) -> None:
        ahead = worker.flat.parameters.clone()
        worker.optimizer.step()  # now at x + δv − ηg, which is x + v
        state.velocity.mul_(self.momentum).add_(worker.flat.parameters - ahead)

    def after_step(self, worker: Worker, state: EAMSGDState) -> None:
        if worker.steps % self.period == 0:
            with state.centre.value.lock(in_turn=True):
                state.centre.pull(worker)

    def preview(self, worker: Worker, state: EAMSGDState) -> Tensor:
        return state.centre.preview(worker)

    def finish(self, worker: Worker, state: EAMSGDState) -> None:
        state.centre.value.retire()
        state.centre.become(worker)
