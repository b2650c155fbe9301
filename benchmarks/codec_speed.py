"""What it costs to write a tensor into a message and to add a message to a tensor, on one core."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample

ELEMENTS = 11_100_000
ROUNDS = 5
# How many times one copy-and-add pass over the tensor they may take.
BOUNDS: dict[fs.Codec, float] = {
    fs.Float16(): 6,
    fs.Int8(): 6,
    fs.OneBit(): 6,
    fs.TopK(0.01): 30,
    fs.QSGD(4): 30,
    fs.SignSGD(): 6,
    fs.TernGrad(): 30,
    fs.Natural(): 30,
    fs.QuantisedTopK(0.01): 30,
}


def _codecs() -> list[Sample]:
    torch.set_num_threads(1)
    tensor, total, other = (torch.randn(ELEMENTS) for _ in range(3))

    def copy_and_add() -> None:
        total.copy_(tensor).add_(other)

    samples = []
    for codec in BOUNDS:
        memory = codec.memory(tensor)

        def encode_and_add(codec: fs.Codec = codec, memory: fs.Memory = memory) -> None:
            codec.add_decoded(codec.encode(tensor, memory), total, 1.0, memory)

        encode_and_add()
        times = []
        for _ in range(ROUNDS):  # in turns: the machine is not equally fast all the time
            began = perf_counter()
            copy_and_add()
            between = perf_counter()
            encode_and_add()
            times.append((perf_counter() - between, between - began))
        ours, base = (median(column) for column in zip(*times, strict=True))
        samples.append(Sample(ours / base, {codec.name: 1e3 * ours, "copy and add": 1e3 * base}))
    return samples


BENCHMARKS = (
    Benchmark(
        [
            Case(
                f"codec_{codec.name}",
                f"{codec!r}: encode 11,100,000 floats and add the message to a tensor, "
                "against one copy-and-add pass",
                bound=bound,
                figure_unit="ms",
                lower_is_better=True,
            )
            for codec, bound in BOUNDS.items()
        ],
        _codecs,
        repeats=3,
    ),
)
