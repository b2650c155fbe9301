"""What torch's own processes do, to compare with. Imports no Flockstep: it would slow their
start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timing import seconds_per_call
from benchmarks.training import ordinary_step, synthetic_batches


def idle(rank: int) -> None:
    """Import torch, as this module does, and nothing else."""


def spawn_with_gloo(measure: Callable[..., Any], workers: int, *arguments: object) -> Any:
    """Call `measure(*arguments)` in each of `workers` spawned processes; return what it gave in
    rank 0.
    """
    answers = get_context("spawn").SimpleQueue()
    with TemporaryDirectory() as folder:
        meeting = (Path(folder) / "store").as_uri()  # a file: no port to be free
        spawn(_in_group, (workers, meeting, answers, measure, arguments), nprocs=workers)
    return answers.get()


def _in_group(
    rank: int,
    workers: int,
    meeting: str,
    answers: Any,
    measure: Callable[..., Any],
    arguments: Sequence[object],
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=workers)
    answer = measure(*arguments)
    if rank == 0:
        answers.put(answer)
    dist.barrier()
    dist.destroy_process_group()


def all_reduce_seconds(elements: int, warm_up: int, calls: int) -> float:
    tensor = torch.zeros(elements)
    return seconds_per_call(
        lambda: dist.all_reduce(tensor), warm_up=warm_up, calls=calls, barrier=dist.barrier
    )


def data_parallel_seconds(make_model: Callable[[], nn.Module], warm_up: int, steps: int) -> float:
    """The model is made here, since one that is sent to spawned processes would be shared by
    them.
    """
    step = ordinary_step(DistributedDataParallel(make_model()), synthetic_batches())
    return seconds_per_call(step, warm_up=warm_up, calls=steps, barrier=dist.barrier)
