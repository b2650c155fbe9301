"""How much work a run is, before it is done."""

from __future__ import annotations

import math

from flockstep.backends import Simulator
from flockstep.spec import RunSpec
from flockstep.training.preparing import prepared


def planned_steps(spec: RunSpec) -> int | None:
    """How many optimizer steps each worker will take; None where only the run itself will tell."""
    simulated = spec.replace(backend="sim", lanes=None)
    steps = prepared(simulated, Simulator()).steps
    whole = simulated.resolved()
    if steps is None and spec.seconds is not None and whole.compute is not None:
        seconds = 0 if whole.compute.is_measured else whole.compute.seconds
        return math.ceil(spec.seconds / seconds) if seconds else None
    return steps
