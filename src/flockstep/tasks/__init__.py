"""What is trained: the built-in tasks, and what a task of one's own is made of."""

from __future__ import annotations

from flockstep.tasks.builtin import TASKS, task
from flockstep.tasks.label_smoothing import SmoothedLoss
from flockstep.tasks.task import (
    Task,
    classification_accuracy,
    classification_loss,
    find_task,
    mean_scores,
    split_task_name,
    token_loss,
)

__all__ = [
    "TASKS",
    "SmoothedLoss",
    "Task",
    "classification_accuracy",
    "classification_loss",
    "find_task",
    "mean_scores",
    "split_task_name",
    "task",
    "token_loss",
]
