"""Checkpoints that all workers take, and go on from, together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flockstep.checkpoints.folder import Checkpoint, Writer
from flockstep.checkpoints.part import load_part, part_of, read_part
from flockstep.comm import Comm
from flockstep.errors import CheckpointError
from flockstep.strategies import shared_tensors

if TYPE_CHECKING:
    from flockstep.worker import Worker


def save_together(worker: Worker, writer: Writer, about: dict[str, Any], **more: Any) -> None:
    """All workers copy themselves between two steps, while nothing is half exchanged, and write
    their copies aside. Called off the clock.
    """
    comm = worker.comm
    comm.barrier()
    world = comm.saved_world() if comm.rank == comm.members[0] else None
    shared = {
        path: tensor.peek()
        for path, tensor in shared_tensors(worker.state).items()
        if tensor.is_kept_here and not comm.meter.is_virtual
    }  # in virtual time they are part of the world
    part = part_of(worker, shared=shared, world=world, **more)
    step = torch.tensor(worker.steps)
    comm.all_reduce(step, op="max")
    comm.barrier()  # until all have their copies
    writer.write(int(step), comm.rank, part, comm.members, about)


def require_same(comm: Comm, checkpoint: Checkpoint | None) -> None:
    """All workers must have found the same checkpoint, or none."""
    found = (0, 0) if checkpoint is None else (checkpoint.life, checkpoint.serial)
    with comm.off_the_clock():
        told = comm.all_gather(torch.tensor(found))
    if any(tuple(each.tolist()) != found for each in told):
        seen = ", ".join(f"rank {rank}: {each.tolist()}" for rank, each in told.by_rank().items())
        raise CheckpointError(
            f"all workers must see the same checkpoints (got life and number of the last: {seen})"
        )


def go_on_together(worker: Worker, checkpoint: Checkpoint) -> dict[str, Any]:
    """All workers, which have just been made, go on from a checkpoint. Return this one's part."""
    comm = worker.comm
    if checkpoint.parts != tuple(range(comm.size)):
        raise CheckpointError(
            f"{str(checkpoint.path)!r} is of ranks {', '.join(map(str, checkpoint.parts))} "
            f"(got {comm.size} workers)"
        )
    require_same(comm, checkpoint)
    data = read_part(checkpoint.read(comm.rank))
    with comm.off_the_clock():
        comm.barrier()
        tensors = shared_tensors(worker.state)
        for path, value in data["shared"].items():
            tensors[path].write(value)
        comm.barrier()
    comm.go_back(data["comm"], data["world"])
    load_part(worker, data)
    if not comm.meter.is_virtual:
        with comm.off_the_clock(is_done=bool(data.get("is_over"))):
            comm.barrier()  # a model may live in memory that others load as well
    return data
