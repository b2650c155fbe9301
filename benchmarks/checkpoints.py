"""What checkpoints cost a run."""

from __future__ import annotations

import tempfile
from functools import partial
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional as F

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample

TAKEN = 3  # checkpoints of a run
INPUTS, SAMPLES = 64, 4096


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _task(width: int) -> fs.Task:
    """A perceptron with about width² parameters."""
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, INPUTS, generator=draw), torch.arange(SAMPLES) % 10

    def model() -> nn.Module:
        layers = nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def optimizer(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)  # type: ignore[arg-type]

    metric = fs.classification_accuracy
    return fs.Task("perceptron", model, optimizer, _loss, train=data, test=data, metric=metric)


def _cost(backend: str, workers: int, width: int, steps: int) -> list[Sample]:
    """By how much a run gets slower that takes a checkpoint every minute, from runs that take one
    every few seconds.
    """
    spec = fs.RunSpec(_task(width), fs.LocalSGD(8), workers, backend, steps=steps, look_every=steps)
    with tempfile.TemporaryDirectory() as folder:
        began = perf_counter()
        fs.run(spec, progress=False)
        between = perf_counter()
        fs.run(spec, progress=False, checkpoint=folder, every=steps // (TAKEN + 1))
        without, with_them = between - began, perf_counter() - between
    each = (with_them - without) / TAKEN
    figures = {"with 3": with_them, "without": without, "for one": each}
    return [Sample(100 * each / 60, figures)]


BENCHMARKS = tuple(
    Benchmark(
        [Case(name, what, bound=3.0, lower_is_better=True, unit=" %", figure_unit="s")],
        measure,
        repeats=3,
    )
    for name, what, measure in (
        (
            "checkpoint_sim",
            "8 simulated workers with 1.1 million parameters each: how much slower by a "
            "checkpoint every minute",
            partial(_cost, "sim", 8, 1024, 160),
        ),
        (
            "checkpoint_local",
            "2 local processes with 11 million parameters each: how much slower by a "
            "checkpoint every minute",
            partial(_cost, "local", 2, 3300, 80),
        ),
    )
)
