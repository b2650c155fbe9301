"""Which model stands for a run whose replicas differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from flockstep.comm import broadcast_from_first
from flockstep.fields import require_choice
from flockstep.randomness import Purpose, numpy_stream
from flockstep.strategies._ranking import ranked

if TYPE_CHECKING:
    from flockstep.worker import Worker

REPRESENTATIVES = ("mean", "best", "any")


def require_representative(which: str, *others: str) -> None:
    """`others`: what the method knows besides, such as the "centre" of the elastic ones."""
    require_choice("representative", which, (*others, *REPRESENTATIVES))


def representative(worker: Worker, own: Tensor, which: str) -> Tensor:
    """The state that stands for the run, from each worker's `own`, which stays as it is.

        "mean":  (1/w) Σ_i x_i
        "best":  x_k of the worker with the lowest loss, an exponential mean over the last ten
                 steps or so, since one batch's is mostly noise; of equal ones the lowest rank
        "any":   x_k of a worker that the run's seed picks, the same one at every look

    All workers call it together: "mean" is one all-reduce, the others one broadcast.
    """
    comm, chosen = worker.comm, own.clone()
    if which == "mean":
        return comm.all_reduce(chosen, op="mean")

    if which == "best":
        # A worker that took no step has no loss, and represents nothing.
        loss = math.inf if math.isnan(worker.smooth_loss) else worker.smooth_loss
        order = ranked(comm, loss)
    else:
        order = numpy_stream(Purpose.ANY_REPLICA, comm.seed).permutation(comm.size).tolist()
    broadcast_from_first(comm, chosen, order)
    return chosen
