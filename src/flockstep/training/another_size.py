"""A run goes on from a checkpoint with another number of workers."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flockstep.backends import run_aside
from flockstep.checkpoints import Checkpoint, parted, read_part
from flockstep.comm import Comm
from flockstep.errors import CheckpointError
from flockstep.flat import outside_tensors
from flockstep.spec import RunSpec
from flockstep.training.board import Copy, representative
from flockstep.training.figures import Figures
from flockstep.training.job import Job
from flockstep.worker import COUNTERS, Worker


@dataclass(frozen=True)
class Start:
    """What all workers begin with.

    Fields:
        model: its parameters and buffers.
        optimizer: its state, if it was the same on all workers.
        steps: that count as taken.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    steps: int


def start_of(found: Checkpoint, spec: RunSpec, before: Job, job: Job) -> Start:
    """The start of a run whose workers are not as many as those of the checkpoint. `before` is the
    job as it was, `job` as it will be.
    """
    parts = _parts_of(found)
    _require_movable(found, spec, parts, job)
    shown = _representative(parts, before)
    optimizers = [part["optimizer"] for part in parts]
    is_same = all(_are_equal(each, optimizers[0]) for each in optimizers[1:])
    steps = _steps(parts, before, job)
    dropped = ["the strategy's state", "clocks, counts and looks so far"]
    if not is_same:
        dropped.insert(0, "the optimizers' states, which were not the same on all workers")
    warnings.warn(
        f"the run goes on after step {steps} with {job.spec.workers} workers in place of "
        f"{len(parts)}, all with the model that stood for it; dropped: {'; '.join(dropped)}",
        stacklevel=3,
    )
    return Start(shown, optimizers[0] if is_same else None, steps)


def _parts_of(found: Checkpoint) -> list[dict[str, Any]]:
    """What every worker has saved, in rank order."""
    if found.about["backend"] != "sim":
        return [read_part(found.read(number)) for number in found.parts]
    parts = parted(found.read(0))
    workers = map(str, range(found.about["workers"]))
    return [read_part(parts[rank]) for rank in workers if rank in parts]  # others were lost


def _require_movable(
    found: Checkpoint, spec: RunSpec, parts: list[dict[str, Any]], job: Job
) -> None:
    reason = None
    if not spec.strategy.waits or any(part["known"] for part in parts):
        reason = f"workers of {spec.strategy!r} share tensors, or never wait for each other"
    elif spec.seconds is not None or spec.bytes is not None:
        reason = "its budget is one of seconds or bytes"
    elif job.timetable is None:
        reason = "its data are a stream"
    if reason is not None:
        raise CheckpointError(
            f"{str(found.path)!r} is of {len(parts)} workers and cannot go on with "
            f"{job.spec.workers}: {reason}"
        )


def _steps(parts: list[dict[str, Any]], before: Job, job: Job) -> int:
    """After how many steps as many epochs will have passed. A budget of steps counts them as they
    were.
    """
    steps: int = parts[0]["worker"]["steps"]
    if job.spec.steps is not None:
        return steps
    assert before.timetable is not None and job.timetable is not None
    return job.timetable.step_of(before.timetable.epochs_done(steps))


def _representative(parts: list[dict[str, Any]], before: Job) -> dict[str, Tensor]:
    """The state of the model that stood for the run."""

    def program(comm: Comm) -> dict[str, Tensor]:
        task, spec = before.task, before.spec
        model = task.model()
        optimizer = spec.make_optimizer(task, model.parameters())
        worker = Worker(comm, model, optimizer, spec.strategy, before.schedule)
        copies = {rank: _copy(part) for rank, part in enumerate(parts)}
        with torch.no_grad():
            worker.flat.state.copy_(
                representative(spec.strategy, copies, {}, worker, workers=len(parts))
            )
            for own, saved in zip(outside_tensors(model), parts[0]["outside"], strict=True):
                own.copy_(saved)
        return {name: value.clone() for name, value in model.state_dict().items()}

    with torch.random.fork_rng(devices=[]):  # what models draw is nothing to the run
        state: dict[str, Tensor] = run_aside(program, 1, before.spec.seed)[0]
    return state


def _copy(part: dict[str, Any]) -> Copy:
    known = part["worker"] | part["course"] | {"total_steps": part["worker"]["_total_steps"]}
    unseen: list[Any] = [0.0] * 12  # nobody looks at them
    figures = Figures(*unseen)
    counters = {name: known[name] for name in (*COUNTERS, "loss_after_step") if name in known}
    state, values = part["state"]["tensors"], json.loads(part["state"]["values"])
    return Copy(figures, part["flat"], state, values, {}, counters)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)
