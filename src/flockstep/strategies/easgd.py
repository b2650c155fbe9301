"""Elastic averaging SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from flockstep.codecs import Codec
from flockstep.fields import require_choice
from flockstep.strategies._elastic import Centre, is_due, moving_rate, require_elastic
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker

MODES = ("round_robin", "first_come", "sync")


def pull(centre: Centre, worker: Worker, x: Tensor, alpha: float, mode: str) -> Tensor:
    """d = α(x − x̃);  x̃ ← x̃ + d, at the same old values. Return d; with a codec, C(d) for d."""
    if centre.shared is None:  # sync: x̃ ← x̃ + Σ_k d_k, by all workers alike
        assert centre.alike is not None
        d = alpha * (x - centre.alike)
        return centre.add_of_all(worker, d)

    with centre.shared.lock(in_turn=mode == "round_robin"):
        if centre.codec is None:
            old_centre = centre.shared.blend(x, alpha)  # x̃ ← x̃ + α(x − x̃)
            return alpha * (x - old_centre.to(x.device))
        return centre.add(alpha * (x - centre.read().to(x.device)))


@dataclass(frozen=True)
class EASGD(Strategy[Centre]):
    """Workers and a centre pull at each other every `period` steps.

        d_i = α(x_i − x̃);   x_i ← x_i − η g(x_i) − d_i;   x̃ ← x̃ + d_i
        sync, all at once:   x̃ ← x̃ + Σ_k d_k = (1 − wα) x̃ + wα · (1/w) Σ_k x_k
        with a codec:        C(d_i) in the place of d_i, on both sides

    All right-hand sides are at the old values: the pull is that of the parameters at which the
    gradient was taken. With another optimizer than plain SGD its change takes the place of −ηg. The
    pull falls in the step that follows kτ completed steps, k = 0, 1, 2, …, τ the period. finish:
    the centre. Statistics of batch normalisation follow the same rule as the parameters.

    A worker loses just what the centre gains. So what a codec leaves out of d stays in the worker,
    and is a part of its next d: there is no other memory. A codec that is right on average only,
    E|C(d)|² = τ|d|², as QSGD, wants α < 1/τ, or the noise grows.

    Bytes: round_robin and first_come, one blend (there and back) per worker and exchange, and one
    read at the end; sync, one all-reduce. With a codec a blend is a read of what has
    changed of the centre, as AsyncSGD reads, and one message; sync, an all-gather of messages.

    Use: where workers shall explore around a common centre; "round_robin" as the baseline of
        EAWild.

    Fields:
        period: optimizer steps between exchanges (τ in the paper).
        alpha: the moving rate α; None is 0.9/w, the paper's choice, unless `rho` is given.
        rho: ρ of α = η_t·ρ, with the learning rate of that step (of the first group of
            parameters): the pull follows warm-up and decay; above α = 1 it overshoots. Not with
            alpha.
        mode: "round_robin": workers hold the lock in turns, in rank order; "first_come": in the
            order in which they come (asynchronous EASGD); "sync": all at once.
        order: "printed", or "after_step": the pull is that of the parameters which the step has
            made, after steps τ, 2τ, …; what many public codes do.
        representative: which model stands for the run: the "centre", or of the replicas the "mean",
            the "best" or "any".
        codec: how d is written on the wire; None: as it is.

    Paper: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", 2015. Round robin
    is the form in which You et al. and Wongpanich et al. (2020) run it as "original EASGD".

    Example:
        fs.run("digits-mlp", fs.EASGD(period=4), workers=4)
    """

    name: ClassVar[str] = "easgd"
    revision: ClassVar[int] = 1
    shares_tensors: ClassVar[bool] = True
    period: int
    alpha: float | None = None
    rho: float | None = None
    mode: str = "round_robin"
    order: str = "printed"
    representative: str = "centre"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_elastic(
            self.period, self.alpha, self.rho, self.order, self.representative, self.codec
        )
        require_choice("mode", self.mode, MODES)

    @property
    def needs_rate(self) -> bool:
        return self.rho is not None

    @property
    def waits(self) -> bool:
        return self.mode != "first_come"

    def init(self, worker: Worker) -> Centre:
        return Centre.of(worker, self.codec, is_shared=self.mode != "sync")

    def optimizer_step(self, worker: Worker, state: Centre) -> None:
        if not is_due(worker, self.period, self.order):
            worker.optimizer.step()
            return
        x = worker.flat.state
        old = x.clone() if self.order == "printed" else x
        worker.optimizer.step()
        alpha = moving_rate(worker, self.alpha, self.rho, worker.comm.size)
        x.sub_(pull(state, worker, old, alpha, self.mode))

    def preview(self, worker: Worker, state: Centre) -> Tensor:
        return state.preview(worker, worker.flat.state, self.representative)

    def finish(self, worker: Worker, state: Centre) -> None:
        if state.shared is not None:
            state.shared.retire()  # nobody waits for this worker's turn
        worker.flat.state.copy_(self.preview(worker, state))
