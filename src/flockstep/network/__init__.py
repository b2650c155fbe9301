"""Links and what it costs to move tensors over them: pure arithmetic."""

from flockstep.network import costs
from flockstep.network.link import Link
from flockstep.network.links import MODEL, PRESETS, Network, is_own_network
from flockstep.network.places import LinkChange, Route, Site
from flockstep.network.routes import Resource, Routes, Way

__all__ = [
    "MODEL",
    "PRESETS",
    "Link",
    "LinkChange",
    "Network",
    "Resource",
    "Route",
    "Routes",
    "Site",
    "Way",
    "costs",
    "is_own_network",
]
