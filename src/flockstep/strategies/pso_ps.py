"""Particle swarm optimisation between steps of SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.codecs import Codec
from flockstep.comm import broadcast_from_first
from flockstep.errors import InvalidField
from flockstep.fields import (
    require,
    require_choice,
    require_integer,
    require_number,
)
from flockstep.randomness import Purpose, torch_stream
from flockstep.strategies._compressed import PublicCopies, broadcast_message, require_codec
from flockstep.strategies._ranking import last_score, ranked
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


SWARM_BEST = 0  # the name of the one public copy


@dataclass
class PSOPSState:
    velocity: Tensor  # v
    best: Tensor  # pBest: where this worker's loss was lowest so far
    draw: torch.Generator
    public: PublicCopies | None = None  # for a codec: one copy, of whoever was gBest
    best_loss: float = math.inf


@dataclass(frozen=True)
class PSOPS(Strategy[PSOPSState]):
    """Workers are particles: every `period`-th step moves them as a swarm, in place of the
    optimizer.

        t mod period = 0:   v_i ← m·v_i + (1/λ)[c1·r1·(pBest_i − x_i) + c2·r2·(gBest − x_i)]
                            x_i ← x_i + v_i
        otherwise:          the optimizer's step
        m = m_max − t (m_max − m_min)/t_max,   λ the epoch 1 … E,   r1, r2 uniform in (0, 1)
        with a codec:   x̂ ← x̂ + C(gBest − x̂) in the place of gBest

    gBest is the worker with the lowest loss on its current batch, pBest_i where worker i's own was
    lowest so far. All start equal, with v = 0. Statistics of batch normalisation stay each
    worker's own. finish: gBest, by the loss of the parameters that are returned: each worker looks
    at its last batch once more. In a loop of your own say how, `worker.step(loss, again=lambda:
    cross_entropy(model(x), y))`; else the loss from before the last step decides.

    The equations with λ are a reconstruction from the paper's prose ("the random factor decays;
    local and global search weaken"; its table's cell for λ is damaged: "epoch-size", and the text
    has it run from 1 "to adjust the offset of parameters"); `decay` says what 1/λ multiplies.
    Public re-implementations report that PSO loses to plain averaging: always show LocalSGD at
    equal bytes beside it.

    With a codec all workers keep one copy x̂ of what they have heard of gBest, whichever worker it
    was: at first the common start. The best one sends how it differs from x̂, and what the message
    leaves out is a part of the difference the next time. The best one itself is not pulled to x̂: it
    is gBest.

    Bytes: one number per worker and one broadcast of the parameters every `period` steps, or of the
    codec's message and its length, 8; at the end one number and one broadcast with the buffers.

    Use: to study swarm optimisation; see the caveat above.

    Fields:
        period: steps from one step of the swarm to the next.
        c1: attraction of a worker's own best.
        c2: attraction of the swarm's best.
        inertia_max: m at the beginning.
        inertia_min: m at the end.
        decay: what 1/λ multiplies: the "attraction" (the bracket), "all" of the right-hand side of
            v, the "position" (x_i ← x_i + v_i/λ), or "none" of it.
        random: whether r1 and r2 are one number each ("scalar") or one for each parameter
            ("vector").
        personal_best: when a worker compares its loss with its best so far: at "every_step" (the
            text of the paper's Table I), or at "swarm_steps" alone (its Algorithm 1).
        codec: how gBest's difference to x̂ is written on the wire; None: gBest as it is.

    Paper: Ye, Han, Sun, Lv, "PSO-PS: Parameter Synchronization with Particle Swarm Optimization for
    Distributed Training of Deep Neural Networks", 2020.

    Example:
        fs.run("digits-mlp", fs.PSOPS(), workers=4)
    """

    name: ClassVar[str] = "pso_ps"
    revision: ClassVar[int] = 1
    period: int = 10
    c1: float = 0.2
    c2: float = 0.9
    inertia_max: float = 0.9
    inertia_min: float = 0.3
    decay: str = "attraction"
    random: str = "scalar"
    personal_best: str = "every_step"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_integer("period", self.period, 1)
        for field in ("c1", "c2", "inertia_max", "inertia_min"):
            value = getattr(self, field)
            require_number(field, value, at_least=0)
        falls = self.inertia_min <= self.inertia_max
        require(
            falls, "inertia_min", f"be at most inertia_max, {self.inertia_max}", self.inertia_min
        )
        require_choice("decay", self.decay, ("attraction", "all", "position", "none"))
        require_choice("random", self.random, ("scalar", "vector"))
        require_choice("personal_best", self.personal_best, ("every_step", "swarm_steps"))

    @property
    def needs_loss_after_step(self) -> bool:
        return True  # which ranks the particles at the end

    @property
    def needs_length(self) -> bool:
        return True  # the inertia falls until the end

    def init(self, worker: Worker) -> PSOPSState:
        draw = torch_stream(Purpose.SWARM, worker.comm.seed, worker.comm.rank)
        x, public = worker.flat.parameters, None
        if self.codec is not None:
            public = PublicCopies.of(worker, self.codec, [SWARM_BEST], x)
        return PSOPSState(torch.zeros_like(x), x.clone(), draw, public)

    def optimizer_step(self, worker: Worker, state: PSOPSState) -> None:
        step = worker.steps + 1
        is_of_swarm = step % self.period == 0
        if is_of_swarm or self.personal_best == "every_step":
            self._remember_best(worker, state)
        if is_of_swarm:
            self._swarm_step(worker, state, step)
        else:
            worker.optimizer.step()

    def _remember_best(self, worker: Worker, state: PSOPSState) -> None:
        # The loss is that of the parameters as they still are.
        if worker.loss < state.best_loss:
            state.best_loss = worker.loss
            state.best.copy_(worker.flat.parameters)

    def _swarm_step(self, worker: Worker, state: PSOPSState, step: int) -> None:
        x, v = worker.flat.parameters, state.velocity
        swarm_best = self._swarm_best(worker, state)

        attraction = self._random(state, x).mul_(state.best - x).mul_(self.c1)
        attraction.addcmul_(self._random(state, x), swarm_best - x, value=self.c2)

        weaker = 1 / (worker.epoch + 1)  # 1/λ
        v.mul_(self._inertia(worker, step))
        v.add_(attraction, alpha=weaker if self.decay == "attraction" else 1)
        if self.decay == "all":
            v.mul_(weaker)
        x.add_(v, alpha=weaker if self.decay == "position" else 1)

    def _swarm_best(self, worker: Worker, state: PSOPSState) -> Tensor:
        """gBest, as far as this worker knows it."""
        x, comm, public = worker.flat.parameters, worker.comm, state.public
        best_first = ranked(comm, last_score(worker, "loss"))
        swarm_best = x.clone()
        if public is None:
            broadcast_from_first(comm, swarm_best, best_first)
            return swarm_best

        best, message = broadcast_message(
            comm, lambda: public.message(x, SWARM_BEST), best_first, x.device
        )
        public.hear(message, SWARM_BEST)
        return swarm_best if comm.rank == best else public[SWARM_BEST].clone()

    def _inertia(self, worker: Worker, step: int) -> float:
        if worker.total_steps is None:
            raise InvalidField(
                "'total_steps' must be known to PSOPS: "
                "take batches from worker.batches, or set it (got None)"
            )
        return self.inertia_max - step * (self.inertia_max - self.inertia_min) / worker.total_steps

    def _random(self, state: PSOPSState, like: Tensor) -> Tensor:
        """r: as many numbers as there are parameters, all equal if it is a scalar."""
        if self.random == "vector":
            return torch.rand(like.shape, dtype=like.dtype, generator=state.draw).to(like.device)
        return torch.full_like(like, float(torch.rand((), generator=state.draw)))

    def preview(self, worker: Worker, state: PSOPSState) -> Tensor:
        best = worker.flat.state.clone()
        loss = worker.loss_after_step
        order = ranked(worker.comm, math.inf if math.isnan(loss) else loss)
        broadcast_from_first(worker.comm, best, order)
        return best

    def finish(self, worker: Worker, state: PSOPSState) -> None:
        worker.flat.state.copy_(self.preview(worker, state))
