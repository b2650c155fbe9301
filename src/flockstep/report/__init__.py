"""What people look at: summaries, figures and traces, and what loggers write for them."""

from __future__ import annotations

from flockstep.report.assignment_figure import draw, sketch
from flockstep.report.history_figure import AXES, draw_history, sketch_history
from flockstep.report.loggers import LOGGERS, Logger, MLflow, TensorBoard, WandB, open_logger
from flockstep.report.summary import heading, how_trained, lost_lines, metrics_table

__all__ = [
    "AXES",
    "LOGGERS",
    "Logger",
    "MLflow",
    "TensorBoard",
    "WandB",
    "draw",
    "draw_history",
    "heading",
    "how_trained",
    "lost_lines",
    "metrics_table",
    "open_logger",
    "sketch",
    "sketch_history",
]
