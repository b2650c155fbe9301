"""What the torchrun backend costs against DistributedDataParallel, on the same processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.harness import Benchmark, Case, Sample
from benchmarks.training import BATCH_SIZE

TRAINERS = 4
SECONDS = 300


def _sync_sgd() -> list[Sample]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(TRAINERS)]
    command = [*torchrun, "-m", "benchmarks.under_torchrun"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS, env=environment
    )
    seconds = json.loads(done.stdout)
    samples = BATCH_SIZE * TRAINERS
    return [
        Sample(
            seconds["DDP"] / seconds["Flockstep"],
            {side: samples / each for side, each in seconds.items()},
        )
    ]


BENCHMARKS = (
    Benchmark(
        [
            Case(
                "torchrun_sync_sgd_vs_ddp",
                "SyncSGD under torchrun, speed against DistributedDataParallel with gloo on the "
                "same 4 processes",
                bound=1.0,
                figure_unit="samples/s",
            )
        ],
        _sync_sgd,
        repeats=5,
    ),
)
