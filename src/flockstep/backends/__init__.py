"""What starts workers and carries their tensors."""

from flockstep.backends.base import (
    ON_FAILURE,
    Backend,
    Hearer,
    Launch,
    Program,
    Watcher,
    one_interrupt,
    usable_core_numbers,
    usable_cores,
)
from flockstep.backends.heartbeat import PATIENCE_SECONDS
from flockstep.backends.local import LocalProcesses
from flockstep.backends.ray import Ray, ray_session
from flockstep.backends.sim import Compute, Faults, Pause, Simulator, run_aside
from flockstep.backends.torchrun import Torchrun

__all__ = [
    "ON_FAILURE",
    "PATIENCE_SECONDS",
    "Backend",
    "Compute",
    "Faults",
    "Hearer",
    "Launch",
    "LocalProcesses",
    "Pause",
    "Program",
    "Ray",
    "Simulator",
    "Torchrun",
    "Watcher",
    "one_interrupt",
    "ray_session",
    "run_aside",
    "usable_core_numbers",
    "usable_cores",
]
