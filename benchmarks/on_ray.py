"""What a shared tensor costs on Ray, against Ray's own way to hand an array over."""

from __future__ import annotations

import numpy as np
import torch

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample
from benchmarks.timing import seconds_per_call
from flockstep.backends.ray import Ray

ELEMENTS = 11_100_000
CALLS = 20
WARM_UP = 3
WORKERS = 2


def _program(comm: fs.Comm) -> tuple[float, float]:
    """Seconds of a blend, and of a put and a get, in the process of one worker while the other
    waits.
    """
    import ray

    torch.set_num_threads(1)
    centre = comm.shared("centre", torch.zeros(ELEMENTS))
    tensor, array = torch.ones(ELEMENTS), np.ones(ELEMENTS, dtype=np.float32)
    ours = theirs = 0.0
    if comm.rank == 0:
        theirs = seconds_per_call(lambda: ray.get(ray.put(array)), warm_up=WARM_UP, calls=CALLS)
        ours = seconds_per_call(lambda: centre.blend(tensor, 0.1), warm_up=WARM_UP, calls=CALLS)
    comm.barrier()
    return ours, theirs


def _blend() -> list[Sample]:
    with Ray() as kept:
        ours, theirs = fs.launch(_program, WORKERS, kept)[0]
    return [Sample(ours / theirs, {"Flockstep": 1e3 * ours, "put and get": 1e3 * theirs})]


BENCHMARKS = (
    Benchmark(
        [
            Case(
                "ray_blend_11m",
                f"blend of {ELEMENTS:,} shared floats on Ray, time against one ray.put and one "
                "ray.get of them",
                bound=2.0,
                figure_unit="ms",
                lower_is_better=True,
            )
        ],
        _blend,
        repeats=5,
    ),
)
