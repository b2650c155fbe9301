"""What the elastic methods share: how strong the pull is, when it is due, where the centre lives
and what stands for the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.comm import SharedTensor, handle
from flockstep.fields import require, require_choice, require_integer, require_number
from flockstep.optimizers import learning_rate
from flockstep.strategies._compressed import memory_of_differences, require_codec
from flockstep.strategies._representative import representative, require_representative

if TYPE_CHECKING:
    from flockstep.worker import Worker

ORDERS = ("printed", "after_step")
CENTRE = "centre"
DEFAULT_ALPHA_TIMES_MEMBERS = 0.9


def require_elastic(
    period: int,
    alpha: float | None,
    rho: float | None,
    order: str,
    stands_for_it: str,
    codec: Codec | None,
) -> None:
    """Complain of fields that all elastic methods have."""
    require_integer("period", period, 1)
    if alpha is not None:
        require_number("alpha", alpha, at_least=0, at_most=1)
    if rho is not None:
        require_number("rho", rho, at_least=0, finite=True)
        require(alpha is None, "rho", f"be None where 'alpha' is given, {alpha}", rho)
    require_choice("order", order, ORDERS)
    require_representative(stands_for_it, CENTRE)
    require_codec(codec)


def moving_rate(worker: Worker, alpha: float | None, rho: float | None, members: int) -> float:
    """α: η_t·ρ with the learning rate of this step, or a constant, by default 0.9/members: the
    β = 0.9 of Zhang et al.'s experiments.
    """
    if rho is not None:
        return learning_rate(worker.optimizer) * rho
    return DEFAULT_ALPHA_TIMES_MEMBERS / members if alpha is None else alpha


def is_due(worker: Worker, period: int, order: str) -> bool:
    """Whether the step that is being taken pulls: the one that follows kτ completed steps, k = 0,
    1, …; or, after the optimizer's, the steps τ, 2τ, …
    """
    steps = worker.steps if order == "printed" else worker.steps + 1
    return steps % period == 0


@dataclass
class Centre:
    """x̃ as one worker sees it: shared, or the same on all workers and moved alike by them.

    A codec carries the pull d. The worker loses just what the centre gains, C(d): what C leaves out
    stays in x − x̃, and so in the next d.
    """

    alike: Tensor | None = None
    memory: Memory | None = None  # of the codec

    shared: SharedTensor | None = handle()
    codec: Codec | None = handle(default=None)

    @classmethod
    def of(cls, worker: Worker, codec: Codec | None = None, *, is_shared: bool = True) -> Centre:
        """A centre that starts where the replicas start."""
        own = worker.flat.state
        memory = None if codec is None else memory_of_differences(worker, codec, own)
        shared = worker.comm.shared("elastic centre", own) if is_shared else None
        alike = None if is_shared else own.clone()
        return cls(alike, memory, shared=shared, codec=codec)

    def read(self) -> Tensor:
        """x̃ now; with a codec only what has changed since this worker read it travels."""
        assert self.shared is not None
        return self.shared.read() if self.codec is None else self.shared.read_changes()

    def add(self, d: Tensor) -> Tensor:
        """x̃ ← x̃ + C(d). Return C(d)."""
        assert self.shared is not None
        return self.shared.add(d, codec=self.codec, memory=self.memory)

    def add_of_all(self, worker: Worker, d: Tensor) -> Tensor:
        """x̃ ← x̃ + Σ_k C(d_k), by all workers alike. Return the worker's own C(d)."""
        assert self.alike is not None
        if self.codec is None:
            self.alike.add_(worker.comm.all_reduce(d.clone()))
            return d
        told = worker.comm.all_gather(d, codec=self.codec, memory=self.memory)
        for each in told:
            self.alike.add_(each)
        return told.by_rank()[worker.comm.rank]

    def preview(self, worker: Worker, own: Tensor, stands_for_it: str) -> Tensor:
        """The centre, once everybody's last pull has landed; or what else represents the run."""
        if stands_for_it != CENTRE:
            return representative(worker, own, stands_for_it)
        if self.shared is None:
            assert self.alike is not None
            return self.alike.clone()
        worker.comm.barrier()
        settled = self.shared.read(out=torch.empty_like(worker.flat.state))
        worker.comm.barrier()  # nobody pulls again before all have read
        return settled
