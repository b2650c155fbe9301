"""Many workers in one process, in virtual time, bit for bit repeatable."""

from flockstep.backends.sim.backend import Simulator, run_aside
from flockstep.backends.sim.compute import Compute
from flockstep.backends.sim.faults import Faults, Pause

__all__ = ["Compute", "Faults", "Pause", "Simulator", "run_aside"]
