"""What a run that is kept in a folder has to know, and one that goes on from there."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flockstep.backends import Backend
from flockstep.checkpoints import Checkpoint, newest
from flockstep.errors import CheckpointError, SpecError
from flockstep.fields import require_integer
from flockstep.intervals import Interval
from flockstep.spec import RunSpec
from flockstep.training.another_size import start_of
from flockstep.training.job import Job, Keeping
from flockstep.training.preparing import prepared
from flockstep.training.snapshots import Resumed, Snapshots

NOT_COMPARED = ("task", "workers", "backend")


def how_often(every: str | int | Interval, keep: int) -> tuple[Interval, int]:
    require_integer("keep", keep, 1)
    return Interval.read(every, "every"), keep


def saved_spec(folder: Path) -> RunSpec:
    """The spec of the run that was kept in a folder."""
    return spec_of(newest_in(folder), None)


def newest_in(folder: Path) -> Checkpoint:
    found = newest(folder)
    if found is None:
        raise CheckpointError(f"{str(folder)!r} holds no whole checkpoint")
    return found


def spec_of(found: Checkpoint, given: RunSpec | None) -> RunSpec:
    if "spec" not in found.about:
        raise CheckpointError(
            f"{str(found.path)!r} is of a loop of one's own: worker.resume goes on with it"
        )
    written = found.about["spec"]
    if written is None:
        if given is None:
            raise CheckpointError(
                f"{str(found.path)!r} does not hold the run's spec, which could not be written "
                f"({found.about['not_written']}): resume with spec=…"
            )
        before = found.about["told"]
        for name, text in _told(given).items():
            if before.get(name, text) != text:
                raise CheckpointError(
                    f"{str(found.path)!r} is of another run, with {name} {before[name]} "
                    f"(got {text})"
                )
        return given.replace(workers=found.about["workers"])
    spec = RunSpec.from_json(json.dumps(written))
    if given is not None and given.replace(workers=spec.workers) != spec:
        raise CheckpointError(f"{str(found.path)!r} is of another run: {spec!r} (got {given!r})")
    return spec


def _told(spec: RunSpec) -> dict[str, str]:
    """What can be compared of a spec that cannot be written. Its task cannot."""
    names = [each.name for each in fields(spec) if each.name not in NOT_COMPARED]
    told = {name: repr(getattr(spec, name)) for name in names}
    return {name: text for name, text in told.items() if " at 0x" not in text}  # functions


def kept(job: Job, place: Backend, keeping: Keeping | None, resumed: Checkpoint | None) -> Job:
    """The same with checkpoints."""
    spec, board = job.spec, job.board
    if resumed is not None and not _is_of_all(resumed, spec.workers):
        before = prepared(spec.replace(workers=resumed.about["workers"]), place)
        job = replace(job, start=start_of(resumed, spec, before, job))
    elif resumed is not None:
        job = replace(job, resumed=resumed if board is None else Resumed(resumed.read(0)))
    if keeping is None:
        return job
    about: dict[str, Any] = {
        "every": str(keeping.every),
        "keep": keeping.keep,
        "workers": spec.workers,
        "backend": "sim" if place.is_virtual else str(without_backend(spec).backend),
        "spec": None,
    }
    try:
        about["spec"] = json.loads(spec.to_json())
    except SpecError as reason:  # a task that exists in a script only
        about |= {"not_written": str(reason), "told": _told(spec)}
    job = replace(job, keeping=replace(keeping, about=about))
    if board is None:
        return job
    assert job.keeping is not None and spec.workers is not None
    return replace(job, snapshots=Snapshots(job, job.keeping, board, spec.workers))


def _is_of_all(found: Checkpoint, workers: int | None) -> bool:
    """Whether a checkpoint has a part of each of so many workers. Simulated ones share a part."""
    parts = workers if found.about["backend"] != "sim" else 1
    return found.about["workers"] == workers and len(found.parts) == parts


def without_backend(spec: RunSpec) -> RunSpec:
    """As workers get it: a backend that is an object stays in this process."""
    if isinstance(spec.backend, str):
        return spec
    sent = copy.copy(spec)
    object.__setattr__(sent, "backend", type(spec.backend).__name__)
    return sent
