"""How long a worker's training step takes in virtual time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from flockstep.fields import require, require_integer, require_number
from flockstep.randomness import Purpose, numpy_stream
from flockstep.units import shown_seconds

Value = TypeVar("Value")


class FrozenDict(dict[int, Value]):
    """A dict that stays as it was made. A read-only view (`types.MappingProxyType`) would not do:
    it cannot be pickled, and specs travel to workers.
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a part of a frozen spec cannot be changed")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict[Value]], tuple[dict[int, Value]]]:
        return FrozenDict, (dict(self),)  # as a whole: items cannot be put in one by one


@dataclass(frozen=True)
class Compute:
    """Seconds per training step: `seconds` × the factor of a slow rank × log-normal jitter of mean
    1.

    `jitter` is the standard deviation of the logarithm; its draws depend on (seed, rank) alone.

        fs.Compute(seconds=0.02, jitter=0.1, slow={3: 2.0})   # rank 3 takes twice as long
        fs.Compute.measured()                                 # each step's CPU time: not repeatable
    """

    seconds: float = 0.01
    jitter: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict, hash=False)
    is_measured: bool = False

    def __post_init__(self) -> None:
        require_number("seconds", self.seconds, at_least=0, finite=True)
        require_number("jitter", self.jitter, at_least=0, finite=True)
        rule = "map ranks to factors above 0, such as {3: 2.0}"
        require(isinstance(self.slow, Mapping), "slow", rule, self.slow)
        for rank, factor in self.slow.items():
            require_integer("slow", rank, 0)
            is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
            require(is_number and 0 < factor <= sys.float_info.max, "slow", rule, self.slow)
        object.__setattr__(self, "slow", FrozenDict(self.slow))  # which nobody can change

    @classmethod
    def read(cls, value: Compute | float) -> Compute:
        """A number alone is the seconds of a step."""
        if isinstance(value, int | float):
            require_number("compute", value, at_least=0, finite=True)
            return cls(seconds=value)
        rule = "be seconds, or one such as fs.Compute(seconds=0.02)"
        require(isinstance(value, Compute), "compute", rule, value)
        return value

    @classmethod
    def measured(cls) -> Compute:
        """Charge each step with the CPU time that it really took."""
        return cls(is_measured=True)

    def in_words(self) -> str:
        """`a step takes 20 ms, give or take 10%; 2 times as long on rank 3`."""
        if self.is_measured:
            return "steps take the CPU time that is measured"
        words = f"a step takes {shown_seconds(self.seconds)}"
        if self.jitter:
            words += f", give or take {self.jitter:.0%}"
        ranks: dict[float, list[int]] = {}
        for rank, factor in sorted(self.slow.items()):
            ranks.setdefault(factor, []).append(rank)
        for factor, slow in ranks.items():
            named = f"rank{'s' if len(slow) > 1 else ''} {', '.join(map(str, slow))}"
            words += f"; {factor:g} times as long on {named}"
        return words

    def require_workers(self, workers: int) -> None:
        """Complain of slow ranks that do not exist."""
        rule = f"name ranks below the number of workers, {workers}"
        for rank in self.slow:
            require(rank < workers, "slow", rule, rank)

    def stopwatch(self, seed: int, rank: int) -> Stopwatch:
        return Stopwatch(self, seed, rank)


class Stopwatch:
    """One worker's stream of step times. Its methods are called on the worker's own thread."""

    def __init__(self, compute: Compute, seed: int, rank: int) -> None:
        self._compute = compute
        self._seconds = compute.seconds * compute.slow.get(rank, 1.0)
        self.random = numpy_stream(Purpose.STEP_SECONDS, seed, rank) if compute.jitter else None
        self._mark = 0.0

    def start(self) -> None:
        self._mark = time.thread_time()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the worker's thread computes inside is no part of a step."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._mark += time.thread_time() - began

    def step_seconds(self, times: float) -> float:
        """The seconds of the step that has just been computed, `times` as large as usual."""
        if self._compute.is_measured:
            before, self._mark = self._mark, time.thread_time()
            return self._mark - before
        if self.random is None:
            return self._seconds * times
        sigma = self._compute.jitter
        return (
            self._seconds
            * times
            * math.exp(sigma * self.random.standard_normal() - sigma * sigma / 2)
        )
