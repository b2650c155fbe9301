"""From cells and seeds to runs: what a study runs, in which order, under which ids."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flockstep.data import BatchGrowth, GlobalBatch
from flockstep.errors import InvalidField, SpecError
from flockstep.fields import require
from flockstep.spec import RunSpec
from flockstep.study.cells import Cell
from flockstep.study.declaration import Study
from flockstep.study.metrics import (
    LIMITS,
    NEEDS,
    REPLICA_SCORES,
    cost_to,
    default_direction,
    is_cost,
    is_score,
    value_of,
)
from flockstep.study.records import Record
from flockstep.study.tuning import Pick, Tuning, picked


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study.

    Fields:
        is_shown: the run of its cell of which the report shows workers and replicas, too.
        rate: the learning rate that it tries; None for a run that counts.
    """

    cell: Cell
    spec: RunSpec
    id: str
    is_shown: bool = False
    rate: float | None = None

    @property
    def label(self) -> str:
        tried = "" if self.rate is None else f", trying lr={self.rate:g}"
        return f"{self.cell.label}, seed {self.spec.seed}{tried}"

    @property
    def is_alone(self) -> bool:
        """Whether it needs the machine for itself: its clock is the wall's."""
        return self.spec.backend != "sim"


def planned_runs(
    study: Study, rates: Mapping[str, float | None], only: Mapping[str, str] | None = None
) -> list[PlannedRun]:
    """The runs that count, seed by seed, so that all cells are seen early. `rates`: what was
    picked for each cell of a study that tunes; cells without a rate are left out.
    """
    runs = []
    for number, seed in enumerate(study.seed_list):
        for cell in _chosen(study, only):
            rate = rates.get(cell.label)
            if study.tune is None or rate is not None:
                spec, run_id = _spec_and_id(study, cell, seed, rate)
                runs.append(PlannedRun(cell, spec, run_id, is_shown=number == 0))
    return runs


def planned_tries(study: Study, only: Mapping[str, str] | None = None) -> list[PlannedRun]:
    """The runs that tuning takes."""
    if study.tune is None:
        return []
    assert isinstance(study.tune, Tuning)
    tries = []
    for number, seed in enumerate(tuning_seeds(study)):
        for cell in _chosen(study, only):
            for rate in study.tune.rates:
                spec, run_id = _spec_and_id(study, cell, seed, rate)
                # One of them may become the run of its cell that is shown.
                tries.append(PlannedRun(cell, spec, run_id, is_shown=number == 0, rate=rate))
    return tries


def _spec_and_id(study: Study, cell: Cell, seed: int, rate: float | None) -> tuple[RunSpec, str]:
    """The run of a cell. Both take a millisecond or two, and are asked for again and again."""
    key = (cell.label, seed, rate)
    if key not in study.memory:
        spec = spec_of_cell(study, cell, seed)
        if rate is not None:
            spec = spec.replace(lr=rate)
        study.memory[key] = spec, id_of(spec)
    spec, run_id = study.memory[key]
    return spec, run_id


def tuning_seeds(study: Study) -> tuple[int, ...]:
    """The first of the study's own: a try with the rate that is picked is then a run that counts,
    and is not run again.
    """
    assert isinstance(study.tune, Tuning)
    wanted = study.tune.seeds
    own = study.seed_list[:wanted]
    more = range(max(own) + 1, max(own) + 1 + wanted - len(own))
    return (*own, *more)


def _chosen(study: Study, only: Mapping[str, str] | None) -> Iterable[Cell]:
    wanted = only or {}
    return [cell for cell in study.cells if wanted.items() <= cell.labels.items()]


def spec_of_cell(study: Study, cell: Cell, seed: int) -> RunSpec:
    """The run of a cell, with the study's budget, and validation data where it tunes."""
    spec = cell.spec(seed)
    require(spec.backend != "torchrun", "backend", "be one that a study can start", spec.backend)
    if study.tune is not None:
        require(spec.lr is None, "lr", "be left to 'tune'", spec.lr)
        assert isinstance(study.tune, Tuning)
        if spec.find_task().validation is None:
            spec = spec.replace(validation=study.tune.validation)
    for name, value in (study.budget or {}).items():
        if name == "samples":
            name, value = "steps", _steps_for(spec, value)
        spec = spec.replace(**{name: value if name == "seconds" else int(value)})
    return spec


