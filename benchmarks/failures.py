"""How soon a failure is known: from its moment to the error that the launch raises."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample

THOUSAND = 1000


def _since(moment: Path) -> list[Sample]:
    seconds = time.monotonic() - float(moment.read_text())
    return [Sample(seconds, {"until it is raised": 1e3 * seconds})]


def _one_is_killed() -> list[Sample]:
    with tempfile.TemporaryDirectory() as folder:
        moment = Path(folder, "moment")

        def program(comm: fs.Comm) -> None:
            comm.barrier()
            if comm.rank == 1:
                moment.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()

        try:
            fs.launch(program, 8, "local")
        except fs.WorkerLost:
            return _since(moment)
    raise AssertionError("nobody was lost")


def _one_of_a_thousand_raises() -> list[Sample]:
    with tempfile.TemporaryDirectory() as folder:
        moment = Path(folder, "moment")

        def program(comm: fs.Comm) -> None:
            comm.barrier()
            if comm.rank == THOUSAND // 2:
                moment.write_text(repr(time.monotonic()))
                raise ZeroDivisionError
            comm.barrier()

        try:
            fs.launch(program, THOUSAND, "sim")
        except ZeroDivisionError:
            return _since(moment)
    raise AssertionError("nothing was raised")


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
            _one_is_killed,
        ),
        (
            "failure_thousand",
            "one of 1,000 simulated workers raises: seconds until the launch does",
            _one_of_a_thousand_raises,
        ),
    )
)
