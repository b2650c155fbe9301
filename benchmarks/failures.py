"""How soon a failure is known: from its moment to the error that the launch raises."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample


def _be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ZeroDivisionError


def _measure(
    backend: str, workers: int, fail: Callable[[], None], error: type[Exception]
) -> list[Sample]:
    with tempfile.TemporaryDirectory() as folder:
        moment = Path(folder, "moment")

        def program(comm: fs.Comm) -> None:
            comm.barrier()
            if comm.rank == workers // 2:
                moment.write_text(repr(time.monotonic()))
                fail()
            comm.barrier()

        try:
            fs.launch(program, workers, backend)
        except error:
            seconds = time.monotonic() - float(moment.read_text())
            return [Sample(seconds, {"until it is raised": 1e3 * seconds})]
    raise AssertionError(f"no {error.__name__} was raised")


BENCHMARKS = tuple(
    Benchmark(
        [Case(name, what, bound=2.0, lower_is_better=True, unit=" s", figure_unit="ms")],
        measure,
        repeats=5,
    )
    for name, what, measure in (
        (
            "failure_killed",
            "one of 8 local processes is killed: seconds until WorkerLost is raised",
            partial(_measure, "local", 8, _be_killed, fs.WorkerLost),
        ),
        (
            "failure_thousand",
            "one of 1,000 simulated workers raises: seconds until the launch does",
            partial(_measure, "sim", 1000, _raise, ZeroDivisionError),
        ),
    )
)
