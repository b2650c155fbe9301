"""What people look at: figures and traces, and what loggers write for them."""

from __future__ import annotations

from flockstep.report.assignment_figure import draw, sketch
from flockstep.report.loggers import LOGGERS, Logger, MLflow, TensorBoard, WandB, open_logger

__all__ = [
    "LOGGERS",
    "Logger",
    "MLflow",
    "TensorBoard",
    "WandB",
    "draw",
    "open_logger",
    "sketch",
]
