"""Synchronous data-parallel SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flockstep.fields import require_choice
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass(frozen=True)
class SyncSGD(Strategy[None]):
    """Average the gradients of all workers before each optimizer step.

        g_i ← (1/w) Σ_k g_k

    With w workers of batch b this is one worker of batch w·b. Statistics of batch normalisation are local while
    training, as in DistributedDataParallel without SyncBatchNorm, and averaged at the end.

    Bytes: one all-reduce of the gradients a step; for models with such statistics, one of them at the end.

    Fields:
        all_reduce: the algorithm; `flat` is one fused all-reduce, charged as a ring.

    Paper: Chen et al., "Revisiting Distributed Synchronous SGD", 2016.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(), workers=8)
    """

    name: ClassVar[str] = "sync_sgd"
    all_reduce: str = "flat"

    def __post_init__(self) -> None:
        require_choice("all_reduce", self.all_reduce, ("flat",))

    def on_gradients(self, worker: Worker, state: None) -> None:
        worker.comm.all_reduce(worker.flat.gradients, op="mean")

    def finish(self, worker: Worker, state: None) -> None:
        if worker.flat.buffers.numel():
            worker.comm.all_reduce(worker.flat.buffers, op="mean")
