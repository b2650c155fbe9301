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
from flockstep.errors import InvalidField
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


class ByHouseholds(Assignment):
    """What schemes have in common that deal samples to households as if these were workers, and
    then inside each household.

    Households are workers of consecutive ranks, as in `fs.Households`. Those that hold the same
    samples divide them in different ways, and each worker draws in an order of its own. Sizes
    differ by at most one with `Disjoint` or `FullOverlap` inside, by at most two with others.
    """

    households: int
    inside: Assignment

    @property
    @abstractmethod
    def _between(self) -> Assignment:
        """How samples are dealt to households."""

    def copies_among(self, workers: int) -> int:
        size = self._household_size(workers)
        return self._between.copies_among(self.households) * self.inside.copies_among(size)

    def _household_size(self, workers: int) -> int:
        divides = workers % self.households == 0
        require(divides, "households", f"divide the number of workers, {workers}", self.households)
        return workers // self.households

    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]:
        size = self._household_size(workers)
        parts: list[Indices] = []
        for held in self._between._assign(samples, self.households, random):
            within = self.inside._assign(len(held), size, random)
            # Workers that share an array still do.
            chosen = {id(places): held[places] for places in within}
            parts += [chosen[id(places)] for places in within]
        return parts


@dataclass(frozen=True)
class HouseholdShards(ByHouseholds):
    """Household h gets household shard h mod S, and divides it among its workers: C = H/S · (copies
    inside).

    It is `HouseholdOverlap` with `Coarse(S)` between households.

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
        _require_divides_households("shards", self.shards, self.households)
        _require_assignment("inside", self.inside)

    @property
    def _between(self) -> Assignment:
        return Coarse(self.shards)


@dataclass(frozen=True)
class HouseholdOverlap(ByHouseholds):
    """Households share samples as workers do under any other scheme, and divide what they hold
    among their workers: C = (copies between households) · (copies inside).

    With `MediumCoarse(C)` between them household h gets household shards h, h+1, … h+C−1 (mod H);
    with `FineGrained(C)` all pairs of households share nearly equally many samples.

    Fields:
        households: H, dividing the number of workers.
        between: how samples are dealt to households.
        inside: how a household divides what it holds.
    """

    name: ClassVar[str] = "household_overlap"
    households: int
    between: Assignment
    inside: Assignment = Disjoint()

    def __post_init__(self) -> None:
        require_integer("households", self.households, 1)
        _require_assignment("between", self.between)
        _require_assignment("inside", self.inside)
        try:
            self.between.copies_among(self.households)
        except InvalidField as error:
            raise InvalidField(
                f"'between' must fit {self.households} households as if they were workers: {error}"
            ) from error

    @property
    def _between(self) -> Assignment:
        return self.between


@dataclass(frozen=True)
class NeighbourhoodOverlap(ByHouseholds):
    """Every neighbourhood holds each household shard once: C = the number of neighbourhoods.

    Households of a neighbourhood share nothing, and each shares all that it holds with its match in
    every other neighbourhood. Neighbourhoods are households in a row, as in `fs.Households`; so it
    is `HouseholdShards(H, shards=H/neighbourhoods)`.

    Fields:
        households: H, dividing the number of workers.
        neighbourhoods: dividing the number of households.
    """

    name: ClassVar[str] = "neighbourhood_overlap"
    households: int
    neighbourhoods: int
    inside: ClassVar[Assignment] = Disjoint()  # type: ignore[misc]

    def __post_init__(self) -> None:
        require_integer("households", self.households, 1)
        require_integer("neighbourhoods", self.neighbourhoods, 1)
        _require_divides_households("neighbourhoods", self.neighbourhoods, self.households)

    @property
    def _between(self) -> Assignment:
        return Coarse(self.households // self.neighbourhoods)


def _require_divides_households(field: str, value: int, households: int) -> None:
    rule = f"divide the number of households, {households}"
    require(households % value == 0, field, rule, value)


def _require_assignment(field: str, value: object) -> None:
    rule = "be an assignment such as fs.Disjoint()"
    require(isinstance(value, Assignment), field, rule, value)


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
        HouseholdOverlap,
        NeighbourhoodOverlap,
    )
}


def find_assignment(name: str) -> type[Assignment]:
    """A scheme by its name on the command line, or by the name of its class."""
    return ASSIGNMENTS[known_spelling("assignment", name, ASSIGNMENTS)]