def _steps_for(spec: RunSpec, samples: float) -> int:
    """So many steps that all workers together process that many samples, or a little more."""
    batch = spec.resolved().batch_size
    rule = "be a number where the budget is one of samples"
    require(not isinstance(batch, BatchGrowth), "batch_size", rule, batch)
    if isinstance(batch, GlobalBatch):
        return math.ceil(samples / batch.size)
    assert isinstance(batch, int)
    return math.ceil(samples / (batch * (spec.workers or 1)))


def id_of(spec: RunSpec) -> str:
    """The id of a spec. One that cannot be written, as its task or strategy is of a script, has one
    that holds as long as this process does.
    """
    try:
        return spec.id
    except SpecError:
        told = f"{spec!r} {id(spec.task)} {id(type(spec.strategy))}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def require_written(study: Study) -> None:
    """A folder outlives the script that a task or a strategy was made in."""
    for cell in study.cells:
        try:
            cell.spec(0).to_json()
        except SpecError as error:
            raise SpecError(f"{error}; or leave the folder out, and nothing is kept") from error


def require_one_score(study: Study) -> None:
    """All cells have the same score, if that is what is compared, and measure what is shown."""
    shown = (("metric", study.metric), *(("also_shown", each) for each in study.also_shown))
    for field, metric in shown:
        needed = NEEDS.get(metric)
        for cell in study.cells:
            is_measured = needed is None or needed in cell.spec(0).measure
            require(is_measured, field, f"be measured: measure = {needed!r}", metric)
    if not is_score(study.metric):
        return
    names: dict[str, str] = {}
    for cell in study.cells:
        task = cell.spec(0).find_task()
        names.setdefault(task.score_name, task.name)
    if len(names) > 1:
        told = " and ".join(f"{name} of {task!r}" for name, task in names.items())
        raise InvalidField(
            f"'metric' must be the same score in all cells (got {study.metric}, which is {told})"
        )


def score_to_pick_by(metric: str) -> str:
    """What tuning goes by, on the validation data: a loss where that is compared, the cost to the
    target where that is, the replicas' own score where that is, and else the representative's.
    """
    if is_cost(metric):
        return metric
    if metric.removeprefix("test_") in REPLICA_SCORES:
        return metric.removeprefix("test_")
    return "loss" if metric.endswith("loss") else "accuracy"


def picks_of(study: Study, records: Mapping[str, Record]) -> dict[str, Pick]:
    """What tuning has found so far, by the label of each cell."""
    if study.tune is None:
        return {}
    tries: dict[str, list[PlannedRun]] = {}
    for run in planned_tries(study):
        tries.setdefault(run.cell.label, []).append(run)
    return {label: _pick(study, runs, records) for label, runs in tries.items()}


def _pick(study: Study, tries: Sequence[PlannedRun], records: Mapping[str, Record]) -> Pick:
    metric = score_to_pick_by(study.metric)
    best, means = _best(study, tries, records, metric)
    if best is None and is_cost(metric):  # no rate has reached the target: the nearest to it
        best, means = _best(study, tries, records, "accuracy")
    known = [records[run.id] for run in tries if run.id in records]
    seconds = sum(record.wall_seconds for record in known)
    is_complete = len(known) == len(tries)
    return Pick(best if is_complete else None, means, len(tries), seconds, is_complete)


def _best(
    study: Study, tries: Sequence[PlannedRun], records: Mapping[str, Record], metric: str
) -> tuple[float | None, dict[float, float | None]]:
    """The best rate by one figure of its tries, and the mean figure of each rate."""
    figures: dict[float, list[float | None]] = {}
    for run in tries:
        assert run.rate is not None
        record = records.get(run.id)
        figures.setdefault(run.rate, []).append(_figure(study, record, metric))
    is_compared = metric == study.metric or metric == study.metric.removeprefix("test_")
    higher = study.higher_is_better if is_compared else default_direction(metric) == "higher"
    return picked(figures, higher)


def _figure(study: Study, record: Record | None, metric: str) -> float | None:
    if record is None:
        return None
    if metric in LIMITS and metric not in record.metrics:
        return None if study.target is None else cost_to(study.target, metric, record.history)
    return value_of(metric, record.metrics, record.history)
