"""What people look at: summaries, figures and traces."""

from __future__ import annotations

from flockstep.report.assignment_figure import draw, sketch
from flockstep.report.history_figure import AXES, draw_history, sketch_history
from flockstep.report.summary import heading, lost_lines, metrics_table, settings

__all__ = [
    "AXES",
    "draw",
    "draw_history",
    "heading",
    "lost_lines",
    "metrics_table",
    "settings",
    "sketch",
    "sketch_history",
]
