"""What torchrun starts: the same training with DistributedDataParallel and with Flockstep, by
turns.
"""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

import flockstep as fs
from benchmarks.spawned import data_parallel_seconds
from benchmarks.timing import seconds_per_call
from benchmarks.training import synthetic_batches
from benchmarks.worker_step import worker_step
from flockstep.models import LeNet5

ROUNDS = 3
STEPS = 100
WARM_UP = 8


def program(comm: fs.Comm) -> float:
    torch.set_num_threads(1)
    step = worker_step(comm, fs.SyncSGD(), synthetic_batches())
    return seconds_per_call(step, warm_up=WARM_UP, calls=STEPS, barrier=comm.barrier)


def main() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    ours, theirs = 0.0, 0.0
    with fs.Torchrun() as backend:
        for _ in range(ROUNDS):
            theirs += data_parallel_seconds(LeNet5, WARM_UP, STEPS)
            ours += fs.launch(program, backend=backend)[0] or 0.0  # rank 0 alone has it
    if dist.get_rank() == 0:
        print(json.dumps({"Flockstep": ours / ROUNDS, "DDP": theirs / ROUNDS}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
