"""What a checkpoint holds of one worker: all that it needs to go on after a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flockstep.errors import CheckpointError
from flockstep.strategies import load_state, read_state, save_state, shared_tensors

if TYPE_CHECKING:
    from flockstep.worker import Worker

Part = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, for safetensors, and values, for JSON, both by path. They are copies."""

OF_WORKER = (
    "steps",
    "_steps_before",
    "_accumulate",
    "_total_steps",
    "loss",
    "smooth_loss",
    "accuracy",
)


def part_of(worker: Worker, **more: Any) -> Part:
    """A copy of a worker's data between two steps, and of `more` data."""
    course = worker.course
    if course.taken != course.used:
        raise CheckpointError(
            f"rank {worker.comm.rank}: a checkpoint is taken right after worker.step "
            f"(got one with {course.taken - course.used} batches that no step has used)"
        )
    tensors, values = save_state(worker.state, type(worker.strategy).__name__)
    shared = shared_tensors(worker.state)
    of_worker = {name: getattr(worker, name) for name in OF_WORKER}
    if worker.strategy.needs_loss_after_step:  # a run that goes on may have no step left
        of_worker["loss_after_step"] = worker.loss_after_step
    data = {
        "rank": worker.comm.rank,
        "flat": worker.flat.state,
        "outside": worker.outside_tensors(),
        "optimizer": worker.optimizer.state_dict(),
        "state": {"tensors": tensors, "values": json.dumps(values)},
        "known": {path: tensor.known() for path, tensor in shared.items()},
        "worker": of_worker,
        "course": course.saved(),
        "is_in_loop": worker.is_in_loop,
        "is_exhausted": worker.is_in_loop and not worker.has_more_batches,
        "comm": worker.comm.saved(),
        **more,
    }
    return save_state(data, "a checkpoint")


def joined(parts: Mapping[str, Part]) -> Part:
    """Several parts as one."""
    tensors = {
        f"{name}/{path}": tensor for name, (own, _) in parts.items() for path, tensor in own.items()
    }
    return tensors, {name: values for name, (_, values) in parts.items()}


def parted(part: Part) -> dict[str, Part]:
    """The parts that were joined."""
    tensors, values = part
    parts: dict[str, Part] = {name: ({}, own) for name, own in values.items()}
    for path, tensor in tensors.items():
        name, _, rest = path.partition("/")
        parts[name][0][rest] = tensor
    return parts


def read_part(part: Part) -> dict[str, Any]:
    """What a part says, as `load_part` takes it."""
    data: dict[str, Any] = read_state(*part)
    return data


@torch.no_grad()
def load_part(worker: Worker, data: dict[str, Any]) -> None:
    """Put a worker, which has just been made, where the part was taken. Its comm was put there."""
    own, saved = worker.flat.state, data["flat"]
    outside = worker.outside_tensors()
    fits = own.shape == saved.shape and own.dtype == saved.dtype
    shapes = [tensor.shape for tensor in outside]
    if not fits or shapes != [tensor.shape for tensor in data["outside"]]:
        raise CheckpointError(
            f"rank {worker.comm.rank}: the checkpoint is of a model with {saved.numel()} × "
            f"{saved.dtype} (got one with {own.numel()} × {own.dtype})"
        )
    own.copy_(saved)
    for tensor, value in zip(outside, data["outside"], strict=True):
        tensor.copy_(value)
    worker.optimizer.load_state_dict(data["optimizer"])
    load_state(worker.state, data["state"]["tensors"], json.loads(data["state"]["values"]))
    for path, shared in shared_tensors(worker.state).items():
        if path not in data["known"]:
            raise CheckpointError(
                f"rank {worker.comm.rank}: the checkpoint has no {path!r}, which "
                f"{type(worker.strategy).__name__} shares: another version has written it"
            )
        shared.know(data["known"][path])
    for name in OF_WORKER:
        setattr(worker, name, data["worker"][name])
    if worker.strategy.needs_loss_after_step:
        # Older checkpoints have only that of before the step.
        worker.loss_after_step = data["worker"].get("loss_after_step", worker.loss)
    worker.course.load(data["course"], data["is_in_loop"], data["is_exhausted"])
    worker.note_changes()
