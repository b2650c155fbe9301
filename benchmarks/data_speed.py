"""How fast samples come: batches of data in memory, augmented photographs, and the assignment of
many samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample
from flockstep.data import Assignment, plan_batches
from flockstep.data.datasets import find_dataset
from flockstep.data.normalisation import MNIST_PIXELS
from flockstep.data.sources import in_order

BATCH = 64
IMAGES = 60_000
PHOTOGRAPHS = 2_000
SAMPLES, WORKERS = 1_280_000, 1_024
SCHEMES: tuple[Assignment, ...] = (
    fs.Disjoint(),
    fs.FullOverlap(),
    fs.Coarse(64),
    fs.MediumCoarse(4),
    fs.FineGrained(4),
    fs.HouseholdShards(64, 16),
    fs.HouseholdOverlap(64, fs.FineGrained(4)),
    fs.NeighbourhoodOverlap(64, 4),
)


def _mnist() -> fs.InMemory:
    """MNIST, or bytes at random in its place where it is not there: the time is the same."""
    mnist = find_dataset("mnist")
    if mnist.is_there():
        train = mnist.load()[0]
        if isinstance(train, fs.InMemory):
            return train
    pixels = torch.randint(256, (IMAGES, 1, 28, 28), dtype=torch.uint8)
    return fs.InMemory(pixels, torch.randint(10, (IMAGES,)), prepare=MNIST_PIXELS)


def _samples_per_second(rows: Iterable[Any]) -> float:
    began = perf_counter()
    for _ in rows:
        pass
    return IMAGES / (perf_counter() - began)


def _batches() -> list[Sample]:
    """A shuffled epoch. The loader gets floats that are ready; ours are made of bytes, batch by
    batch.
    """
    torch.set_num_threads(1)
    data = _mnist()
    ready = TensorDataset(*next(in_order(data, IMAGES))[0])
    plan = plan_batches(data, BATCH, 1, fs.Disjoint(), None, workers=1, rank=0, seed=0)
    ours = _samples_per_second(plan.batches(0, first_pass=0))
    loader = _samples_per_second(DataLoader(ready, BATCH, shuffle=True))
    return [Sample(ours / loader, {"Flockstep": ours, "DataLoader": loader})]


def _augmentation() -> list[Sample]:
    torch.set_num_threads(1)
    images = torch.randint(256, (PHOTOGRAPHS, 3, 32, 32), dtype=torch.uint8)
    augment = fs.PadCropFlip()

    def at_once() -> None:
        random = np.random.default_rng(0)
        for start in range(0, PHOTOGRAPHS, BATCH):
            augment(random, images[start : start + BATCH])

    def one_by_one() -> None:
        random = np.random.default_rng(0)
        for start in range(0, PHOTOGRAPHS, BATCH):
            torch.stack([_cropped(random, image) for image in images[start : start + BATCH]])

    at_once()
    ours, loop = _seconds(at_once), _seconds(one_by_one)
    in_us = 1e6 / PHOTOGRAPHS
    return [Sample(loop / ours, {"a batch at a time": ours * in_us, "one by one": loop * in_us})]


def _cropped(random: np.random.Generator, image: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    top, left = random.integers(9, size=2)
    crop = padded[:, top : top + 32, left : left + 32]
    return crop.flip(-1) if random.random() < 0.5 else crop


def _assignment() -> list[Sample]:
    seconds = {}
    for scheme in SCHEMES:

        def assign(scheme: Assignment = scheme) -> None:
            scheme.assign(SAMPLES, WORKERS, seed=0)

        seconds[scheme.name] = _seconds(assign)
    return [Sample(max(seconds.values()), seconds)]


def _seconds(act: Callable[[], None]) -> float:
    began = perf_counter()
    act()
    return perf_counter() - began


BENCHMARKS = (
    Benchmark(
        [
            Case(
                "batches",
                f"a shuffled epoch of MNIST in batches of {BATCH}, "
                "samples/s against a DataLoader of ready tensors",
                bound=5,
                figure_unit="samples/s",
            )
        ],
        _batches,
        repeats=5,
    ),
    Benchmark(
        [
            Case(
                "augmentation",
                f"pad, crop and flip of photographs in batches of {BATCH}, "
                "speed against one by one",
                bound=5,
                figure_unit="µs an image",
            )
        ],
        _augmentation,
        repeats=5,
    ),
    Benchmark(
        [
            Case(
                "assignment",
                f"{SAMPLES:,} samples to {WORKERS:,} workers, the slowest of all schemes",
                bound=2,
                figure_unit="s",
                lower_is_better=True,
                unit=" s",
            )
        ],
        _assignment,
        repeats=5,
    ),
)
