"""The whole interface between a worker and the others, what it counts, and how sums are made."""

from __future__ import annotations

from flockstep.comm.all_reduce import (
    Average,
    averager,
    broadcast_among,
    require_algorithm,
    sum_at_first,
)
from flockstep.comm.changes import apply_changes, read_changes_nbytes, written_changes
from flockstep.comm.clock import Clock
from flockstep.comm.contract import (
    Comm,
    Gathered,
    Namespace,
    broadcast_from_first,
    shared_form,
    signature,
)
from flockstep.comm.encoding import add_decoded
from flockstep.comm.handles import HANDLE, Background, handle
from flockstep.comm.meter import Meter, staleness_from
from flockstep.comm.reduction import REDUCTIONS, reduce_in_rank_order
from flockstep.comm.shared_tensor import SharedTensor
from flockstep.comm.trace import EVENT_KINDS, Trace, events_per_worker

__all__ = [
    "EVENT_KINDS",
    "HANDLE",
    "REDUCTIONS",
    "Average",
    "Background",
    "Clock",
    "Comm",
    "Gathered",
    "Meter",
    "Namespace",
    "SharedTensor",
    "Trace",
    "add_decoded",
    "apply_changes",
    "averager",
    "broadcast_among",
    "broadcast_from_first",
    "events_per_worker",
    "handle",
    "read_changes_nbytes",
    "reduce_in_rank_order",
    "require_algorithm",
    "shared_form",
    "signature",
    "staleness_from",
    "sum_at_first",
    "written_changes",
]
