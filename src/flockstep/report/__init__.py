"""What people look at: figures and traces."""

from __future__ import annotations

from flockstep.report.assignment_figure import draw, sketch

__all__ = [
    "draw",
    "sketch",
]
