"""What a study can compare: figures of a run, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flockstep.errors import unknown_name

OF_RUNS = (
    "test_accuracy",
    "test_loss",
    "train_loss",
    "seconds",
    "wall_seconds",
    "bytes_sent",
    "exchanges",
    "steps",
    "samples",
)
TO_TARGET = ("seconds_to_target", "steps_to_target", "bytes_to_target")
# Of the looks: on the validation data where the task has some, else on the test data.
OF_LOOKS = ("accuracy", "loss", "best_accuracy", "best_loss", "replicas_mean", "spread")
METRICS = (*OF_RUNS, *TO_TARGET, *OF_LOOKS)
HIGHER = ("test_accuracy", "accuracy", "best_accuracy", "replicas_mean")
# The field of a look that says what it has cost so far.
LIMITS = {
    "seconds_to_target": "seconds",
    "steps_to_target": "step",
    "bytes_to_target": "bytes_sent",
}


def require_metric(name: object) -> None:
    if not isinstance(name, str) or name not in METRICS:
        raise unknown_name("metric", str(name), METRICS)


def default_direction(name: str) -> str:
    return "higher" if name in HIGHER else "lower"


def is_score(name: str) -> bool:
    """Whether the task's own metric is meant, which is an accuracy for classifiers."""
    return name in HIGHER


def cost_to(target: float, metric: str, history: Sequence[Mapping[str, Any]]) -> float | None:
    """What it took until the first look that had reached the target; None: none has."""
    for look in history:
        score = look.get("accuracy")
        if score is not None and score >= target:
            return float(look[LIMITS[metric]])
    return None


def value_of(
    name: str, metrics: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> float | None:
    """The figure of one run; None where it has none: a target that was not reached, a loss that
    is not a number.
    """
    value = _of_looks(name, history) if name in OF_LOOKS else metrics.get(name)
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number and value is not None else None


def _of_looks(name: str, history: Sequence[Mapping[str, Any]]) -> float | None:
    field = name.removeprefix("best_")
    seen = [look[field] for look in history if look.get(field) is not None]
    if not seen:
        return None
    if name == "best_accuracy":
        return float(max(seen))
    return float(min(seen)) if name == "best_loss" else float(seen[-1])
