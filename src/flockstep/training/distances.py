"""How far apart replicas are, two by two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flockstep.comm import Comm
from flockstep.randomness import Purpose, torch_stream

ALL_PAIRS_OF = 64  # workers; of more, as many pairs as these have are drawn
MOST_PAIRS = ALL_PAIRS_OF * (ALL_PAIRS_OF - 1) // 2
SLICE = 2**18  # parameters of each worker that travel at a time
DIFFERENCES = 2**20  # that are in memory at a time


def pairs_of(workers: int) -> Tensor:
    """The pairs of workers that are measured, a row each: all of them up to 64 workers; of more,
    2,016 drawn at random, the same ones in every run of so many workers.
    """
    if workers <= ALL_PAIRS_OF:
        return torch.combinations(torch.arange(workers), 2)
    random = torch_stream(Purpose.PAIRS, 0, workers)
    one = torch.randint(workers, (MOST_PAIRS,), generator=random)
    further = torch.randint(1, workers, (MOST_PAIRS,), generator=random)
    return torch.stack([one, (one + further) % workers], dim=1)


def of_replicas_here(replicas: Sequence[Tensor]) -> dict[str, Any]:
    """The mean over pairs of ‖x_i − x_j‖, and the mean over pairs and parameters of |x_i − x_j|."""
    sums = _Sums(pairs_of(len(replicas)))
    sums.add(replicas)
    return _means(sums.told(), len(replicas), replicas[0].numel())


def of_replicas_of_all(comm: Comm, own: Tensor) -> dict[str, Any]:
    """The same of workers each of which has its own replica. They call it together, and share the
    pairs among them. Whole replicas would fill their memories, so slices travel.
    """
    while True:
        ranks = comm.all_gather(torch.empty(0)).ranks  # the same on all, whoever is lost
        sums = _Sums(pairs_of(len(ranks))[ranks.index(comm.rank) :: len(ranks)])
        for part in own.split(SLICE):
            gathered = comm.all_gather(part)
            if gathered.ranks != ranks:
                break
            sums.add(gathered)
        else:
            told = comm.all_gather(sums.told())
            if told.ranks == ranks:
                return _means(torch.stack([*told]).sum(0), len(ranks), own.numel())


def _means(sums: Tensor, workers: int, parameters: int) -> dict[str, Any]:
    pairs = max(1, len(pairs_of(workers)))  # one worker is nowhere but where it is
    euclidean, absolute = sums.tolist()
    return {
        "distance_mean": euclidean / pairs,
        "distance_per_parameter": absolute / (pairs * parameters),
    }


class _Sums:
    """Of some pairs, slice by slice of the parameters."""

    def __init__(self, pairs: Tensor) -> None:
        self._pairs = pairs
        self._squares = torch.zeros(len(pairs), dtype=torch.float64)
        self._absolute = torch.zeros((), dtype=torch.float64)

    def add(self, parts: Sequence[Tensor]) -> None:
        """The same slice of every replica."""
        one, other = self._pairs.T
        length = max(1, DIFFERENCES // max(1, len(one)))
        for start in range(0, parts[0].numel(), length):
            rows = [part[start : start + length].detach().cpu().double() for part in parts]
            values = torch.stack(rows)
            differences = values[one] - values[other]
            self._squares += differences.square().sum(1)
            self._absolute += differences.abs().sum()

    def told(self) -> Tensor:
        """The sums over the pairs of ‖x_i − x_j‖ and of |x_i − x_j|."""
        return torch.stack([self._squares.sqrt().sum(), self._absolute])
