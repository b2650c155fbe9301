"""What looking at a run costs it: nothing, of its own clock."""

from __future__ import annotations

import math

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample

PROCESSES = 2
STEPS, LOOKS = 2000, 20
SECONDS = 4.0
# Both sides run in turns, and the best of each counts: what neighbours on a shared machine take of
# it is no part of either.
TURNS = 3


def _looking() -> list[Sample]:
    with_looks, without = f"{STEPS // LOOKS} steps", f"{10 * STEPS} steps"
    seconds = {"20 looks": math.inf, "none": math.inf}
    samples = {"20 looks": 0.0, "none": 0.0}
    with fs.LocalProcesses() as local:
        for _ in range(TURNS):
            for name, interval in (("20 looks", with_looks), ("none", without)):
                seconds[name] = min(seconds[name], _seconds_of(local, interval))
            for name, looks in (("20 looks", LOOKS), ("none", 0.1)):
                interval = f"{SECONDS / looks} seconds"
                samples[name] = max(samples[name], _samples_in(local, interval))
    return [
        Sample(seconds["20 looks"] / seconds["none"], seconds),
        Sample(samples["20 looks"] / samples["none"], samples),
    ]


def _seconds_of(local: fs.LocalProcesses, interval: str) -> float:
    """That workers which wait for each other need for a given number of steps."""
    result = fs.run(
        "digits-cnn", fs.LocalSGD(8), PROCESSES, local, steps=STEPS, look_every=interval
    )
    return float(result.metrics["seconds"])


def _samples_in(local: fs.LocalProcesses, interval: str) -> float:
    """That workers which never wait take in a given time."""
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
        repeats=3,
    ),
)
