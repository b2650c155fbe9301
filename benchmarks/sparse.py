"""Sparse and asynchronous against dense and synchronous: virtual seconds and bytes until a network
of 407,050 parameters is right about 92 % of MNIST, on three networks.

What the clock says is the same on every machine. Learning rates are those that the study picked
(studies/sparse_asynchrony.toml, results/ beside it), which has seeds and tests; here is one seed of
each."""

from __future__ import annotations

from typing import Any

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample

TARGET = 0.92
TOP = fs.TopK(0.01)
DENSE, SPARSE = "dense synchronous", "sparse asynchronous"
METHODS: dict[str, tuple[fs.Strategy[Any], float]] = {
    DENSE: (fs.SyncSGD(), 0.1),
    "sparse synchronous": (fs.SyncSGD(codec=TOP), 0.3),
    SPARSE: (fs.AsyncSGD(codec=TOP), 0.01),
    "sparse, all to all": (fs.AllToAllSGD(codec=TOP), 0.01),
}
PICKED = {(SPARSE, "wan-100m"): 0.003}  # where a method has another rate than elsewhere
EVEN = fs.Compute(seconds=0.02, jitter=0.2)
UNEVEN = fs.Compute(seconds=0.02, jitter=0.5, slow={7: 4.0})
# And how many times sooner than dense synchronous training sparse asynchronous one must be there.
PLACES = {
    "lan-10g": (EVEN, 0.4),
    "wan-100m": (EVEN, 1.2),
    "home-uplinks": (UNEVEN, 4.0),
}
FEWER_BYTES = 5.0


def _sparse() -> list[Sample]:
    samples = []
    for place, (compute, _) in PLACES.items():
        seconds, megabytes = {}, {}
        for name, (strategy, rate) in METHODS.items():
            result = fs.run(
                "mnist-wide",
                strategy,
                workers=8,
                batch_size=64,
                epochs=2,
                lr=PICKED.get((name, place), rate),
                network=place,
                compute=compute,
                look_every="6 steps",
                target=TARGET,
            )
            seconds[name] = result.metrics["seconds_to_target"]
            megabytes[name] = result.metrics["bytes_to_target"] / 1e6
        for figures in (seconds, megabytes):
            samples.append(Sample(figures[DENSE] / figures[SPARSE], figures))
    return samples


BENCHMARKS = (
    Benchmark(
        [
            case
            for place, (_, bound) in PLACES.items()
            for case in (
                Case(
                    f"sparse_{place}",
                    f"virtual seconds to 92 % of 8 workers on {place} (mnist-wide, TopK(0.01)): "
                    "dense synchronous against sparse asynchronous",
                    bound=bound,
                    figure_unit="s",
                ),
                Case(
                    f"sparse_{place}_bytes",
                    "megabytes of all workers until then",
                    bound=FEWER_BYTES,
                    figure_unit="MB",
                ),
            )
        ],
        _sparse,
        repeats=1,
    ),
)
