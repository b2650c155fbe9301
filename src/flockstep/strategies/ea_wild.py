"""Elastic averaging with no lock and no turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.comm import Comm, handle
from flockstep.errors import WorkerLost
from flockstep.fields import require, require_choice, require_integer
from flockstep.randomness import Purpose, torch_stream
from flockstep.strategies._elastic import Centre, require_alpha
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class EAWildState:
    centre: Centre
    # The same on all members of a group, so that they agree on the representative:
    speakers: list[int]  # who can be it: those who were not lost when it was their turn
    draw: torch.Generator

    group: Comm | None = handle()


@dataclass(frozen=True)
class EAWild(Strategy[EAWildState]):
    """The elastic pull of EASGD, by whoever comes, whenever it comes.

        d = α(x_i − x̃);  x_i ← x_i − d;  x̃ ← x̃ + d      no lock, no turns

    With `groups`, the workers of a group average their gradients every step, and every `period`
    steps one representative pulls and then broadcasts its parameters inside the group; another one,
    if it is lost. finish: the centre.

    Bytes: one blend (there and back) per exchange, by every worker or by one of each group; with
    groups also an all-reduce of the gradients per step and a broadcast per exchange inside the
    group; one read at the end.

    Use: where workers differ in speed, on a machine or a fast network.

    Fields:
        period: optimizer steps between exchanges.
        alpha: the moving rate; None is 0.9 / (number of workers or groups that pull).
        groups: into how many equal groups the workers are divided, neighbours in rank together;
            None: no groups.
        representative: who pulls for its group, its "first" worker that is there or a "random" one
            each time.

    Paper: Wongpanich, You, Demmel, "Rethinking the Value of Asynchronous Solvers for Distributed
        Deep Learning", 2020.

    Example:
        fs.run("digits-mlp", fs.EAWild(period=4), workers=4)
    """

    name: ClassVar[str] = "ea_wild"
    period: int = 1
    alpha: float | None = None
    groups: int | None = None
    representative: str = "first"

    def __post_init__(self) -> None:
        require_integer("period", self.period, 1)
        require_alpha(self.alpha)
        if self.groups is not None:
            require_integer("groups", self.groups, 1)
        require_choice("representative", self.representative, ("first", "random"))

    @property
    def waits(self) -> bool:
        return self.groups is not None

    def init(self, worker: Worker) -> EAWildState:
        comm = worker.comm
        if self.groups is None:
            draw = torch_stream(Purpose.DELEGATE, comm.seed)
            centre = Centre.of(worker, self.alpha, comm.size)
            return EAWildState(centre, [], draw, group=None)
        divides = comm.size % self.groups == 0
        require(divides, "groups", f"divide the number of workers, {comm.size}", self.groups)
        colour = comm.rank * self.groups // comm.size
        draw = torch_stream(Purpose.DELEGATE, comm.seed, colour)
        group = comm.split(colour)
        centre = Centre.of(worker, self.alpha, self.groups)
        return EAWildState(centre, list(range(group.size)), draw, group=group)

    def on_gradients(self, worker: Worker, state: EAWildState) -> None:
        if state.group is not None:
            state.group.all_reduce(worker.flat.gradients, op="mean")

    def after_step(self, worker: Worker, state: EAWildState) -> None:
        if worker.steps % self.period:
            return
        if state.group is None:
            state.centre.pull(worker)
        else:
            while not self._pull_as_one(worker, state, state.group):
                pass  # the representative was lost: another does it

    def _pull_as_one(self, worker: Worker, state: EAWildState, group: Comm) -> bool:
        chosen = 0
        if self.representative == "random":
            chosen = int(torch.randint(len(state.speakers), (), generator=state.draw))
        speaker = state.speakers[chosen]
        if group.rank == speaker:
            state.centre.pull(worker)
        try:
            group.broadcast(worker.flat.state, root=speaker)
        except WorkerLost:  # on every member of the group alike
            state.speakers.remove(speaker)
            return False
        return True

    def preview(self, worker: Worker, state: EAWildState) -> Tensor:
        return state.centre.preview(worker)

    def finish(self, worker: Worker, state: EAWildState) -> None:
        state.centre.become(worker)
