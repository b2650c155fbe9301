"""From cells and seeds to runs: what a study runs, in which order, under which ids."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.data import BatchGrowth, GlobalBatch
from flockstep.errors import InvalidField, SpecError
from flockstep.fields import require
from flockstep.spec import RunSpec
from flockstep.study.cells import Cell
from flockstep.study.declaration import Study
from flockstep.study.metrics import is_score, value_of
from flockstep.study.records import Record
from flockstep.study.tuning import Pick, Tuning, picked
from flockstep.tasks import Task


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
    """The id of a spec. A task that exists in a script only counts by its name."""
    if not isinstance(spec.task, Task):
        return spec.id
    stand_in = spec.replace(task="digits-mlp", batch_size=_batch_of(spec))
    told = f"{spec.task.name} {stand_in.id} {stand_in.lr} {spec.optimizer}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _batch_of(spec: RunSpec) -> Any:
    task = spec.find_task()
    return spec.batch_size or task.batch_size_for(spec.workers or 1)


def require_written(study: Study) -> None:
    """A folder outlives the script that a task was made in."""
    for cell in study.cells:
        task = cell.spec(0).task
        if isinstance(task, Task):
            raise SpecError(
                f"task {task.name!r} was made in a script: its records cannot be kept in a folder; "
                "put it in a module and name it 'package.module:task', or leave the folder out"
            )


def require_one_score(study: Study) -> None:
    """All cells have the same score, if that is what is compared."""
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
    """What tuning goes by: the same figure, on the validation data."""
    return {"test_accuracy": "accuracy", "test_loss": "loss"}.get(metric, metric)


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
    scores: dict[float, list[float | None]] = {}
    for run in tries:
        assert run.rate is not None
        record = records.get(run.id)
        value = None if record is None else value_of(metric, record.metrics, record.history)
        scores.setdefault(run.rate, []).append(value)
    best, means = picked(scores, study.higher_is_better)
    known = [records[run.id] for run in tries if run.id in records]
    seconds = sum(record.wall_seconds for record in known)
    is_complete = len(known) == len(tries)
    return Pick(best if is_complete else None, means, len(tries), seconds)
