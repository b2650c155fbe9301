"""What people look at: summaries, figures and traces, and what loggers write for them."""

from __future__ import annotations

from flockstep.report.assignment_figure import draw, sketch
from flockstep.report.flatness_figure import draw_flatness
from flockstep.report.history_figure import AXES, draw_history, sketch_history
from flockstep.report.loggers import LOGGERS, Logger, MLflow, TensorBoard, WandB, open_logger
from flockstep.report.pictures import require_picture_path
from flockstep.report.study.formats import register_formats, write_map, write_short_page
from flockstep.report.study.terminal import cells_table, planned_table, verdict_lines
from flockstep.report.summary import heading, how_trained, lost_lines, metrics_table

register_formats()

__all__ = [
    "AXES",
    "LOGGERS",
    "Logger",
    "MLflow",
    "TensorBoard",
    "WandB",
    "cells_table",
    "draw",
    "draw_flatness",
    "draw_history",
    "heading",
    "how_trained",
    "lost_lines",
    "metrics_table",
    "open_logger",
    "planned_table",
    "require_picture_path",
    "sketch",
    "sketch_history",
    "verdict_lines",
    "write_map",
    "write_short_page",
]
