"""Groups of workers that move as one: they average their gradients, and a delegate deals with the
rest of the world for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flockstep.comm import Comm, broadcast_among, handle, sum_at_first
from flockstep.errors import WorkerLost
from flockstep.optimizers import change_state
from flockstep.randomness import Purpose, numpy_stream, torch_stream

if TYPE_CHECKING:
    from flockstep.worker import Worker

Act = Callable[[], None]
"""What the delegate does for its group: it changes its own `worker.flat.state`."""


@dataclass
class AdjacentGroup:
    """Neighbours in rank, for the whole run."""

    # The same on all members, so that they agree on the delegate:
    candidates: list[int]  # those who were not lost when it was their turn
    draw: torch.Generator
    is_random: bool  # whether the delegate is drawn each time

    comm: Comm = handle()

    @classmethod
    def of(cls, comm: Comm, groups: int, delegate: str) -> AdjacentGroup:
        colour = comm.rank * groups // comm.size
        inside = comm.split(colour)
        draw = torch_stream(Purpose.DELEGATE, comm.seed, colour)
        return cls([*range(inside.size)], draw, delegate == "random", comm=inside)

    def average(self, gradients: Tensor) -> None:
        self.comm.all_reduce(gradients, op="mean")

    def exchange(self, worker: Worker, act: Act) -> None:
        """The delegate acts, and broadcasts what it has become. If it is lost, another does."""
        while True:
            chosen = 0
            if self.is_random:
                chosen = int(torch.randint(len(self.candidates), (), generator=self.draw))
            delegate = self.candidates[chosen]
            if self.comm.rank == delegate:
                act()
            try:
                self.comm.broadcast(worker.flat.state, root=delegate)
            except WorkerLost:  # on every member of the group alike
                self.candidates.remove(delegate)
            else:
                return


@dataclass
class RandomGroup:
    """Others at each exchange: all workers draw the same division.

    Members talk by messages between two of them, since a comm cannot be made in the middle of a
    step; so they need every member.
    """

    members: list[int]  # by rank, the delegate first
    divisions: int  # so far

    comm: Comm = handle()
    groups: int = handle()
    delegate: str = handle()

    @classmethod
    def of(cls, comm: Comm, groups: int, delegate: str) -> RandomGroup:
        group = cls([], 0, comm=comm, groups=groups, delegate=delegate)
        group._divide()
        return group

    def average(self, gradients: Tensor) -> None:
        # Half precision is added in float32, as everywhere.
        total = gradients.to(torch.promote_types(gradients.dtype, torch.float32))
        sum_at_first(self.comm, total, self.members)
        gradients.copy_(total.div_(len(self.members)))  # only the delegate's counts
        broadcast_among(self.comm, gradients, self.members)

    def exchange(self, worker: Worker, act: Act) -> None:
        """The workers are divided anew; the delegate of each new group acts, and brings what it has
        become to the members, with its optimizer's state.
        """
        self._divide()
        if self.comm.rank == self.members[0]:
            act()
        self._from_delegate(worker.flat.state)
        change_state(worker.optimizer, self._from_delegate)

    def _from_delegate(self, tensor: Tensor) -> None:
        broadcast_among(self.comm, tensor, self.members)

    def _divide(self) -> None:
        draw = numpy_stream(Purpose.GROUPING, self.comm.seed, self.divisions)
        division = draw.permutation(self.comm.size).reshape(self.groups, -1).tolist()
        own = next(each for each in division if self.comm.rank in each)
        self.members = sorted(own) if self.delegate == "first" else own
        self.divisions += 1
