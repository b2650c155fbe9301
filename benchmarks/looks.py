"""What looking at a run costs it: nothing, of its own clock."""

from __future__ import annotations

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample

PROCESSES = 2
STEPS, LOOKS = 2000, 20
SECONDS = 4.0


def _looking() -> list[Sample]:
    every, never = f"{STEPS // LOOKS} steps", f"{10 * STEPS} steps"
    with fs.LocalProcesses() as local:
        synchronous = {
            name: fs.run(
                "digits-cnn", fs.LocalSGD(8), PROCESSES, local, steps=STEPS, look_every=interval
            ).metrics["seconds"]
            for name, interval in (("20 looks", every), ("none", never))
        }
        timed = {
            name: _steps_in(local, interval)
            for name, interval in (
                ("20 looks", f"{SECONDS / LOOKS} seconds"),
                ("none", f"{10 * SECONDS} seconds"),
            )
        }
    return [
        Sample(synchronous["20 looks"] / synchronous["none"], synchronous),
        Sample(timed["20 looks"] / timed["none"], timed),
    ]


def _steps_in(local: fs.LocalProcesses, interval: str) -> float:
    """Samples that workers which never wait take in a given time."""
    result = fs.run(
        "digits-cnn", fs.EAWild(4), PROCESSES, local, seconds=SECONDS, look_every=interval
    )
    return float(result.metrics["samples"])


BENCHMARKS = (
    Benchmark(
        (
            Case(
                "looks_seconds",
                f"seconds of a run with {LOOKS} looks against one with none "
                "(digits-cnn, LocalSGD(8), 2 processes)",
                1.02,
                "s",
                lower_is_better=True,
            ),
            Case(
                "looks_asynchronous",
                f"samples that EAWild takes in {SECONDS:g} s with {LOOKS} looks against none",
                0.98,
                "samples",
            ),
        ),
        _looking,
        repeats=5,
    ),
)
