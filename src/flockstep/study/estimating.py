"""How long a study will take: from runs that are done, and else from a few steps of each task."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from flockstep.backends import Simulator
from flockstep.data import BatchGrowth
from flockstep.errors import DataError
from flockstep.spec import RunSpec
from flockstep.strategies import SyncSGD
from flockstep.study.planning import PlannedRun
from flockstep.study.records import Record
from flockstep.training import planned_steps, run_closely

FEW_STEPS, MORE_STEPS = 2, 8
MOST_WORKERS = 4
LONG_SECONDS = 10.0  # for a few steps: more of them would keep people waiting
LAUNCH_SECONDS = 3.0  # of workers that are processes


class Estimates:
    """Seconds of runs by the wall's clock, one thread each."""

    def __init__(self, runs: Sequence[PlannedRun], records: Mapping[str, Record]) -> None:
        known: dict[str, list[float]] = {}
        for run in runs:
            record = records.get(run.id)
            if record is not None and record.is_done:
                known.setdefault(run.cell.label, []).append(record.wall_seconds)
        self._by_cell = {label: fmean(seconds) for label, seconds in known.items()}
        self._probes: dict[str, tuple[float, float]] = {}

    def seconds_of(self, run: PlannedRun) -> float | None:
        """How long a run will take; None where nobody can tell how many steps it will be."""
        label = run.cell.label
        if label not in self._by_cell:
            if run.spec.seconds is not None and run.spec.backend != "sim":
                return run.spec.seconds + LAUNCH_SECONDS  # by the wall's clock
            try:
                steps = planned_steps(run.spec)
            except DataError:  # the data are not there yet
                return None
            if steps is None:
                return None
            fixed, per_step = self._probe(run.spec)
            self._by_cell[label] = fixed + per_step * steps * (run.spec.workers or 1)
        return self._by_cell[label]

    def _probe(self, spec: RunSpec) -> tuple[float, float]:
        """What a run takes to begin and end, and one worker for a step."""
        key = f"{spec.find_task().name} {_batch_of(spec)}"
        if key not in self._probes:
            workers = min(spec.workers or 1, MOST_WORKERS)
            first = _timed(spec, FEW_STEPS)  # what is loaded once, a job has loaded
            if first > LONG_SECONDS:  # loading is a small part of that: no more of it
                self._probes[key] = 0.0, first / (FEW_STEPS * workers)
                return self._probes[key]
            few, more = _timed(spec, FEW_STEPS), _timed(spec, MORE_STEPS)
            steps = (MORE_STEPS - FEW_STEPS) * workers
            self._probes[key] = few, max(0.0, more - few) / steps
        return self._probes[key]


def _batch_of(spec: RunSpec) -> Any:
    """Of a batch that grows, its end: a few steps do not tell when it would grow."""
    batch = spec.resolved().batch_size
    if not isinstance(batch, BatchGrowth):
        return batch
    return batch.maximum or batch.initial


def _timed(spec: RunSpec, steps: int) -> float:
    """Seconds that a few workers take for so many steps of the same task, from start to end."""
    short = spec.replace(
        backend="sim",
        strategy=SyncSGD(),
        workers=min(spec.workers or 1, MOST_WORKERS),
        batch_size=_batch_of(spec),
        steps=steps,
        target=None,
        look_every=f"{steps} steps",
        compute=None,
        network=None,
        faults=None,
        assignment=None,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began = time.perf_counter()
        run_closely(short, Simulator(lanes=1))
        return time.perf_counter() - began
    finally:
        torch.set_num_threads(threads)
