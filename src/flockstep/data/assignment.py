"""Which worker may see which samples: pure functions of (samples, workers, seed)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flockstep.fields import require, require_integer

Indices = NDArray[np.int64]


class Assignment(ABC):
    """Base class of the schemes, which are frozen dataclasses."""

    name: ClassVar[str]

    def assign(self, samples: int, workers: int, seed: int) -> list[Indices]:
        """The indices of each worker's samples, one array per worker."""
        require_integer("workers", workers, 1)
        require_integer("samples", samples, 1)
        require(samples >= workers, "samples", f"be at least the number of workers, {workers}", samples)
        return self._assign(samples, workers, np.random.default_rng([seed, 0xA551]))

    @abstractmethod
    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]: ...


@dataclass(frozen=True)
class Disjoint(Assignment):
    """Each sample to exactly one worker, at random; sizes differ by at most one."""

    name: ClassVar[str] = "disjoint"

    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]:
        return np.array_split(random.permutation(samples), workers)


@dataclass(frozen=True)
class FullOverlap(Assignment):
    """Every sample to every worker."""

    name: ClassVar[str] = "full_overlap"

    def _assign(self, samples: int, workers: int, random: np.random.Generator) -> list[Indices]:
        return [np.arange(samples)] * workers


ASSIGNMENTS: dict[str, type[Assignment]] = {scheme.name: scheme for scheme in (Disjoint, FullOverlap)}
