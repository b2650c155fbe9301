"""Which worker sees which samples, and in what order. Pure: imports no worker, strategy or backend."""

from flockstep.data.assignment import (
    ASSIGNMENTS,
    Assignment,
    Coarse,
    Disjoint,
    FineGrained,
    FullOverlap,
    HouseholdShards,
    MediumCoarse,
    NeighbourhoodOverlap,
    find_assignment,
)
from flockstep.data.memory import InMemory
from flockstep.data.sampling import Sampling

__all__ = [
    "ASSIGNMENTS",
    "Assignment",
    "Coarse",
    "Disjoint",
    "FineGrained",
    "FullOverlap",
    "HouseholdShards",
    "InMemory",
    "MediumCoarse",
    "NeighbourhoodOverlap",
    "Sampling",
    "find_assignment",
]
