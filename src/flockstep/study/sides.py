"""Two sides of a comparison, and every test of them: by Welch, or seed by seed."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.study.statistics import (
    Sample,
    Test,
    beyond_test,
    detectable_difference,
    difference_interval,
    equivalence_test,
    mean_test,
    paired_beyond_test,
    paired_detectable_difference,
    paired_difference_interval,
    paired_equivalence_test,
    paired_test,
    power_of_test,
    probability_of_improvement,
    runs_needed,
)


@dataclass(frozen=True)
class Sides:
    """Two samples.

    Fields:
        pairs: the figures of runs that start alike, seed by seed; none where they do not.
        is_paired: whether tests go by these.
    """

    a: Sample
    b: Sample
    pairs: tuple[tuple[float, float], ...] = ()
    is_paired: bool = False

    @property
    def _one(self) -> list[float]:
        return [x for x, _ in self.pairs]

    @property
    def _other(self) -> list[float]:
        return [y for _, y in self.pairs]

    def test(self, alternative: str) -> Test:
        if self.is_paired:
            return paired_test(self._one, self._other, alternative)
        return mean_test(self.a, self.b, alternative)

    def equivalence(self, margin: float) -> Test:
        if self.is_paired:
            return paired_equivalence_test(self._one, self._other, margin)
        return equivalence_test(self.a, self.b, margin)

    def beyond(self, margin: float) -> Test:
        if self.is_paired:
            return paired_beyond_test(self._one, self._other, margin)
        return beyond_test(self.a, self.b, margin)

    def interval(self) -> tuple[float, float]:
        """Of the difference, 95 %."""
        if self.is_paired:
            return paired_difference_interval(self._one, self._other)
        return difference_interval(self.a, self.b)

    def paired_p(self) -> float | None:
        """Two-sided, whichever test decides."""
        return paired_test(self._one, self._other).p if len(self.pairs) > 1 else None

    def improvement(self, higher_is_better: bool) -> float | None:
        """The probability that a run of the first is better than one of the second."""
        if self.a.values is None or self.b.values is None:
            return None
        share = probability_of_improvement(self.a.values, self.b.values)
        return share if higher_is_better else 1 - share

    def detectable(self, alpha: float, alternative: str) -> float:
        """The difference that these n would have seen with a probability of 80 %."""
        if self.is_paired:
            return paired_detectable_difference(
                self._one, self._other, alpha, alternative=alternative
            )
        return detectable_difference(self.a, self.b, alpha, alternative=alternative)

    def power(self, wanted: float | None, alpha: float, alternative: str) -> float | None:
        """The probability to see a difference of that size."""
        a, b = self._sample_of_differences()
        return None if not wanted else power_of_test(a, b, wanted, alpha, alternative)

    def runs_needed(self, wanted: float | None, alpha: float, alternative: str) -> int | None:
        """So many on each side would see it with a probability of 80 %."""
        a, b = self._sample_of_differences()
        return None if not wanted else runs_needed(a, b, wanted, alpha, alternative=alternative)

    def _sample_of_differences(self) -> tuple[Sample, Sample]:
        """What power goes by: of pairs, their differences against zero."""
        if not self.is_paired:
            return self.a, self.b
        return Sample.of(x - y for x, y in self.pairs), Sample.printed(0.0)
