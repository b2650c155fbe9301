"""How to train with large batches, in small pieces that go with any optimizer and any strategy."""

from __future__ import annotations

from flockstep.recipes.batch_growth import BatchGrowth
from flockstep.recipes.label_smoothing import SmoothedLoss
from flockstep.recipes.lamb import LAMB
from flockstep.recipes.lars import LARS
from flockstep.recipes.progress import Progress
from flockstep.recipes.rmsprop_warmup import RMSpropWarmup
from flockstep.recipes.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    FinalCollapse,
    LinearScaling,
    Polynomial,
    Product,
    Schedule,
    StepDecay,
    Warmup,
    find_schedule,
)
from flockstep.recipes.two_stage import TwoStage

__all__ = [
    "LAMB",
    "LARS",
    "SCHEDULES",
    "BatchGrowth",
    "Constant",
    "Cosine",
    "FinalCollapse",
    "LinearScaling",
    "Polynomial",
    "Product",
    "Progress",
    "RMSpropWarmup",
    "Schedule",
    "SmoothedLoss",
    "StepDecay",
    "TwoStage",
    "Warmup",
    "find_schedule",
]
