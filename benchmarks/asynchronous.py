"""Asynchronous solvers on real processes, side by side: study C1's question, updates per second."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample
from benchmarks.training import Batch, synthetic_batches
from benchmarks.worker_step import make_worker

PROCESSES = 4
WARM_UP, SECONDS = 8, 4.0
SLOW = 4  # times as many samples in a batch
SOLVERS: dict[str, fs.Strategy[Any]] = {
    "EAWild": fs.EAWild(),
    "EASGD in turns": fs.EASGD(period=1),
    "EASGD as they come": fs.EASGD(period=1, mode="first_come"),
    "EAMSGD": fs.EAMSGD(period=1),
    "Hogwild": fs.Hogwild(),
    "AsyncSGD": fs.AsyncSGD(),
    "AsyncSGD with momentum": fs.AsyncSGD(momentum=0.9),
}


def _updates() -> list[Sample]:
    batches = synthetic_batches()
    large = [
        (torch.cat([images for images, _ in some]), torch.cat([labels for _, labels in some]))
        for some in (batches[k : k + SLOW] for k in range(0, len(batches), SLOW))
    ]
    samples = []
    with fs.LocalProcesses() as local:
        for first in (batches, large):
            figures = {
                name: _updates_per_second(local, solver, first, batches)
                for name, solver in SOLVERS.items()
            }
            samples.append(Sample(figures["EAWild"] / figures["EASGD in turns"], figures))
    return samples


def _updates_per_second(
    local: fs.LocalProcesses,
    solver: fs.Strategy[Any],
    first: Sequence[Batch],
    others: Sequence[Batch],
) -> float:
    """Of all workers together, in one stretch of time that begins for all at once."""

    def program(comm: fs.Comm) -> int:
        torch.set_num_threads(1)
        worker, step = make_worker(comm, solver, others if comm.rank else first)
        for _ in range(WARM_UP):
            step()
        comm.barrier()
        until, updates = perf_counter() + SECONDS, 0
        while perf_counter() < until:
            step()
            updates += 1
        worker.finish()  # so that nobody waits for the turns of who has stopped
        return updates

    updates: list[int] = fs.launch(program, PROCESSES, local)
    return sum(updates) / SECONDS


BENCHMARKS = (
    Benchmark(
        [
            Case(
                "asynchronous",
                "updates per second of EAWild on 4 processes against EASGD in turns "
                "(LeNet-5, batch 32)",
                bound=1.0,
                figure_unit="updates/s",
            ),
            Case(
                "asynchronous_uneven",
                "the same where the batches of one process are four times as large",
                bound=1.3,
                figure_unit="updates/s",
            ),
        ],
        _updates,
        repeats=5,
    ),
)
