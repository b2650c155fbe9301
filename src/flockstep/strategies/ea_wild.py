"""Elastic averaging with no lock and no turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from flockstep.codecs import Codec
from flockstep.fields import require, require_choice, require_integer
from flockstep.strategies._elastic import CENTRE, Centre, is_due, moving_rate, require_elastic
from flockstep.strategies._groups import AdjacentGroup, RandomGroup
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


def pull(worker: Worker, centre: Centre, x: Tensor, alpha: float) -> None:
    """d = α(x − x̃);  x̃ ← x̃ + d, whatever others do meanwhile; and the worker loses d, or what a
    codec has made of it.
    """
    d = alpha * (x - centre.read().to(x.device))
    worker.flat.state.sub_(centre.add(d))


@dataclass
class EAWildState:
    centre: Centre
    group: AdjacentGroup | RandomGroup | None  # of this worker


@dataclass(frozen=True)
class EAWild(Strategy[EAWildState]):
    """The elastic pull of EASGD, by whoever comes, whenever it comes.

        d_i = α(x_i − x̃);   x_i ← x_i − η g(x_i) − d_i;   x̃ ← x̃ + d_i      no lock, no turns
        with a codec:   C(d_i) in the place of d_i, on both sides

    All right-hand sides are at the old values, as in EASGD; x̃ is read without a lock, and between
    that and the moment at which d arrives other workers' changes may land. With another optimizer
    than plain SGD its change takes the place of −ηg. The pull falls in the step that follows kτ
    completed steps, k = 0, 1, 2, …, τ the period. finish: the centre.

    With `groups`, the workers of a group average their gradients every step, and one delegate pulls
    and then broadcasts its parameters inside the group; another one, if it is lost.

    A codec carries d; of the centre only elements are read that have changed since this worker's
    last read. What the codec leaves out of d stays in the worker,
    and is a part of its next d: there is no other memory. With groups, what is sent inside a group
    travels as it is: its links are the fast ones.

    Bytes: one read and one add per exchange, or the codec's message and a read of changes, as
    AsyncSGD, by every worker or by one of
    each group; with groups also an all-reduce of the gradients per step and a broadcast per
    exchange inside the group, of the optimizer's state, too, where groups are drawn anew; one read
    at the end.

    Use: where workers differ in speed, on a machine or a fast network.

    Fields:
        period: optimizer steps between exchanges.
        alpha: the moving rate α; None is 0.9 / (number of workers or groups that pull), unless
            `rho` is given.
        rho: ρ of α = η_t·ρ, with the learning rate of that step (of the first group of
            parameters); above α = 1 a pull overshoots. Not with alpha.
        groups: into how many equal groups the workers are divided; None: no groups.
        grouping: who is in one group: neighbours in rank ("adjacent"), or at each exchange others,
            drawn anew ("random"), to whom the delegate brings its parameters and its optimizer's
            state. Only with `groups`. Random groups cannot go on without a lost worker.
        delegate: who pulls for its group, its "first" worker that is there or a "random" one each
            time.
        order: "printed", or "after_step": the pull is that of the parameters which the step has
            made, after steps τ, 2τ, …
        representative: which model stands for the run: the "centre", or of the replicas the "mean",
            the "best" or "any". ("first" and "random" are taken for `delegate`, which was called
            so.)
        codec: how d is written on the wire; None: as it is.

    Paper: Wongpanich, You, Demmel, "Rethinking the Value of Asynchronous Solvers for Distributed
        Deep Learning", 2020.

    Example:
        fs.run("digits-mlp", fs.EAWild(period=4), workers=4)
    """

    name: ClassVar[str] = "ea_wild"
    revision: ClassVar[int] = 1
    shares_tensors: ClassVar[bool] = True
    period: int = 1
    alpha: float | None = None
    rho: float | None = None
    groups: int | None = None
    grouping: str = "adjacent"
    delegate: str = "first"
    order: str = "printed"
    representative: str = "centre"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        if self.representative in ("first", "random"):
            object.__setattr__(self, "delegate", self.representative)
            object.__setattr__(self, "representative", CENTRE)
        require_elastic(
            self.period, self.alpha, self.rho, self.order, self.representative, self.codec
        )
        if self.groups is not None:
            require_integer("groups", self.groups, 1)
        require_choice("grouping", self.grouping, ("adjacent", "random"))
        require_choice("delegate", self.delegate, ("first", "random"))

    @property
    def needs_rate(self) -> bool:
        return self.rho is not None

    @property
    def waits(self) -> bool:
        return self.groups is not None

    def optimizer_step(self, worker: Worker, state: EAWildState) -> None:
        if not is_due(worker, self.period, self.order):
            worker.optimizer.step()
            return
        x = worker.flat.state
        old = x.clone() if self.order == "printed" else x
        worker.optimizer.step()

        alpha = moving_rate(worker, self.alpha, self.rho, self.groups or worker.comm.size)
        if state.group is None:
            pull(worker, state.centre, old, alpha)
        else:
            state.group.exchange(worker, lambda: pull(worker, state.centre, old, alpha))

    # --- groups -----------------------------------------------------------------------------------

    def init(self, worker: Worker) -> EAWildState:
        comm = worker.comm
        group: AdjacentGroup | RandomGroup | None = None
        if self.groups is not None:
            divides = comm.size % self.groups == 0
            require(divides, "groups", f"divide the number of workers, {comm.size}", self.groups)
            kind = AdjacentGroup if self.grouping == "adjacent" else RandomGroup
            group = kind.of(comm, self.groups, self.delegate)
        return EAWildState(Centre.of(worker, self.codec), group)

    def on_gradients(self, worker: Worker, state: EAWildState) -> None:
        if state.group is not None:
            state.group.average(worker.flat.gradients)

    def preview(self, worker: Worker, state: EAWildState) -> Tensor:
        return state.centre.preview(worker, worker.flat.state, self.representative)

    def finish(self, worker: Worker, state: EAWildState) -> None:
        worker.flat.state.copy_(self.preview(worker, state))
