"""Sets of workers that meet every pair of workers nearly equally often."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# More sets than that repeat in turn: they are as balanced after each round as after the first.
MOST_CHOICES = 2048


def balanced_blocks(
    workers: int, size: int, count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """`count` sets of `size` workers. A set stands for its `workers` shifts around the circle of
    all workers.

    The shifts of a set B hold a pair of workers at distance d as often as d is a difference of two
    members of B. So pairs are met equally often if the differences are, over all sets together.
    Sets are chosen one by one from many at random, always the one that brings the counts of all
    differences so far closest to equal."""
    candidates = _candidates(workers, size, random)
    members = np.zeros((len(candidates), workers))
    np.put_along_axis(members, candidates, 1, axis=1)
    correlations = np.fft.irfft(np.abs(np.fft.rfft(members)) ** 2, workers)
    # A distance d is one of workers − d, too.
    differences = np.rint(correlations[:, 1 : workers // 2 + 1])
    excess = differences - size * (size - 1) / max(1, workers - 1)
    # Of |total + excess|² only 2·total·excess + |excess|² depends on the choice, and total·excess
    # grows by products.
    products = excess @ excess.T
    score = np.diagonal(products) / 2
    chosen = np.empty(min(count, MOST_CHOICES), dtype=np.int64)
    for place in range(len(chosen)):
        chosen[place] = score.argmin()
        score = score + products[chosen[place]]
    return candidates[np.resize(chosen, count)]


def _candidates(workers: int, size: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Sets at random, in which each distance of two workers occurs in turn."""
    count = max(256, min(workers, 2048))
    # A set has the workers with the lowest lots.
    lots = random.random((count, workers), dtype=np.float32)
    lots[:, 0] = -2
    lots[np.arange(count), (1 + np.arange(count) % max(1, workers // 2)) % workers] = -1
    return np.argpartition(lots, size - 1, axis=1)[:, :size]
