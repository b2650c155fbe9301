"""Asynchronous solvers on real processes, side by side: study C1's question, updates per second."""

from __future__ import annotations

from typing import Any

import torch

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample
from benchmarks.timing import seconds_per_call
from benchmarks.training import synthetic_batches
from benchmarks.worker_step import worker_step

PROCESSES = 4
STEPS, WARM_UP = 100, 8
SOLVERS: dict[str, fs.Strategy[Any]] = {
    "EAWild": fs.EAWild(),
    "EASGD in turns": fs.EASGD(period=1),
    "EAMSGD": fs.EAMSGD(period=1),
    "Hogwild": fs.Hogwild(),
    "AsyncSGD": fs.AsyncSGD(),
    "AsyncSGD with momentum": fs.AsyncSGD(momentum=0.9),
}


def _updates() -> list[Sample]:
    batches = synthetic_batches()
    with fs.LocalProcesses() as local:
        figures = {name: _updates_per_second(local, solver, batches) for name, solver in SOLVERS.items()}
    return [Sample(figures["EAWild"] / figures["EASGD in turns"], figures)]


def _updates_per_second(local: fs.LocalProcesses, solver: fs.Strategy[Any], batches: Any) -> float:
    def program(comm: fs.Comm) -> float:
        torch.set_num_threads(1)
        step = worker_step(comm, solver, batches)
        return seconds_per_call(step, warm_up=WARM_UP, calls=STEPS, barrier=comm.barrier)

    slowest: float = max(fs.launch(program, PROCESSES, local))
    return PROCESSES / slowest


BENCHMARKS = (
    Benchmark(
        [
            Case(
                "asynchronous",
                "updates per second of EAWild on 4 processes against EASGD in turns (LeNet-5, batch 32)",
                bound=1.0,
                figure_unit="updates/s",
            )
        ],
        _updates,
        repeats=3,
    ),
)
