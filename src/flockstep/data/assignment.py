"""Which worker may see which samples: pure functions of (samples, workers, seed).

M workers, N samples, C copies of each sample. Where N does not divide, sizes differ by at most one
and nothing is dropped: borders lie at ⌊i·N/parts⌋, so that several parts in a row differ by at most
one, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flockstep.data.balanced_blocks import balanced_blocks
from flockstep.fields import known_spelling, require, require_integer
from flockstep.randomness import Purpose, numpy_stream, require_seed

Indices = NDArray[np.int64]


class Assignment(ABC):
    """Base class of the schemes, which are frozen dataclasses."""

    name: ClassVar[str]

    def assign(self, samples: int, workers: int, seed: int, epoch: int = 0) -> list[Indices]:
        """The indices of each worker's samples, one array per worker; those of another epoch are
        dealt anew. Workers may share arrays: do not change them.
        """
        require_integer("workers", workers, 1)
        require_integer("samples", samples, 1)
        require_seed(seed)
        require_integer("epoch", epoch, 0)
        require(
            samples >= workers, "samples", f"be at least the number of workers, {workers}", samples
        )
        self.copies_among(workers)  # complains if the scheme does not fit
        return self._assign(samples, workers, numpy_stream(Purpose.ASSIGNMENT, seed, epoch))

    @abstractmethod
    def copies_among(self, workers: int) -> int:
        """C: how many of `workers` workers hold a given sample."""

    def overlap_epochs(self, epochs: int, workers: int) -> int:
        """⌈E/C⌉: how often each worker goes over its own samples until all have gone over the
        data E times.
        """
        return -(-epochs // self.copies_among(workers))

    def effective_epochs(self, overlap_epochs: int, workers: int) -> int:
        """How often each sample is processed, by all workers together, while each goes over its
        own that often.
        """
        return overlap_epochs * self.copies_among(workers)

    @abstractmethod
    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]: ...


@dataclass(frozen=True)
class Disjoint(Assignment):
    """Each sample to exactly one worker, at random: C = 1."""

    name: ClassVar[str] = "disjoint"

    def copies_among(self, workers: int) -> int:
        return 1

    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]:
        return _cut(random.permutation(samples), workers)


@dataclass(frozen=True)
class FullOverlap(Assignment):
    """Every sample to every worker: C = M."""

    name: ClassVar[str] = "full_overlap"

    def copies_among(self, workers: int) -> int:
        return workers

    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]:
        return [np.arange(samples)] * workers


@dataclass(frozen=True)
class Coarse(Assignment):
    """Worker i gets shard i mod S, whole: C = M/S.

    Fields:
        shards: S, dividing the number of workers.
    """

    name: ClassVar[str] = "coarse"
    shards: int

    def __post_init__(self) -> None:
        require_integer("shards", self.shards, 1)

    def copies_among(self, workers: int) -> int:
        require(
            workers % self.shards == 0,
            "shards",
            f"divide the number of workers, {workers}",
            self.shards,
        )
        return workers // self.shards

    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]:
        return _cut(random.permutation(samples), self.shards) * (workers // self.shards)


@dataclass(frozen=True)
class WithCopies(Assignment):
    """What schemes have in common that are told the number of copies."""

    copies: int

    def __post_init__(self) -> None:
        require_integer("copies", self.copies, 1)

    def copies_among(self, workers: int) -> int:
        require(
            self.copies <= workers,
            "copies",
            f"be at most the number of workers, {workers}",
            self.copies,
        )
        return self.copies


@dataclass(frozen=True)
class MediumCoarse(WithCopies):
    """M shards, of which worker i gets C: i, i+1, … i+C−1 (mod M).

    Fields:
        copies: C, at most the number of workers.
    """

    name: ClassVar[str] = "medium_coarse"

    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]:
        # So that every worker's shards lie in a row.
        twice_around = np.tile(random.permutation(samples), 2)
        borders = _borders(2 * samples, 2 * workers)
        return [
            twice_around[borders[rank] : borders[rank + self.copies]] for rank in range(workers)
        ]


@dataclass(frozen=True)
class FineGrained(WithCopies):
    """Each sample, not shard, to C workers, so that all pairs of workers share nearly equally many.

    Samples come in groups of M. A group has a set of C workers, and its samples go to the M shifts
    of that set; the sets are chosen so that all distances occur equally often in them. How it is
    done is not in the paper, which asks for equal intersections only.

    Fields:
        copies: C, at most the number of workers.
    """

    name: ClassVar[str] = "fine_grained"

    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]:
        order = random.permutation(samples)
        groups, left = divmod(samples, workers)
        blocks = balanced_blocks(workers, self.copies, groups, random)
        starts = np.arange(0, groups * workers, workers)[:, None]
        # The last, smaller group: each of its samples to the next C workers, around the circle.
        last = groups * workers + np.arange(left)
        first_holder = np.arange(left) * self.copies

        def part(rank: int) -> Indices:
            own = (starts + (rank - blocks) % workers).ravel()
            own_last = last[(rank - first_holder) % workers < self.copies]
            chosen: Indices = order[np.concatenate([own, own_last])]
            return chosen

        return [part(rank) for rank in range(workers)]


@dataclass(frozen=True)
class HouseholdShards(Assignment):
    """Household h gets household shard h mod S, and divides it among its workers: C = H/S · (copies
    inside).

    Households are workers of consecutive ranks, as in `fs.Households`. Those with the same shard
    divide it in different ways, and each worker draws in an order of its own. Sizes differ by at
    most one with `Disjoint` or `FullOverlap` inside, by at most two with others.

    Fields:
        households: H, dividing the number of workers.
        shards: S, dividing the number of households.
        inside: how a household divides its shard.
    """

    name: ClassVar[str] = "household_shards"
    households: int
    shards: int
    inside: Assignment = Disjoint()

    def __post_init__(self) -> None:
        require_integer("households", self.households, 1)
        require_integer("shards", self.shards, 1)
        divides = self.households % self.shards == 0
        require(
            divides, "shards", f"divide the number of households, {self.households}", self.shards
        )
        require(
            isinstance(self.inside, Assignment),
            "inside",
            "be an assignment such as fs.Disjoint()",
            self.inside,
        )

    def copies_among(self, workers: int) -> int:
        return (
            self.households // self.shards * self.inside.copies_among(self._household_size(workers))
        )

    def _household_size(self, workers: int) -> int:
        divides = workers % self.households == 0
        require(divides, "households", f"divide the number of workers, {workers}", self.households)
        return workers // self.households

    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]:
        shards = _cut(random.permutation(samples), self.shards)
        size = self._household_size(workers)
        parts: list[Indices] = []
        for household in range(self.households):
            shard = shards[household % self.shards]
            within = self.inside._assign(len(shard), size, random)
            # Workers that share an array still do.
            chosen = {id(places): shard[places] for places in within}
            parts += [chosen[id(places)] for places in within]
        return parts


@dataclass(frozen=True)
class NeighbourhoodOverlap(Assignment):
    """Disjoint within a neighbourhood, full overlap between neighbourhoods: C = their number.

    Neighbourhoods are workers of consecutive ranks, as in `fs.Households`.

    Fields:
        neighbourhoods: dividing the number of workers.
    """

    name: ClassVar[str] = "neighbourhood_overlap"
    neighbourhoods: int

    def __post_init__(self) -> None:
        require_integer("neighbourhoods", self.neighbourhoods, 1)

    def copies_among(self, workers: int) -> int:
        divides = workers % self.neighbourhoods == 0
        require(
            divides,
            "neighbourhoods",
            f"divide the number of workers, {workers}",
            self.neighbourhoods,
        )
        return self.neighbourhoods

    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]:
        return HouseholdShards(self.neighbourhoods, shards=1)._assign(samples, workers, random)


def _borders(samples: int, parts: int) -> list[int]:
    return [part * samples // parts for part in range(parts + 1)]


def _cut(order: Indices, parts: int) -> list[Indices]:
    """Views of `order`, one after the other."""
    return [order[start:stop] for start, stop in pairwise(_borders(len(order), parts))]


ASSIGNMENTS: dict[str, type[Assignment]] = {
    scheme.name: scheme
    for scheme in (
        Disjoint,
        FullOverlap,
        Coarse,
        MediumCoarse,
        FineGrained,
        HouseholdShards,
        NeighbourhoodOverlap,
    )
}


def find_assignment(name: str) -> type[Assignment]:
    """A scheme by its name on the command line, or by the name of its class."""
    return ASSIGNMENTS[known_spelling("assignment", name, ASSIGNMENTS)]
