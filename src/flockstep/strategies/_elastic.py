"""What the elastic methods share: the centre, and the pull between it and a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flockstep.comm import SharedTensor
from flockstep.fields import require_between

if TYPE_CHECKING:
    from flockstep.worker import Worker

DEFAULT_ALPHA_TIMES_WORKERS = 0.9


@dataclass
class Centre:
    """The centre x̃ as a worker sees it, and the moving rate α."""

    value: SharedTensor
    alpha: float

    @classmethod
    def of(cls, worker: Worker, alpha: float | None, members: int) -> Centre:
        """A centre that starts where the replicas start, for `members` that pull at it."""
        return cls(
            worker.comm.shared("elastic centre", worker.flat.state), moving_rate(alpha, members)
        )

    def pull(self, worker: Worker) -> None:
        """d = α(x_i − x̃);  x_i ← x_i − d;  x̃ ← x̃ + d, both with the old values. One round
        trip.
        """
        before = self.value.blend(worker.flat.state, self.alpha)
        worker.flat.state.lerp_(before.to(worker.flat.state.device), self.alpha)

    def become(self, worker: Worker) -> None:
        """Put the centre in the worker's place, once everybody's last pull has landed."""
        worker.comm.barrier()
        self.value.read(out=worker.flat.state)


def moving_rate(alpha: float | None, members: int) -> float:
    """α, by default 0.9/members: the β = 0.9 of the paper's experiments."""
    return DEFAULT_ALPHA_TIMES_WORKERS / members if alpha is None else alpha


def require_alpha(alpha: float | None) -> None:
    if alpha is not None:
        require_between("alpha", alpha, 0, 1)
