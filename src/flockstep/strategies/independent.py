"""No communication at all: the control in every comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flockstep.comm import broadcast_from_first
from flockstep.strategies._ranking import ranked
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass(frozen=True)
class Independent(Strategy[None]):
    """Every worker trains alone; the one with the lowest loss represents the run.

        finish: x ← x_k, k = argmin_i loss_i

    One batch's loss is mostly noise, so the losses compared are exponential means over the last ten
    steps or so; of equal ones the lowest rank wins.

    Bytes: nothing while training; at the end one number per worker and one broadcast of the model.

    Use: as the control in every comparison.

    Example:
        fs.run("digits-mlp", fs.Independent(), workers=4)
    """

    name: ClassVar[str] = "independent"

    @property
    def waits(self) -> bool:
        return False

    def finish(self, worker: Worker, state: None) -> None:
        # A worker that took no step has no loss, and represents nothing.
        loss = math.inf if math.isnan(worker.smooth_loss) else worker.smooth_loss
        broadcast_from_first(worker.comm, worker.flat.state, ranked(worker.comm, loss))
