"""No communication at all: the control in every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from flockstep.codecs import Codec
from flockstep.fields import require
from flockstep.strategies._representative import representative, require_representative
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass(frozen=True)
class Independent(Strategy[None]):
    """Every worker trains alone; the one with the lowest loss represents the run.

        finish: x ← x_k, k = argmin_i loss_i

    One batch's loss is mostly noise, so the losses compared are exponential means over the last ten
    steps or so; of equal ones the lowest rank wins.

    There is no codec: nothing travels while workers train, and what stands for the run travels once
    and whole.

    Bytes: nothing while training; at the end one number per worker and one broadcast of the model
    ("mean": one all-reduce; "any": the broadcast alone).

    Use: as the control in every comparison.

    Fields:
        representative: which model stands for the run: the "best", the "mean" of all (one-shot
            averaging) or "any".
        codec: always None.

    Paper: Zinkevich, Weimer, Smola, Li, "Parallelized Stochastic Gradient Descent", 2010 (the
        "mean").

    Example:
        fs.run("digits-mlp", fs.Independent(), workers=4)
    """

    name: ClassVar[str] = "independent"
    representative: str = "best"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_representative(self.representative)
        require(self.codec is None, "codec", "be None: workers send each other nothing", self.codec)

    @property
    def waits(self) -> bool:
        return False

    def preview(self, worker: Worker, state: None) -> Tensor:
        return representative(worker, worker.flat.state, self.representative)

    def finish(self, worker: Worker, state: None) -> None:
        worker.flat.state.copy_(self.preview(worker, state))
