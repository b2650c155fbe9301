"""A whole training job: the loop, the looks at it, and what comes of it."""

from flockstep.training.counting import planned_steps
from flockstep.training.flatness import (
    NOISE_SCALES,
    NOISES,
    SCALES,
    AtScale,
    Flatness,
    flatness,
)
from flockstep.training.resuming import saved_spec
from flockstep.training.run import resume, run, run_closely

__all__ = [
    "NOISES",
    "NOISE_SCALES",
    "SCALES",
    "AtScale",
    "Flatness",
    "flatness",
    "planned_steps",
    "resume",
    "run",
    "run_closely",
    "saved_spec",
]
