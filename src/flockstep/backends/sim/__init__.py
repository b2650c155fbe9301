"""Many workers in one process, in virtual time, bit for bit repeatable."""

from flockstep.backends.sim.backend import Simulator, run_aside
from flockstep.backends.sim.compute import Compute

__all__ = ["Compute", "Simulator", "run_aside"]
