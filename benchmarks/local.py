"""What local processes gain over those that torch spawns."""

from __future__ import annotations

from time import perf_counter

import torch
from torch.multiprocessing.spawn import spawn

import flockstep as fs
from benchmarks import spawned
from benchmarks.harness import Benchmark, Case, Sample
from benchmarks.timing import seconds_per_call
from benchmarks.training import BATCH_SIZE, synthetic_batches
from benchmarks.worker_step import worker_step
from flockstep.models import LeNet5

PROCESSES = 8
ALL_REDUCES = {62_000: 200, 665_000: 50, 11_100_000: 6}  # calls to time, by elements
ALL_REDUCE_WARM_UP = 3
HEARTBEAT_ALL_REDUCE = (1_000, 1_000)  # elements, and calls to time
TRAINERS = 4
TRAINING_STEPS = 200
TRAINING_WARM_UP = 8


def _all_reduce() -> list[Sample]:
    """For each size, a tensor in shared memory, as a worker's flat tensors are, and one outside
    of it.
    """
    samples = []
    with fs.LocalProcesses() as local:
        for elements, calls in ALL_REDUCES.items():
            gloo = spawned.spawn_with_gloo(
                spawned.all_reduce_seconds, PROCESSES, elements, ALL_REDUCE_WARM_UP, calls
            )
            for in_place in (True, False):
                ours = _all_reduce_seconds(local, elements, calls, in_place)
                samples.append(Sample(gloo / ours, {"Flockstep": 1e3 * ours, "gloo": 1e3 * gloo}))
    return samples


def _all_reduce_seconds(
    local: fs.LocalProcesses, elements: int, calls: int, in_place: bool
) -> float:
    def program(comm: fs.Comm) -> float:
        torch.set_num_threads(1)
        memory = (
            comm.empty(elements, torch.float32, torch.device("cpu"))
            if in_place
            else torch.empty(elements)
        )
        tensor = memory.zero_()
        return seconds_per_call(
            lambda: comm.all_reduce(tensor),
            warm_up=ALL_REDUCE_WARM_UP,
            calls=calls,
            barrier=comm.barrier,
        )

    first: float = fs.launch(program, PROCESSES, local)[0]
    return first


def _heartbeat() -> list[Sample]:
    """By turns, so that both see the same machine."""
    rounds = 4
    watched = unwatched = 0.0
    with fs.LocalProcesses() as local, fs.LocalProcesses(patience=None) as careless:
        for _ in range(rounds):
            unwatched += _all_reduce_seconds(careless, *HEARTBEAT_ALL_REDUCE, in_place=True)
            watched += _all_reduce_seconds(local, *HEARTBEAT_ALL_REDUCE, in_place=True)
    figures = {"with": 1e6 * watched / rounds, "without": 1e6 * unwatched / rounds}
    return [Sample(unwatched / watched, figures)]


def _launch() -> list[Sample]:
    began = perf_counter()
    spawn(spawned.idle, nprocs=PROCESSES)
    between = perf_counter()
    fs.launch(lambda comm: None, PROCESSES, "local")
    ours, theirs = perf_counter() - between, between - began
    return [Sample(theirs / ours, {"Flockstep": ours, "spawn": theirs})]


def _sync_sgd() -> list[Sample]:
    ddp = spawned.spawn_with_gloo(
        spawned.data_parallel_seconds, TRAINERS, LeNet5, TRAINING_WARM_UP, TRAINING_STEPS
    )
    batches = synthetic_batches()

    def program(comm: fs.Comm) -> float:
        torch.set_num_threads(1)
        step = worker_step(comm, fs.SyncSGD(), batches)
        return seconds_per_call(
            step, warm_up=TRAINING_WARM_UP, calls=TRAINING_STEPS, barrier=comm.barrier
        )

    ours: float = fs.launch(program, TRAINERS, "local")[0]
    samples = BATCH_SIZE * TRAINERS
    return [Sample(ddp / ours, {"Flockstep": samples / ours, "DDP": samples / ddp})]


BENCHMARKS = (
    Benchmark(
        [
            Case(
                f"all_reduce_{label}_{how}",
                f"sum of {elements:,} floats over 8 processes, {how.replace('_', ' ')}, "
                "speed against gloo",
                bound=floor,
                figure_unit="ms",
            )
            for (label, floor), elements in zip(
                [("62k", 4), ("665k", 3), ("11m", 2.5)], ALL_REDUCES, strict=True
            )
            for how in ("in_place", "staged")
        ],
        _all_reduce,
        repeats=3,
    ),
    Benchmark(
        [
            Case(
                "heartbeat",
                "sum of 1,000 floats over 8 processes that are watched (patience=300), "
                "speed against patience=None",
                bound=0.95,
                figure_unit="µs",
            )
        ],
        _heartbeat,
        repeats=5,
    ),
    Benchmark(
        [
            Case(
                "launch",
                "start and end of 8 workers that do nothing, "
                "speed against torch.multiprocessing.spawn",
                bound=2.0,
                figure_unit="s",
            )
        ],
        _launch,
        repeats=3,
    ),
    Benchmark(
        [
            Case(
                "sync_sgd_vs_ddp",
                "SyncSGD on 4 processes, speed against DistributedDataParallel with gloo "
                "(LeNet-5, batch 32)",
                bound=1.3,
                figure_unit="samples/s",
            )
        ],
        _sync_sgd,
        repeats=5,
    ),
)
