"""`run`: a whole training job in one call, from its spec to its result."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flockstep.backends import PATIENCE_SECONDS, Backend, Simulator, Torchrun
from flockstep.checkpoints import Checkpoint, drop_unfinished, newest, require_folder
from flockstep.comm import events_per_worker
from flockstep.errors import CheckpointError, InvalidField, WorkerLost, unknown_name
from flockstep.fields import require, require_flag, require_path
from flockstep.intervals import Interval
from flockstep.launch import BACKENDS, launch, make_backend
from flockstep.randomness import Purpose, drawing_from
from flockstep.result import Look, Result, described
from flockstep.spec import SIMULATED, RunSpec
from flockstep.strategies import Strategy
from flockstep.tasks import Task
from flockstep.training.flatness import under_noise
from flockstep.training.job import Job, Keeping
from flockstep.training.loop import train
from flockstep.training.preparing import prepared
from flockstep.training.progress_bar import steps_bar
from flockstep.training.recalibrating import with_own_statistics
from flockstep.training.reporting import OnLook, Reporter
from flockstep.training.resuming import (
    how_often,
    kept,
    newest_in,
    spec_of,
    without_backend,
)
from flockstep.training.trace_file import Track, require_trace_path, write_trace

EVERY, KEEP = "5 min", 2  # of checkpoints


def run(
    task: str | Task | RunSpec,
    strategy: Strategy[Any] | str | None = None,
    workers: int | None = None,
    backend: str | Backend | None = None,
    *,
    progress: bool | None = None,
    patience: float | None = PATIENCE_SECONDS,
    trace: str | Path | None = None,
    on_look: OnLook | None = None,
    checkpoint: str | Path | None = None,
    every: str | int | Interval = EVERY,
    keep: int = KEEP,
    **fields: Any,
) -> Result:
    """Train `task` with `strategy` on `workers` workers, by default 8, and evaluate the model that
    represents them.

    All but the last seven arguments are fields of an `fs.RunSpec`, which says what they mean: the
    budget (`epochs`, `steps`, `seconds` or `bytes`), `target`, `batch_size`, `lr`, `optimizer`,
    `schedule`, `assignment`, `sampling`, `network`, `compute`, `faults`, `look_every`, `measure`,
    `seed`, …
    `fs.run(spec)` runs a spec that is there already; `backend` may then be a backend object of the
    kind that it names, such as an `fs.LocalProcesses()` that serves several runs.

    `progress` shows a bar on stderr; by default only where that is a terminal. On real workers,
    one whose process has not run at all for `patience` seconds is lost. `trace` writes who
    computed, waited and sent when into that file, for ui.perfetto.dev.

    `on_look` is called with every `fs.Look` of the history once, soon after it was taken, and at
    the end with that of the final model: in the process and the thread that called `run`, under
    torchrun in that of rank 0. A look that turns out to have been the last of all is followed by
    that of the final model in its place. What it raises ends the run.

    `checkpoint` is a folder from which `fs.resume` goes on as if the run had never stopped; `every`
    says how often it is saved there, in epochs or steps of the run or in minutes by the wall's
    clock, and `keep` how many of the last whole checkpoints stay.

    Example:
        result = fs.run("digits-mlp", fs.LocalSGD(period=8), workers=8, seed=0)
        result.metrics["test_accuracy"], result.metrics["bytes_sent"]
    """
    if isinstance(task, RunSpec):
        spec = task
        given = {"strategy": strategy, "workers": workers, **fields}
        _require_known(fields)
        for name, value in given.items():
            require(value is None, name, f"be in the spec: spec.replace({name}=…)", value)
        place = make_place(spec, patience) if backend is None else _place_for(spec, backend)
    else:
        _require_known(fields)
        if strategy is None:
            rule = "be a strategy such as fs.LocalSGD(period=8)"
            raise InvalidField(f"'strategy' must {rule} (got None)")
        spec = RunSpec(task, strategy, workers, "sim" if backend is None else backend, **fields)
        place = backend if isinstance(backend, Backend) else make_place(spec, patience)
    is_asked_for = (every, keep) != (EVERY, KEEP)
    if checkpoint is None:
        rule = "be given where 'every' or 'keep' is"
        require(not is_asked_for, "checkpoint", rule, checkpoint)
        return run_on(place, spec, progress, trace, on_look)
    require_path("checkpoint", checkpoint)
    keeping = Keeping(Path(checkpoint).absolute(), *how_often(every, keep))
    if (before := newest(keeping.folder)) is not None:
        if not place.is_restart:
            raise CheckpointError(
                f"'checkpoint' must be a folder without a run (got {str(checkpoint)!r}, which "
                f"holds one at step {before.step}: fs.resume goes on with it)"
            )
        return resume(
            keeping.folder,
            spec=spec,
            backend=place,
            progress=progress,
            trace=trace,
            on_look=on_look,
        )
    return run_on(place, spec, progress, trace, on_look, keeping)


def resume(
    folder: str | Path,
    workers: int | None = None,
    *,
    spec: RunSpec | None = None,
    backend: str | Backend | None = None,
    progress: bool | None = None,
    trace: str | Path | None = None,
    on_look: OnLook | None = None,
) -> Result:
    """Go on with the run that was kept in `folder`, from its last whole checkpoint, and keep it
    there as before.

    In the simulator the result is, bit for bit, that of a run which was never stopped; elsewhere it
    is for methods whose workers wait for each other, and for the others all that was saved is as it
    was. Times by the wall, the trace, and what `on_look` hears are of the part since.

    `workers` may be another number where the workers wait for each other and share nothing: all
    then begin with the model that stood for the run, and what was dropped is said. `spec` is needed
    where the run's task exists in a script only.

    Example:
        fs.run("digits-mlp", fs.LocalSGD(period=8), workers=8, checkpoint="runs/a", every="1 epoch")
        fs.resume("runs/a")
    """
    require_path("folder", folder)
    folder = Path(folder).absolute()
    found = newest_in(folder)
    spec = spec_of(found, spec)
    every, keep = how_often(found.about["every"], found.about["keep"])
    place = make_place(spec) if backend is None else _place_for(spec, backend)
    if place.is_virtual != (found.about["backend"] == "sim"):
        raise CheckpointError(f"{str(found.path)!r} is of backend {found.about['backend']!r}")
    says_size = isinstance(place, Torchrun)  # itself
    workers = place.size(spec.workers if workers is None and not says_size else workers)
    return run_on(
        place,
        spec.replace(workers=workers),
        progress,
        trace,
        on_look,
        Keeping(folder, every, keep),
        found,
    )


def _require_known(fields: Iterable[str]) -> None:
    for name in fields:
        if name not in SPEC_FIELDS:
            raise unknown_name("field of a run", name, SPEC_FIELDS)


SPEC_FIELDS = {field.name: field for field in dataclasses.fields(RunSpec)}
_positional = [*inspect.signature(run).parameters.values()]
_named = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
    for name, field in SPEC_FIELDS.items()
    if name not in ("task", "strategy", "workers", "backend")
]
# What `help` shows: all fields of a spec by name.
run.__signature__ = inspect.Signature([*_positional[:4], *_named, *_positional[4:-1]])  # type: ignore[attr-defined]


def make_place(spec: RunSpec, patience: float | None = PATIENCE_SECONDS) -> Backend:
    simulated = {name: getattr(spec, name) for name in SIMULATED}
    return make_backend(spec.backend, patience, **simulated)


def _place_for(spec: RunSpec, backend: str | Backend) -> Backend:
    """A backend object, if it only says where the spec runs. A simulator would say more."""
    named = BACKENDS.get(spec.backend) if isinstance(spec.backend, str) else None
    if isinstance(backend, Simulator) or not isinstance(backend, named or ()):
        rule = "be in the spec: spec.replace(backend=…)"
        raise InvalidField(f"'backend' must {rule} (got {backend!r})")
    return backend


def run_on(
    place: Backend,
    spec: RunSpec,
    progress: bool | None = None,
    trace: str | Path | None = None,
    on_look: OnLook | None = None,
    keeping: Keeping | None = None,
    resumed: Checkpoint | None = None,
) -> Result:
    """Run `spec` on a backend that is there."""
    if trace is not None:
        require_path("trace", trace)
        require_trace_path(Path(trace))
    spec = spec.replace(workers=place.size(spec.workers))
    assert spec.workers is not None
    limit = None if trace is None else events_per_worker(spec.workers)
    result, tracks = _ran(place, spec, progress, on_look, keeping, resumed, limit)
    if trace is not None and place.is_lead:
        title = f"{result.config['task']} {spec.strategy.name}"
        write_trace(Path(trace), tracks, title=f"{title}, {spec.workers} workers, {spec.backend}")
    return result


def run_closely(
    spec: RunSpec, place: Backend, measure: tuple[str, ...] = (), events: int | None = None
) -> tuple[Result, list[Track | None]]:
    """Run `spec`, and see more of it than its record tells: looks that measure more, and up to so
    many events of each worker. The run is the same.
    """
    measure = tuple(each for each in measure if each not in spec.measure)
    return _ran(place, spec, progress=False, trace_limit=events, also_measured=measure)


def _ran(
    place: Backend,
    spec: RunSpec,
    progress: bool | None = None,
    on_look: OnLook | None = None,
    keeping: Keeping | None = None,
    resumed: Checkpoint | None = None,
    trace_limit: int | None = None,
    also_measured: tuple[str, ...] = (),
) -> tuple[Result, list[Track | None]]:
    """The result of a run, and what each worker did and when, where that is asked for."""
    if progress is not None:
        require_flag("progress", progress)
    rule = "be callable with an fs.Look"
    require(on_look is None or callable(on_look), "on_look", rule, on_look)
    if keeping is not None:
        require_folder(keeping.folder)
        if place.is_lead:
            drop_unfinished(keeping.folder)
    spec = spec.replace(workers=place.size(spec.workers))
    job = prepared(spec, place, trace_limit, on_look is not None, also_measured)
    job = kept(job, place, keeping, resumed)
    reporter = None if on_look is None or not place.is_lead else Reporter(job, on_look)
    began = time.perf_counter()
    shown = progress if place.is_lead else False  # one bar for all processes of a torchrun
    title = f"{job.task.name} {spec.strategy.name}"
    try:
        with steps_bar(title, job.steps, shown) as watch:
            outcomes = launch(
                functools.partial(train, job=replace(job, spec=without_backend(spec))),
                spec.workers,
                place,
                seed=spec.seed,
                on_failure=spec.on_failure,
                watch=watch,
                hear=None if reporter is None else reporter.hear,
            )
    finally:
        if job.snapshots is not None:
            job.snapshots.join()  # also of a run that has failed: it is to go on from there
    if job.snapshots is not None:
        job.snapshots.close()
    result = _result(job, outcomes, place, time.perf_counter() - began)
    if reporter is not None:
        reporter.complete(result.history, is_resumed=resumed is not None)
    return result, [each["trace"] if isinstance(each, dict) else None for each in outcomes]


def _result(job: Job, outcomes: list[Any], place: Backend, wall_seconds: float) -> Result:
    """`outcomes`: a report, a loss, or None for a worker whose report went to the process that
    leads.
    """
    losses = [outcome for outcome in outcomes if isinstance(outcome, WorkerLost)]
    lost = [
        {name: getattr(loss, name) for name in ("rank", "step", "seconds", "exit_code")}
        for loss in losses
    ]
    reports = [outcome for outcome in outcomes if isinstance(outcome, dict)]
    metrics: dict[str, Any] = {
        "wall_seconds": wall_seconds,
        "workers": len(outcomes),
        "lost": len(lost),
    }
    config, is_copy = described(job.spec, job.task, place), not place.is_lead
    if not reports:  # this process does not lead, and its own worker is among the lost
        return Result(config, metrics, [], [], lost, job.spec, _is_copy=is_copy)
    report = next(report for report in reports if report["model"] is not None)
    model = job.task.model_of(report["model"])
    if job.recalibration is not None and not report["has_reached"]:  # whose look has done that
        with_own_statistics(model, job.recalibration)
    loss, accuracy = job.task.evaluate(model)
    scores = {"test_accuracy": accuracy, "test_loss": loss}
    if job.training_sample is not None:
        with drawing_from(Purpose.RECALIBRATION, 0):
            _, scores["train_accuracy"] = job.task.evaluate(model, job.training_sample)
    metrics = {**scores, **report["metrics"], **metrics}
    history = _history(job, report, model, metrics)
    if job.spec.target is not None:
        metrics |= _to_target(job, history)
    if "flatness" in job.spec.measure:
        metrics |= under_noise(model, job.task)
    replicas = [each["replica"] for each in reports]
    return Result(
        config, metrics, history, replicas, lost, job.spec, _model=model, _is_copy=is_copy
    )


def _history(
    job: Job, report: dict[str, Any], model: torch.nn.Module, metrics: Mapping[str, Any]
) -> list[Look]:
    """All looks. The last one is of the final model."""
    looks = [Look(**row) for row in report["history"]]
    if job.board is not None:
        looks = job.board.looks()
    if report["has_reached"]:
        reached = next(place for place, look in enumerate(looks) if job.is_reached_by(look))
        return looks[: reached + 1]  # others may have been under way
    watched = job.task.watched
    loss, accuracy = metrics["test_loss"], metrics["test_accuracy"]
    if watched is not job.task.test:
        loss, accuracy = job.task.evaluate(model, watched)
    scores = {"loss": loss, "accuracy": accuracy, "train_accuracy": metrics.get("train_accuracy")}
    last = Look(**report["last_look"] | scores)
    if looks and _is_of_the_end(job, looks[-1], last):
        before = looks.pop()
        last = replace(last, train_loss=before.train_loss)
    return [*looks, last]


def _is_of_the_end(job: Job, look: Look, last: Look) -> bool:
    """Whether the look came after the last step of all, which nobody could know then: of a stream,
    or where a budget ended the run there.

    In virtual time a look by time is of its own moment, even if only an exchange was left to do.
    """
    no_step_since = last.train_loss is None
    by_virtual_time = job.board is not None and job.spec.look_every.unit == "seconds"
    return no_step_since and (look.seconds == last.seconds or not by_virtual_time)


def _to_target(job: Job, history: list[Look]) -> dict[str, Any]:
    """What it took to reach the target; None where it was not reached."""
    reached = next((look for look in history if job.is_reached_by(look)), None)
    return {
        "seconds_to_target": reached and reached.seconds,
        "steps_to_target": reached and reached.step,
        "bytes_to_target": reached and reached.bytes_sent,
        "epochs_to_target": reached and reached.epoch,
    }
