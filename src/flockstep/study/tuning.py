"""Tuning: every cell gets the same budget of learning rates, and the best by validation is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flockstep.errors import unknown_name
from flockstep.fields import require, require_integer, require_number
from flockstep.randomness import Purpose, numpy_stream

SEARCH_FIELDS = ("low", "high", "tries")
DIGITS = 3  # of a rate that was drawn: more say nothing


@dataclass(frozen=True)
class Tuning:
    """The same learning rates for every cell, tried before the runs that count.

    Fields:
        lr: a list of rates, or {low, high, tries} for rates drawn uniformly on a logarithmic scale,
            the same draws for every cell.
        seeds: how many seeds each rate is tried with.
        validation: the share of the training data that is held out where the task has no
            validation data of its own. Picks never see the test data.
        seed: of the draws.
    """

    lr: Sequence[float] | Mapping[str, float]
    seeds: int = 1
    validation: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        require_integer("tune.seeds", self.seeds, 1)
        require_number("tune.validation", self.validation, above=0, below=1)
        require_integer("tune.seed", self.seed, 0)
        if isinstance(self.lr, Mapping):
            self._check_search(self.lr)
            return
        is_list = isinstance(self.lr, Sequence) and not isinstance(self.lr, str)
        require(is_list and len(self.lr) > 0, "tune.lr", "be a list of rates", self.lr)
        for rate in self.lr:
            require_number("tune.lr", rate, above=0, finite=True)
        require(len({*self.lr}) == len(self.lr), "tune.lr", "have no rate twice", list(self.lr))

    def _check_search(self, search: Mapping[str, float]) -> None:
        for name in search:
            if name not in SEARCH_FIELDS:
                raise unknown_name("field of tune.lr", name, SEARCH_FIELDS)
        for name in SEARCH_FIELDS:
            require(name in search, f"tune.lr.{name}", "be given", None)
        require_number("tune.lr.low", search["low"], above=0, finite=True)
        require_number("tune.lr.high", search["high"], above=search["low"], finite=True)
        require_integer("tune.lr.tries", search["tries"], 1)

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """All rates that are tried, from the lowest to the highest."""
        if not isinstance(self.lr, Mapping):
            return tuple(sorted(map(float, self.lr)))
        low, high = math.log(self.lr["low"]), math.log(self.lr["high"])
        random = numpy_stream(Purpose.TUNING, self.seed)
        drawn = random.uniform(low, high, int(self.lr["tries"]))
        return tuple(sorted(float(f"{math.exp(each):.{DIGITS}g}") for each in drawn))


@dataclass(frozen=True)
class Pick:
    """What tuning found for one cell.

    Fields:
        lr: the rate that was picked; None while tries are missing, or where all failed.
        scores: by rate, the mean validation score of its tries; None where one failed.
        tries: how many runs it takes.
        wall_seconds: how long they took, by the wall's clock.
        is_complete: whether all of them are done, or have failed.
    """

    lr: float | None
    scores: Mapping[float, float | None]
    tries: int
    wall_seconds: float
    is_complete: bool = True

    @property
    def is_at_the_edge(self) -> bool:
        """Whether the best rate is the lowest or the highest of those that were tried: then a
        better one may lie beyond.
        """
        return len(self.scores) > 1 and self.lr in (min(self.scores), max(self.scores))


def picked(
    scores: Mapping[float, Sequence[Any]], higher_is_better: bool
) -> tuple[float | None, dict[float, float | None]]:
    """The best rate, and the mean score of each. `scores`: of the tries of each rate, None for one
    that failed: a rate that fails once is out. Of equal scores the lower rate is taken.
    """
    means = {
        rate: None if None in tries or not tries else sum(tries) / len(tries)
        for rate, tries in scores.items()
    }
    known = {rate: mean for rate, mean in means.items() if mean is not None}
    if not known:
        return None, means
    sign = 1 if higher_is_better else -1
    return max(sorted(known), key=lambda rate: sign * known[rate]), means
