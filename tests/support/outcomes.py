"""Outcomes of studies whose runs nobody ran: records made up, for statistics and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import flockstep as fs
from flockstep.study import Outcome, Record, Study
from flockstep.study.planning import planned_runs, planned_tries

Score = Callable[[Mapping[str, str], int], float | None]


def made_up_study(**fields: Any) -> Study:
    """A study with three strategies, unless told otherwise."""
    base = {"task": "digits-mlp", "workers": 4, "epochs": 2}
    axes = {"strategy": ["sync_sgd", "local_sgd(period=8)", "nosync(pull=0.1)"]}
    return Study(**{"question": "Which is best?", "base": base, "axes": axes} | fields)


def made_up_record(
    spec: fs.RunSpec, run_id: str, score: float, looks: int = 5, shows: bool = False
) -> Record:
    """A run that ended with this score, and came there on a curve."""
    workers = spec.workers or 1
    history: list[dict[str, Any]] = []
    for number in range(1, looks + 1):
        share = number / looks
        look: dict[str, Any] = {
            "step": 10 * number,
            "epoch": number,
            "samples": 640 * number,
            "seconds": 0.1 * number,
            "bytes_sent": 1_000_000 * number,
            "train_loss": math.exp(-3 * share),
            "loss": 0.1 + math.exp(-3 * share),
            "accuracy": score * (1 - math.exp(-5 * share)) / (1 - math.exp(-5)),
        }
        if shows:
            random = np.random.default_rng([spec.seed, number])
            look["positions"] = (share + 0.1 * random.normal(size=(workers, 16))).tolist()
        history.append(look)
    timeline = None
    if shows:
        rows = [
            [[0, 0.0, 0.01], [1, 0.01, 0.002 * rank], [2, 0.02, 0.01]] for rank in range(workers)
        ]
        kinds = ["computing", "waiting", "sending"]
        timeline = {"kinds": kinds, "workers": rows, "of": workers}
    last = history[-1]
    metrics = {
        "test_accuracy": score,
        "test_loss": last["loss"],
        "train_loss": last["train_loss"],
        "seconds": last["seconds"],
        "bytes_sent": last["bytes_sent"],
        "exchanges": 10 * looks,
        "steps": last["step"],
        "samples": last["samples"],
        "wall_seconds": 1.0,
        "workers": workers,
        "lost": 0,
    }
    config = {
        "task": spec.task if isinstance(spec.task, str) else spec.task.name,
        "strategy": spec.strategy.name,
        "workers": workers,
        "backend": "sim",
        "metric_name": "accuracy",
        "clock": "virtual",
        "epochs": spec.epochs,
        "target": spec.target,
    }
    return Record(
        run_id,
        None,
        spec.seed,
        "done",
        metrics=metrics,
        history=history,
        config=config,
        timeline=timeline,
        versions={"flockstep": "0", "torch": "0", "python": "3"},
        wall_seconds=1.0,
    )


def made_up_outcome(study: Study, score: Score, looks: int = 5, shows: bool = False) -> Outcome:
    """The outcome of a study whose runs have these scores, by cell and seed; None: not run."""
    records: dict[str, Record] = {}
    for run in planned_tries(study):
        value = score({**run.cell.labels, "lr": f"{run.rate:g}"}, run.spec.seed)
        if value is not None:
            records[run.id] = made_up_record(run.spec, run.id, value, looks)
    rates = {}
    if study.tune is not None:
        rates = {label: pick.lr for label, pick in Outcome(study, records).picks.items()}
    for run in planned_runs(study, rates):
        value = score(run.cell.labels, run.spec.seed)
        if value is not None:
            is_shown = shows and run.is_shown
            records[run.id] = made_up_record(run.spec, run.id, value, looks, is_shown)
    return Outcome(study, records)


def normal_scores(means: Mapping[str, float], deviation: float, seed: int) -> Score:
    """Scores that scatter around the mean of their strategy, drawn anew per seed of a study."""

    def score(labels: Mapping[str, str], run_seed: int) -> float:
        name = labels["strategy"]
        place = sorted(means).index(name)
        random = np.random.default_rng([seed, place, run_seed])
        return float(means[name] + deviation * random.normal())

    return score
