"""Optimizers beside torch's own, and what strategies may do with any optimizer's state."""

from __future__ import annotations

from flockstep.optimizers.lamb import LAMB
from flockstep.optimizers.lars import LARS
from flockstep.optimizers.matrix_decay import adamw_on_matrices
from flockstep.optimizers.rmsprop_warmup import RMSpropWarmup
from flockstep.optimizers.spec import (
    NEEDED,
    OPTIMIZERS,
    OptimizerSpec,
    fields_of,
    find_optimizer,
    require_decay,
    require_steps_alone,
)
from flockstep.optimizers.state import average_state, change_state, learning_rate, reset_state
from flockstep.optimizers.two_stage import TwoStage

__all__ = [
    "LAMB",
    "LARS",
    "NEEDED",
    "OPTIMIZERS",
    "OptimizerSpec",
    "RMSpropWarmup",
    "TwoStage",
    "adamw_on_matrices",
    "average_state",
    "change_state",
    "fields_of",
    "find_optimizer",
    "learning_rate",
    "require_decay",
    "require_steps_alone",
    "reset_state",
]
