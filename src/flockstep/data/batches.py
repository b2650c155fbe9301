"""A worker's batches: its samples, reshuffled every epoch, cut into batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from flockstep.data.assignment import Assignment, Indices
from flockstep.fields import require, require_integer


@dataclass(frozen=True)
class Plan:
    """One worker's part of the data. The order of an epoch depends on (seed, rank, epoch) alone."""

    fetch: Callable[[Indices], Any]
    indices: Indices
    batch_size: int
    steps_per_epoch: int
    seed: int
    rank: int

    def epoch(self, epoch: int) -> Iterator[tuple[Any, int]]:
        """The batches of one epoch, each with its number of samples."""
        order = np.random.default_rng([self.seed, self.rank, epoch]).permutation(self.indices)
        for step in range(self.steps_per_epoch):
            chosen = order[step * self.batch_size : (step + 1) * self.batch_size]
            if not len(chosen):
                # Another worker holds one sample more, which makes a batch of its own. All must take the same
                # number of steps, so this one sees a sample again.
                chosen = order[:1]
            yield self.fetch(chosen), len(chosen)


def plan(dataset: Any, batch_size: int, assignment: Assignment, workers: int, rank: int, seed: int) -> Plan:
    """The part of `rank`. `dataset` is a map-style dataset, a tensor or array, or a tuple of these."""
    require_integer("batch_size", batch_size, 1)
    source = as_tensors(dataset)
    samples = len(source[0]) if source else len(dataset)
    parts = _assigned(assignment, samples, workers, seed)
    steps = -(-max(map(len, parts)) // batch_size)
    return Plan(_fetcher(dataset, source), parts[rank], batch_size, steps, seed, rank)


def whole(dataset: Any, batch_size: int) -> Iterator[tuple[Any, int]]:
    """All samples once, in order, as batches with their numbers of samples."""
    source = as_tensors(dataset)
    samples = len(source[0]) if source else len(dataset)
    fetch = _fetcher(dataset, source)
    for start in range(0, samples, batch_size):
        chosen = np.arange(start, min(start + batch_size, samples))
        yield fetch(chosen), len(chosen)


def as_tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors of an in-memory dataset, which can be indexed in one operation; None for any other."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors
    if _is_bare(dataset):
        return (torch.as_tensor(dataset),)
    if isinstance(dataset, tuple | list) and dataset and all(map(_is_bare, dataset)):
        tensors = tuple(torch.as_tensor(part) for part in dataset)
        lengths = [len(tensor) for tensor in tensors]
        require(len(set(lengths)) == 1, "dataset", "have parts of equal length", lengths)
        return tensors
    return None


def _fetcher(dataset: Any, source: tuple[Tensor, ...] | None) -> Callable[[Indices], Any]:
    if source:
        return functools.partial(_index, source, _is_bare(dataset))
    return functools.partial(_collate, dataset)


def _is_bare(data: Any) -> bool:
    return isinstance(data, Tensor | np.ndarray)


@functools.lru_cache(maxsize=8)  # a thousand simulated workers ask for the same assignment
def _assigned(assignment: Assignment, samples: int, workers: int, seed: int) -> list[Indices]:
    return assignment.assign(samples, workers, seed)


def _index(tensors: Sequence[Tensor], bare: bool, chosen: Indices) -> Any:
    index = torch.from_numpy(chosen)
    parts = tuple(tensor[index] for tensor in tensors)
    return parts[0] if bare else parts


def _collate(dataset: Any, chosen: Indices) -> Any:
    return default_collate([dataset[int(index)] for index in chosen])
