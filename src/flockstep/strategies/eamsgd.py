"""Elastic averaging with Nesterov momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.codecs import Codec
from flockstep.fields import require_choice, require_number
from flockstep.strategies._elastic import Centre, is_due, moving_rate, require_elastic
from flockstep.strategies.base import Strategy
from flockstep.strategies.easgd import MODES, pull

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class EAMSGDState:
    centre: Centre
    velocity: Tensor  # v
    position: Tensor  # x, while the model is ahead of it


@dataclass(frozen=True)
class EAMSGD(Strategy[EAMSGDState]):
    """EASGD whose workers take their own steps with Nesterov momentum.

        v_i ← δ v_i − η g(x_i + δ v_i)
        d_i = α(x_i − x̃);   x_i ← x_i + v_i − d_i;   x̃ ← x̃ + d_i
        with a codec:   C(d_i) in the place of d_i, on both sides

    d is that of the old x_i, every `period` steps, as in EASGD. momentum=0 equals EASGD in the same
    mode. −ηg stands for whatever change the worker's optimizer makes at the point ahead, so give it
    none of its own: plain SGD is the paper's. Between two steps the model in a loop stands ahead,
    at x_i + δ v_i, where the next gradient is taken; scores of replicas are those of x_i. finish:
    the centre. What a codec leaves out of d stays in the worker, as in EASGD.

    Bytes: those of EASGD in the same mode.

    Use: as EASGD, where momentum helps.

    Fields:
        period: optimizer steps between exchanges (τ in the paper).
        alpha: the moving rate α; None is 0.9/w, unless `rho` is given.
        rho: ρ of α = η_t·ρ, with the learning rate of that step. Not with alpha.
        momentum: δ, at least 0 and below 1.
        mode: "first_come": in the order in which workers come, which Wongpanich et al. mean by
            EA-MSGD; "round_robin": in turns; "sync": all at once.
        order: "printed", or "after_step": the pull is that of the parameters which the step has
            made.
        representative: which model stands for the run: the "centre", or of the replicas the "mean",
            the "best" or "any".
        codec: how d is written on the wire; None: as it is.

    Paper: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", 2015, Algorithm 2.

    Example:
        fs.run("digits-mlp", fs.EAMSGD(period=4, momentum=0.5), workers=4)
    """

    name: ClassVar[str] = "eamsgd"
    revision: ClassVar[int] = 1
    shares_tensors: ClassVar[bool] = True
    period: int
    alpha: float | None = None
    rho: float | None = None
    momentum: float = 0.9
    mode: str = "first_come"
    order: str = "printed"
    representative: str = "centre"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_elastic(
            self.period, self.alpha, self.rho, self.order, self.representative, self.codec
        )
        require_number("momentum", self.momentum, at_least=0, below=1)
        require_choice("mode", self.mode, MODES)

    @property
    def needs_rate(self) -> bool:
        return self.rho is not None

    @property
    def waits(self) -> bool:
        return self.mode != "first_come"

    def init(self, worker: Worker) -> EAMSGDState:
        own = worker.flat.parameters
        centre = Centre.of(worker, self.codec, is_shared=self.mode != "sync")
        return EAMSGDState(centre, torch.zeros_like(own), own.clone())

    def before_step(self, worker: Worker, state: EAMSGDState) -> None:
        state.position.copy_(worker.flat.parameters)
        worker.flat.parameters.add_(state.velocity, alpha=self.momentum)  # look ahead

    def optimizer_step(self, worker: Worker, state: EAMSGDState) -> None:
        parameters = worker.flat.parameters
        ahead = parameters.clone()
        worker.optimizer.step()  # now at x + δv − ηg, which is x + v
        state.velocity.mul_(self.momentum).add_(parameters - ahead)

        if is_due(worker, self.period, self.order):
            is_printed = self.order == "printed"
            x = self.replica(worker, state) if is_printed else worker.flat.state
            alpha = moving_rate(worker, self.alpha, self.rho, worker.comm.size)
            worker.flat.state.sub_(pull(state.centre, worker, x, alpha, self.mode))

    def replica(self, worker: Worker, state: EAMSGDState) -> Tensor:
        """x with the buffers: the model itself is ahead of it."""
        return torch.cat([state.position, worker.flat.buffers])

    def preview(self, worker: Worker, state: EAMSGDState) -> Tensor:
        own = self.replica(worker, state)
        return state.centre.preview(worker, own, self.representative)

    def finish(self, worker: Worker, state: EAMSGDState) -> None:
        if state.centre.shared is not None:
            state.centre.shared.retire()  # nobody waits for this worker's turn
        worker.flat.state.copy_(self.preview(worker, state))
