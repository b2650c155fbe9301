"""Learning rates over a training: factors of the base rate that multiply."""

from __future__ import annotations

from flockstep.schedules.progress import Paced, Progress
from flockstep.schedules.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    FinalCollapse,
    LinearScaling,
    Polynomial,
    Product,
    Schedule,
    SlowStart,
    StepDecay,
    Warmup,
    find_schedule,
)

__all__ = [
    "SCHEDULES",
    "Constant",
    "Cosine",
    "FinalCollapse",
    "LinearScaling",
    "Paced",
    "Polynomial",
    "Product",
    "Progress",
    "Schedule",
    "SlowStart",
    "StepDecay",
    "Warmup",
    "find_schedule",
]
