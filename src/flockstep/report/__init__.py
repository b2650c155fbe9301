"""What people look at: summaries, figures and traces."""

from __future__ import annotations

from flockstep.report.assignment_figure import draw, sketch
from flockstep.report.history_figure import AXES, draw_history, sketch_history
from flockstep.report.summary import heading, how_trained, lost_lines, metrics_table

__all__ = [
    "AXES",
    "draw",
    "draw_history",
    "heading",
    "how_trained",
    "lost_lines",
    "metrics_table",
    "sketch",
    "sketch_history",
]
