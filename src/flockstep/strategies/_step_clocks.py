"""How methods keep workers within a bound of each other: clocks of the steps each has finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flockstep.comm import Comm, SharedTensor

if TYPE_CHECKING:
    from flockstep.worker import Worker

FOREVER = 1 << 40  # steps ahead of everybody: nobody waits for who has finished


def step_clocks(worker: Worker) -> SharedTensor:
    """The steps that each worker has finished."""
    # A worker that begins anew has taken steps before.
    return worker.comm.shared("clocks", torch.full((worker.comm.size,), worker.steps))


def tick_of(comm: Comm) -> Tensor:
    """What adds one to this worker's clock."""
    tick = torch.zeros(comm.size, dtype=torch.int64)
    tick[comm.rank] = 1
    return tick


def wait_for_the_slowest(worker: Worker, clocks: SharedTensor, staleness: int) -> None:
    """Until this worker is at most `staleness` steps ahead of everybody who is not lost."""
    comm = worker.comm

    def lead(clocks: Tensor) -> int:
        return worker.steps - int(clocks[list(comm.members)].min())

    clocks.wait_until(lambda clocks: lead(clocks) <= staleness)


def advance(clocks: SharedTensor, tick: Tensor, steps: int) -> None:
    # Adding nothing to the others' clocks must not undo what they add.
    with clocks.changing():
        clocks.add(tick, scale=steps)
