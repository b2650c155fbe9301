"""Links and what it costs to move tensors over them: pure arithmetic."""

from flockstep.network import costs
from flockstep.network.links import PRESETS, Link, Network

__all__ = ["PRESETS", "Link", "Network", "costs"]
