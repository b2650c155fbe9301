"""Which worker sees which samples, and in what order. Pure: imports no worker, strategy or backend."""

from flockstep.data.assignment import ASSIGNMENTS, Assignment, Disjoint, FullOverlap

__all__ = ["ASSIGNMENTS", "Assignment", "Disjoint", "FullOverlap"]
