"""What a study can compare: figures of a run, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flockstep.errors import unknown_name
from flockstep.training import NOISE_SCALES

THROUGHPUT = "samples_per_second"  # of all workers, by the run's clock
# Of the final model with noise on its parameters, and how much worse that is than without.
SCORES_UNDER_NOISE = tuple(f"test_accuracy_noise_{scale:g}" for scale in NOISE_SCALES)
LOSSES_UNDER_NOISE = tuple(f"test_loss_noise_{scale:g}" for scale in NOISE_SCALES)
LOST_TO_NOISE = {
    f"test_accuracy_lost_to_noise_{scale:g}": ("test_accuracy", f"test_accuracy_noise_{scale:g}")
    for scale in NOISE_SCALES
}
ADDED_BY_NOISE = {
    f"test_loss_added_by_noise_{scale:g}": (f"test_loss_noise_{scale:g}", "test_loss")
    for scale in NOISE_SCALES
}
DIFFERENCES = {**LOST_TO_NOISE, **ADDED_BY_NOISE}  # of two other metrics
OF_NOISE = (*SCORES_UNDER_NOISE, *LOSSES_UNDER_NOISE, *DIFFERENCES)
OF_RUNS = (
    "test_accuracy",
    "test_loss",
    "train_loss",
    "train_accuracy",
    "seconds",
    "wall_seconds",
    "bytes_sent",
    "exchanges",
    "steps",
    "samples",
    THROUGHPUT,
    "test_replicas_mean",
    "test_replicas_max",
    "test_replicas_min",
    *OF_NOISE,
)
# What a score may cost, and the field of a look that says what it has cost so far.
COSTS = {"seconds": "seconds", "steps": "step", "bytes": "bytes_sent", "epochs": "epoch"}
LIMITS = {f"{cost}_to_target": field for cost, field in COSTS.items()}
# Of the looks: on the validation data where the task has some, else on the test data.
REPLICA_SCORES = ("replicas_mean", "replicas_max", "replicas_min")
OF_LOOKS = (
    "accuracy",
    "loss",
    "best_accuracy",
    "best_loss",
    *REPLICA_SCORES,
    "spread",
    "distance_mean",
    "distance_per_parameter",
    "staleness_mean",
    "staleness_max",
)
METRICS = (*OF_RUNS, *LIMITS, *OF_LOOKS)
SCORES = (
    "test_accuracy",
    "train_accuracy",
    "accuracy",
    "best_accuracy",
    *REPLICA_SCORES,
    *(f"test_{name}" for name in REPLICA_SCORES),
    *SCORES_UNDER_NOISE,
    *LOST_TO_NOISE,
)
HIGHER = (*(name for name in SCORES if name not in LOST_TO_NOISE), THROUGHPUT)
# What has to be measured for it.
NEEDS = {
    "spread": "spread",
    "distance_mean": "distance",
    "distance_per_parameter": "distance",
    "staleness_mean": "staleness",
    "staleness_max": "staleness",
    **dict.fromkeys(REPLICA_SCORES, "replicas"),
    **dict.fromkeys((f"test_{name}" for name in REPLICA_SCORES), "replicas"),
    **dict.fromkeys(OF_NOISE, "flatness"),
    "train_accuracy": "training",
}


def require_metric(name: object) -> None:
    if not isinstance(name, str) or (name not in METRICS and not is_cost(name)):
        raise unknown_name("metric", str(name), [*METRICS, "epochs_to:0.87"])


def is_cost(name: str) -> bool:
    """Whether it is what a run took to a score, which it may not have reached: to that of the
    study, `epochs_to_target`, or to one of its own, `epochs_to:0.87`.
    """
    return name in LIMITS or score_in(name) is not None


def score_in(name: str) -> float | None:
    """0.87 of `epochs_to:0.87`."""
    what, _, score = name.partition("_to:")
    try:
        number = float(score)
    except ValueError:
        return None
    return number if what in COSTS and math.isfinite(number) else None


def cost_so_far(name: str, look: Mapping[str, Any]) -> float:
    """What a run has spent until a look of what that metric counts."""
    return float(look[COSTS[name.partition("_to")[0]]])


def default_direction(name: str) -> str:
    return "higher" if name in HIGHER else "lower"


def is_score(name: str) -> bool:
    """Whether the task's own metric is meant, or how much of it is lost: an accuracy for
    classifiers.
    """
    return name in SCORES


def cost_to(target: float, metric: str, history: Sequence[Mapping[str, Any]]) -> float | None:
    """What it took until the first look that had reached the target; None: none has."""
    for look in history:
        score = look.get("accuracy")
        if score is not None and score >= target:
            return cost_so_far(metric, look)
    return None


def value_of(
    name: str, metrics: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> float | None:
    """The figure of one run; None where it has none: a target that was not reached, a loss that
    is not a number.
    """
    target = score_in(name)
    if target is not None:
        return cost_to(target, name, history)
    if name == THROUGHPUT:
        samples, seconds = metrics.get("samples"), metrics.get("seconds")
        return samples / seconds if samples and seconds else None
    if name in DIFFERENCES:
        one, other = (value_of(each, metrics, history) for each in DIFFERENCES[name])
        return None if one is None or other is None else one - other
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
