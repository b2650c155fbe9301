"""What the simulator costs beside the gradient steps that it simulates."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample
from benchmarks.timing import seconds_per_call
from benchmarks.training import BATCH_SIZE, ordinary_step, synthetic_batches
from benchmarks.worker_step import worker_step
from flockstep.models import LeNet5

WORKERS = 16
STEPS = 16
WARM_UP = 8
STRATEGY = fs.LocalSGD(period=8)
# Both sides are timed in turns, and the least time of each counts: what neighbours on a shared
# machine take of it is no part of either, and changes within seconds.
TURNS = 4


def simulated_seconds(workers: int, lanes: int, *, warm_up: int, steps: int) -> float:
    """Seconds per step of one worker, when all of them train in the simulator."""
    batches = synthetic_batches()

    def program(comm: fs.Comm) -> float:
        step = worker_step(comm, STRATEGY, batches)
        return seconds_per_call(step, warm_up=warm_up, calls=steps, barrier=comm.barrier)

    first: float = fs.launch(program, workers, lanes=lanes)[0]
    return first / workers


def _against_plain_loop(lanes: int) -> list[Sample]:
    step = ordinary_step(LeNet5(), synthetic_batches())
    plain, simulated = math.inf, math.inf
    for _ in range(TURNS):
        plain = min(plain, seconds_per_call(step, warm_up=WARM_UP, calls=WORKERS * STEPS))
        simulated = min(simulated, simulated_seconds(WORKERS, lanes, warm_up=WARM_UP, steps=STEPS))
    figures = {"simulator": BATCH_SIZE / simulated, "plain loop": BATCH_SIZE / plain}
    return [Sample(plain / simulated, figures)]


def _many_workers() -> list[Sample]:
    """In a process of its own, so that the peak of its memory is that of the simulation."""
    command = [sys.executable, "-m", "benchmarks.many_workers"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True)
    measured = json.loads(done.stdout)
    few, many = measured["few_seconds"], measured["many_seconds"]
    peak = measured["peak_bytes"]
    return [
        Sample(many / few, {"1,024 workers": 1e3 * many, "16 workers": 1e3 * few}),
        Sample(peak / 1e9, {"a worker": peak / 1e6 / measured["many"]}),
    ]


BENCHMARKS = (
    Benchmark(
        [
            Case(
                "sim_one_lane",
                "16 simulated workers in one lane, speed against a plain loop "
                "(LeNet-5, LocalSGD(8))",
                bound=0.9,
                figure_unit="samples/s",
            )
        ],
        partial(_against_plain_loop, 1),
        repeats=5,
    ),
    Benchmark(
        [
            Case(
                "sim_two_lanes",
                "the same in two lanes, speed against the plain loop in one thread",
                bound=1.6,
                figure_unit="samples/s",
            )
        ],
        partial(_against_plain_loop, 2),
        repeats=5,
    ),
    Benchmark(
        [
            Case(
                "sim_1024",
                "cost of one worker's step at 1,024 workers against 16",
                bound=1.3,
                lower_is_better=True,
                figure_unit="ms",
            ),
            Case(
                "sim_1024_memory",
                "peak memory of a process that simulates 1,024 workers",
                bound=3.0,
                lower_is_better=True,
                unit=" GB",
                figure_unit="MB",
            ),
        ],
        _many_workers,
        repeats=1,
    ),
)
