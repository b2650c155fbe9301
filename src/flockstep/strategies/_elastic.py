"""What the elastic methods share: the centre, and the pull between it and a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flockstep.comm import SharedTensor, handle
from flockstep.fields import require_number

if TYPE_CHECKING:
    from flockstep.worker import Worker

DEFAULT_ALPHA_TIMES_WORKERS = 0.9


@dataclass
class Centre:
    """The centre x̃ as a worker sees it, and the moving rate α."""

    alpha: float

    value: SharedTensor = handle()

    @classmethod
    def of(cls, worker: Worker, alpha: float | None, members: int) -> Centre:
        """A centre that starts where the replicas start, for `members` that pull at it."""
        value = worker.comm.shared("elastic centre", worker.flat.state)
        return cls(moving_rate(alpha, members), value=value)

    def pull(self, worker: Worker) -> None:
        """d = α(x_i − x̃);  x_i ← x_i − d;  x̃ ← x̃ + d, both with the old values. One round
        trip.
        """
        before = self.value.blend(worker.flat.state, self.alpha)
        worker.flat.state.lerp_(before.to(worker.flat.state.device), self.alpha)

    def preview(self, worker: Worker) -> Tensor:
        """The centre, once everybody's last pull has landed."""
        settled = self._settled(worker)
        worker.comm.barrier()  # nobody pulls again before all have read
        return settled

    def become(self, worker: Worker) -> None:
        """Put the centre in the worker's place, once everybody's last pull has landed."""
        worker.flat.state.copy_(self._settled(worker))

    def _settled(self, worker: Worker) -> Tensor:
        worker.comm.barrier()
        return self.value.read(out=torch.empty_like(worker.flat.state))


def moving_rate(alpha: float | None, members: int) -> float:
    """α, by default 0.9/members: the β = 0.9 of the paper's experiments."""
    return DEFAULT_ALPHA_TIMES_WORKERS / members if alpha is None else alpha


def require_alpha(alpha: float | None) -> None:
    if alpha is not None:
        require_number("alpha", alpha, at_least=0, at_most=1)
