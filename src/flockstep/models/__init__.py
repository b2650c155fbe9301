"""Networks for the built-in tasks."""

from flockstep.models.lenet import LeNet5
from flockstep.models.mlp import MLP

__all__ = ["MLP", "LeNet5"]
