"""`compare`: the study of one line, which strategy is best for a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flockstep.errors import SpecError, unknown_name
from flockstep.fields import require
from flockstep.notation import as_spec, written
from flockstep.strategies import Strategy
from flockstep.study.cells import SPEC_FIELDS
from flockstep.study.declaration import DEFAULT_SEEDS, Study
from flockstep.study.outcome import Outcome
from flockstep.study.running import run_study
from flockstep.study.tuning import Tuning
from flockstep.tasks import Task

# What a comparison takes besides the fields of a run.
OF_STUDIES = ("metric", "direction", "margin", "test", "alpha", "budget")


def compare(
    task: str | Task,
    strategies: Sequence[Strategy[Any] | str] | Mapping[str, Strategy[Any] | str],
    *,
    seeds: int | Sequence[int] = DEFAULT_SEEDS,
    tune: Tuning | Mapping[str, Any] | Sequence[float] | None = None,
    folder: str | Path | None = None,
    jobs: int | None = None,
    on: str = "here",
    retry_failed: bool = False,
    progress: bool | None = None,
    report: str | Path | None = None,
    **fields: Any,
) -> Outcome:
    """Train `task` with each strategy and each seed, and compare them with the first.

    `strategies` may be a table that names them. `tune` gives each the same learning rates, a list
    or an `fs.Tuning`, and picks by validation. `folder`, `jobs`, `on`, `retry_failed`, `progress`
    and `report` are those of `fs.run_study`. All other arguments are fields of an `fs.RunSpec`,
    such as `workers`, `epochs` and `network`, or `metric`, `direction`, `margin`, `test`, `alpha`
    and `budget` of an `fs.Study`.

    Example:
        outcome = fs.compare("digits-mlp", [fs.SyncSGD(), fs.LocalSGD(8), fs.NoSync(0.1)],
                             seeds=5, workers=8, network="wan-100m")
        print(outcome)
    """
    study = comparison(task, strategies, seeds=seeds, tune=tune, **fields)
    return run_study(
        study,
        folder,
        jobs=jobs,
        on=on,
        retry_failed=retry_failed,
        progress=progress,
        report=report,
    )


def comparison(
    task: str | Task,
    strategies: Sequence[Strategy[Any] | str] | Mapping[str, Strategy[Any] | str],
    seeds: int | Sequence[int] = DEFAULT_SEEDS,
    tune: Tuning | Mapping[str, Any] | Sequence[float] | None = None,
    **fields: Any,
) -> Study:
    """The study that `compare` runs."""
    for name in fields:
        if name not in (*SPEC_FIELDS, *OF_STUDIES) or name in ("task", "strategy", "seed"):
            raise unknown_name("field of a comparison", name, [*SPEC_FIELDS, *OF_STUDIES])
    named = _named(strategies)
    name = task.name if isinstance(task, Task) else task
    if isinstance(tune, Sequence):
        tune = Tuning(list(tune))
    of_study = {each: fields.pop(each) for each in OF_STUDIES if each in fields}
    given = {each: value for each, value in fields.items() if value is not None}
    return Study(
        f"Which strategy is best for {name}?",
        base={"task": task, **given},
        axes={"strategy": named},
        seeds=seeds,
        tune=tune,
        name=f"compare-{name}".replace(":", "-").replace("/", "-"),
        **of_study,
    )


def _named(
    strategies: Sequence[Strategy[Any] | str] | Mapping[str, Strategy[Any] | str],
) -> dict[str, Any]:
    rule = "be a list of at least two strategies"
    is_some = isinstance(strategies, Sequence | Mapping) and not isinstance(strategies, str)
    require(is_some and len(strategies) > 1, "strategies", rule, strategies)
    if isinstance(strategies, Mapping):
        return {name: as_spec("strategy", each, Strategy) for name, each in strategies.items()}
    made = [as_spec("strategy", each, Strategy) for each in strategies]
    labels = [_label(each) for each in made]
    require(len({*labels}) == len(labels), "strategies", "have none twice", labels)
    return dict(zip(labels, made, strict=True))


def _label(strategy: Strategy[Any]) -> str:
    """As the command line has it; a strategy of a script by its own words."""
    try:
        return written(strategy)
    except SpecError:
        return repr(strategy)
