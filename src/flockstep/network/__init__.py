"""Links and what it costs to move tensors over them: pure arithmetic."""

from flockstep.network import costs
from flockstep.network.links import PRESETS, Link, Network, is_own_network

__all__ = ["PRESETS", "Link", "Network", "costs", "is_own_network"]
