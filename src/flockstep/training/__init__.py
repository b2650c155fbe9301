"""A whole training job: the loop, the looks at it, and what comes of it."""

from flockstep.training.resuming import saved_spec
from flockstep.training.run import resume, run

__all__ = ["resume", "run", "saved_spec"]
