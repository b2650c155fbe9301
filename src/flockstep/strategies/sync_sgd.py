"""Synchronous data-parallel SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from flockstep.codecs import Codec
from flockstep.comm import require_algorithm
from flockstep.fields import require
from flockstep.strategies._compressed import Averager, require_codec
from flockstep.strategies._parameter_server import mean_buffers
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class SyncSGDState:
    averager: Averager


@dataclass(frozen=True)
class SyncSGD(Strategy[SyncSGDState]):
    """Average the gradients of all workers before each optimizer step.

        g_i ← (1/w) Σ_k g_k

    With w workers of batch b this is one worker of batch w·b. Statistics of batch normalisation are
    local while training, as in DistributedDataParallel without SyncBatchNorm, and averaged at the
    end.

    Bytes: one all-reduce of the gradients per step, 2(w−1)n in all (hierarchical: 3(w−k) + 2(k−1) +
    (w−k)/G times n, with k = w/G groups), or the codec's; for models with such statistics, one of
    them at the end.

    Use: on a fast and even network; as the reference for all others.

    Fields:
        all_reduce: the algorithm: "flat" is one fused all-reduce of the backend, charged as a ring;
            "ring", "tree", "hierarchical" (or "hierarchical:G"), "torus" (or "torus:XxY") and
            "hybrid" (or "hybrid:G:BYTES": hierarchical for gradients of fewer bytes, else ring) as
            in `flockstep/comm/all_reduce.py`. Messages of all but "flat" go a fixed way, through
            every worker: a lost one ends the run, whatever `on_failure` says.
        codec: how gradients are written on the wire; None: as they are.

    Paper: Chen et al., "Revisiting Distributed Synchronous SGD", 2016.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(), workers=4)
    """

    name: ClassVar[str] = "sync_sgd"
    all_reduce: str = "flat"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_algorithm("all_reduce", self.all_reduce)
        require_codec(self.codec, of_gradients=True)
        is_plain = self.codec is None or self.all_reduce == "flat"
        require(
            is_plain, "all_reduce", "be 'flat' with a codec, which has its own way", self.all_reduce
        )

    def next_synchronisation(self, steps: int, total_steps: int | None) -> int | None:
        return steps

    def require_optimizer(self, optimizer: Optimizer) -> None:
        if self.codec is not None:
            self.codec.require_optimizer(optimizer)

    def init(self, worker: Worker) -> SyncSGDState:
        gradients = worker.flat.gradients
        return SyncSGDState(Averager.of(worker, self.codec, gradients, self.all_reduce))

    def on_gradients(self, worker: Worker, state: SyncSGDState) -> None:
        state.averager.average(worker.flat.gradients)

    def preview(self, worker: Worker, state: SyncSGDState) -> Tensor:
        return torch.cat([worker.flat.parameters, mean_buffers(worker)])

    def finish(self, worker: Worker, state: SyncSGDState) -> None:
        worker.flat.buffers.copy_(mean_buffers(worker))
