"""Cases, what was measured of them, and how: every repeat measures both sides back to back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Case:
    """One comparison and the bound that it must keep: a floor, or a ceiling where lower is
    better.
    """

    name: str
    what: str
    bound: float
    figure_unit: str
    lower_is_better: bool = False
    unit: str = "×"

    def reached_by(self, value: float) -> bool:
        return value <= self.bound if self.lower_is_better else value >= self.bound


@dataclass(frozen=True)
class Sample:
    """One repeat of a case: the value that is held against the bound, and the absolute figures
    behind it.
    """

    value: float
    figures: dict[str, float]


@dataclass(frozen=True)
class Benchmark:
    """Cases that are measured together. `measure` makes one sample of each, in their order."""

    cases: Sequence[Case]
    measure: Callable[[], Sequence[Sample]]
    repeats: int


@dataclass(frozen=True)
class Outcome:
    """All samples of a case."""

    case: Case
    samples: Sequence[Sample]

    @property
    def values(self) -> list[float]:
        return [sample.value for sample in self.samples]

    @property
    def value(self) -> float:
        return median(self.values)

    @property
    def is_reached(self) -> bool:
        return self.case.reached_by(self.value)

    @property
    def figures(self) -> dict[str, float]:
        """The median of each figure. Their ratio need not be the median ratio."""
        names = self.samples[0].figures
        return {name: median(sample.figures[name] for sample in self.samples) for name in names}


def run(benchmark: Benchmark, repeats: int, tell: Callable[[str], None]) -> list[Outcome]:
    """Measure all cases of a benchmark; `tell` hears of every repeat."""
    rounds = []
    for number in range(1, repeats + 1):
        rounds.append(benchmark.measure())
        values = ", ".join(f"{sample.value:.2f}" for sample in rounds[-1])
        tell(f"  repeat {number} of {repeats}: {values}")
    by_case = zip(benchmark.cases, zip(*rounds, strict=True), strict=True)
    return [Outcome(case, samples) for case, samples in by_case]
