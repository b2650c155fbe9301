"""What people look at: figures and traces."""

from __future__ import annotations

from flockstep.report.assignment_figure import draw, sketch
from flockstep.report.trace import require_trace_path, write_trace

__all__ = [
    "draw",
    "require_trace_path",
    "sketch",
    "write_trace",
]
