"""The statistics of repeated runs: intervals, tests, effect sizes, power, and times to a target.

A figure of five seeds is an estimate. What is here says how sure it is, whether two differ, whether
two are the same for all purposes, and what so few runs could have found at all. scipy does the
mathematics; this adds what it leaves open: figures printed in papers without their runs, runs
that are all equal, and runs that never arrived.

Zero spread: where no run differs from another, a test gives the limit of shrinking deviations.
Different means then have p = 0 in the right direction and 1 in the wrong one; equal means have
p = 1 two-sided and 1/2 one-sided, as at a statistic of 0. Never NaN."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import ClassVar

import numpy as np
from scipy import optimize, special, stats

from flockstep.fields import (
    number_in,
    require,
    require_choice,
    require_integer,
    require_number,
)
from flockstep.randomness import Purpose, numpy_stream

ALTERNATIVES = ("two-sided", "greater", "less")

ROUNDING = 1e-12  # relative: figures that differ by less differ by rounding alone
FAR = 1000.0  # standard errors: from here on, the limit stands for the noncentral t, to 10⁻⁶

# Samples and tests


@dataclass(frozen=True)
class Sample:
    """A figure of repeated runs: how many, their mean, and how far they scatter.

    Fields:
        n: the number of runs.
        mean: the mean over the runs.
        deviation: the sample standard deviation (divided by n − 1); None where it is not known.
        values: the figure of each run; None for figures that were printed in a paper.

    Example:
        Sample.of([91.2, 91.5, 91.3])
        Sample.printed(84.44, deviation=0.71, n=5)
        Sample.printed(98.7)                        # taken as a known number
    """

    n: int
    mean: float
    deviation: float | None
    values: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        require_integer("n", self.n, 1)
        require_number("mean", self.mean, finite=True)

        if self.deviation is not None:
            require_number("deviation", self.deviation, at_least=0, finite=True)
            require(self.n >= 2, "n", "be at least 2: one run has no spread", self.n)

        if self.values is not None:
            rule = f"be as many as 'n', {self.n}"
            require(len(self.values) == self.n, "values", rule, self.values)

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        """The sample of these runs: at least two finite values."""
        numbers = _numbers("values", values, at_least=2)
        # The standard library's are exact: the mean of equal values is that value, without spread.
        return cls(len(numbers), mean(numbers), stdev(numbers), numbers)

    @classmethod
    def printed(cls, mean: float, deviation: float | None = None, n: int | None = None) -> Sample:
        """A figure from a paper: a sample where its deviation and number of runs are printed; where
        either is missing, a known number, as if it had no error.
        """
        if deviation is None or n is None:
            return cls(1, mean, None)
        return cls(n, mean, deviation)

    @property
    def is_known_number(self) -> bool:
        """Whether this is taken as a number without error, since its deviation is not known."""
        return self.deviation is None

    @property
    def standard_error(self) -> float | None:
        """The standard deviation of the mean, deviation / √n; None where it is not known."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.n)


@dataclass(frozen=True)
class Test:
    """The outcome of a test of significance.

    Fields:
        name: "Welch", "paired t", "one-sample t", "TOST (Welch)", "TOST (paired)",
            "TOST (one-sample)" or "log-rank".
        statistic: t, or z of the log-rank test.
        df: the degrees of freedom of t; None for z, and where no run differs from another.
        p: how likely a statistic this extreme is if the alternative is false.
        alternative: what a small p speaks for: "two-sided", "greater", "less" or "equivalent".
    """

    # pytest takes a class of this name for one that holds tests, wherever it is imported.
    __test__: ClassVar[bool] = False

    name: str
    statistic: float
    df: float | None
    p: float
    alternative: str


# Intervals


def t_interval(sample: Sample, confidence: float = 0.95) -> tuple[float, float]:
    """Student's t interval of the mean: of such intervals over many studies of normal values, the
    share `confidence` contains the true mean.
    """
    rule = "have a deviation: a number printed without one has no interval"
    require(not sample.is_known_number, "sample", rule, sample)
    return difference_interval(sample, Sample.printed(0.0), confidence)


def bootstrap_interval(
    values: Iterable[float], confidence: float = 0.95, resamples: int = 9999, seed: int = 0
) -> tuple[float, float]:
    """The BCa bootstrap interval of the mean (Efron, 1987): no assumption about the distribution
    of the values; the percentile interval where BCa is undefined.

    It is too narrow for few runs: of five normal values, the 95 % interval contains the true mean
    in 84 % of studies and is 0.64 times as wide as the t interval; of ten values, in 90 %. The same
    seed gives the same interval."""
    numbers = _numbers("values", values, at_least=2)
    _require_share("confidence", confidence)
    require_integer("resamples", resamples, 1)
    require_integer("seed", seed, 0)

    if len(set(numbers)) == 1:
        return numbers[0], numbers[0]
    for method in ("BCa", "percentile"):
        low, high = _bootstrapped(numbers, confidence, resamples, seed, method)
        if math.isfinite(low) and math.isfinite(high):
            break
    return low, high


def _bootstrapped(
    numbers: tuple[float, ...], confidence: float, resamples: int, seed: int, method: str
) -> tuple[float, float]:
    """The interval by this method; NaN where it is undefined."""
    with warnings.catch_warnings():
        # scipy warns where BCa is undefined; the NaN says the same.
        warnings.simplefilter("ignore")
        result = stats.bootstrap(
            (numbers,),
            np.mean,
            n_resamples=resamples,
            confidence_level=confidence,
            method=method,
            rng=numpy_stream(Purpose.BOOTSTRAP, seed),
        )
    low, high = result.confidence_interval
    return float(low), float(high)


def difference(a: Sample, b: Sample) -> float:
    """mean(a) − mean(b); 0 where the two differ by rounding alone, one part in 10¹²."""
    return _minus(a.mean, b.mean)


def difference_interval(a: Sample, b: Sample, confidence: float = 0.95) -> tuple[float, float]:
    """The t interval of mean(a) − mean(b) with Welch–Satterthwaite degrees of freedom, for unequal
    deviations; where one of the two is a known number, that of the other alone.
    """
    _require_share("confidence", confidence)
    center = difference(a, b)
    error, df = _error_and_df(a, b)
    if df is None:
        return center, center
    half = error * float(stats.t.isf((1 - confidence) / 2, df))
    return center - half, center + half


def paired_difference_interval(
    a_values: Iterable[float], b_values: Iterable[float], confidence: float = 0.95
) -> tuple[float, float]:
    """The t interval of the mean difference a − b of runs that belong together pair by pair, as
    those of equal seeds.
    """
    return t_interval(_paired_differences(a_values, b_values), confidence)


# Tests


def mean_test(a: Sample, b: Sample, alternative: str = "two-sided") -> Test:
    """Welch's t-test, for unequal deviations, of whether the true means of a and b differ; where
    one of the two is a known number, the one-sample t-test of the other against it.

    "greater" stands for mean(a) > mean(b), "less" for mean(a) < mean(b). At the level 0.05, five
    normal runs per side give 4 to 5 % false alarms, with deviations that are equal or ten times
    apart; two runs that scatter three times as much as five others give 11 %."""
    require_choice("alternative", alternative, ALTERNATIVES)
    _, df = _error_and_df(a, b)
    statistic, p = _t_and_p(a, b, 0.0, alternative)
    return Test(_kind(a, b, "Welch", "one-sample t"), statistic, df, p, alternative)


def paired_test(
    a_values: Iterable[float], b_values: Iterable[float], alternative: str = "two-sided"
) -> Test:
    """The paired t-test of whether runs that belong together pair by pair differ in the mean.

    "greater" stands for a > b, "less" for a < b."""
    differences = _paired_differences(a_values, b_values)
    test = mean_test(differences, Sample.printed(0.0), alternative)
    return replace(test, name="paired t")


def equivalence_test(a: Sample, b: Sample, margin: float) -> Test:
    """Two one-sided Welch tests (TOST; Schuirmann, 1987) of whether the true means differ by less
    than `margin`, in the unit of the figure: a small p says that they do.

    p is the larger of the two, the statistic belongs to it. Against a known number, the two
    tests are of one sample."""
    require_number("margin", margin, above=0, finite=True)
    _, df = _error_and_df(a, b)
    above = _t_and_p(a, b, -margin, "greater")
    below = _t_and_p(a, b, margin, "less")

    statistic, p = max(above, below, key=lambda found: found[1])
    name = _kind(a, b, "TOST (Welch)", "TOST (one-sample)")
    return Test(name, statistic, df, p, "equivalent")


def paired_equivalence_test(
    a_values: Iterable[float], b_values: Iterable[float], margin: float
) -> Test:
    """Two one-sided paired t-tests of whether the mean difference of runs that belong together pair
    by pair is less than `margin` either way: a small p says that it is.
    """
    differences = _paired_differences(a_values, b_values)
    test = equivalence_test(differences, Sample.printed(0.0), margin)
    return replace(test, name="TOST (paired)")


def beyond_test(a: Sample, b: Sample, margin: float) -> Test:
    """Two one-sided Welch tests of whether the true means differ by more than `margin`, either way,
    in the unit of the figure: a small p says that they do. A large one does not say that they
    differ by less: `equivalence_test` asks that.

    p is twice the smaller of the two, as either may show it; the statistic belongs to that."""
    require_number("margin", margin, above=0, finite=True)
    _, df = _error_and_df(a, b)
    above = _t_and_p(a, b, margin, "greater")
    below = _t_and_p(a, b, -margin, "less")

    statistic, p = min(above, below, key=lambda found: found[1])
    name = _kind(a, b, "beyond the margin (Welch)", "beyond the margin (one-sample)")
    return Test(name, statistic, df, min(1.0, 2 * p), "beyond")


def paired_beyond_test(a_values: Iterable[float], b_values: Iterable[float], margin: float) -> Test:
    """The same of the mean difference of runs that belong together pair by pair."""
    differences = _paired_differences(a_values, b_values)
    test = beyond_test(differences, Sample.printed(0.0), margin)
    return replace(test, name="beyond the margin (paired)")


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number by Holm (1979), in the given order: with those below
    0.05 taken as found, at most 5 % of studies find anything that is not there.
    """
    for p in p_values:
        require_number("p_values", p, at_least=0, at_most=1)

    corrected = [0.0] * len(p_values)
    largest = 0.0
    ascending = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for smaller, index in enumerate(ascending):
        remaining = len(p_values) - smaller
        largest = max(largest, min(1.0, remaining * float(p_values[index])))
        corrected[index] = largest
    return corrected


# Sizes of effects


def effect_size(a: Sample, b: Sample) -> float | None:
    """Hedges' g: by how many pooled standard deviations the mean of a is above that of b, with the
    exact (gamma-function) correction for small samples.

    None where one of the two is a known number. Without any spread: 0 for equal means, else
    infinite."""
    if a.deviation is None or b.deviation is None:
        return None
    gap = difference(a, b)
    df = a.n + b.n - 2
    a_share = a.deviation * math.sqrt((a.n - 1) / df)
    b_share = b.deviation * math.sqrt((b.n - 1) / df)
    pooled = math.hypot(a_share, b_share)
    return _small_sample_correction(df) * gap / pooled if pooled else _limit(gap)


def _small_sample_correction(df: int) -> float:
    """J = Γ(m/2) / (√(m/2) Γ((m − 1)/2)) with m degrees of freedom (Hedges, 1981)."""
    log_ratio = special.gammaln(df / 2) - special.gammaln((df - 1) / 2)
    return math.exp(log_ratio) / math.sqrt(df / 2)


def probability_of_improvement(a_values: Iterable[float], b_values: Iterable[float]) -> float:
    """The probability that a run of a has a higher figure than a run of b, P(a > b) + P(a = b)/2
    over all pairs (Agarwal et al., 2021).
    """
    a = np.array(_numbers("a_values", a_values, at_least=1))[:, np.newaxis]
    b = np.array(_numbers("b_values", b_values, at_least=1))
    return float(np.mean(a > b) + np.mean(a == b) / 2)


# Power


def detectable_difference(
    a: Sample, b: Sample, alpha: float = 0.05, power: float = 0.8, alternative: str = "two-sided"
) -> float:
    """The smallest true difference that a Welch test at level `alpha` finds with probability
    `power`, given these numbers of runs and taking these deviations for the true ones.

    By the noncentral t distribution with Welch's degrees of freedom, which is too hopeful for very
    few runs: what should be found in 80 % of studies is found in 78 % with five normal runs per
    side, in 69 % with three and in 47 % with two. For "less" it is the size of the difference,
    too; 0 where there is no spread."""
    _require_levels(alpha, power, alternative)
    error, df = _error_and_df(a, b)
    return 0.0 if df is None else error * _detectable_shift(df, alpha, power, alternative)


def power_of_test(
    a: Sample,
    b: Sample,
    wanted_difference: float,
    alpha: float = 0.05,
    alternative: str = "two-sided",
) -> float:
    """The probability that a Welch test at level `alpha` finds a true difference of this size,
    with these numbers of runs and taking these deviations for the true ones.
    """
    require_number("alpha", alpha, above=0, below=0.5)
    require_choice("alternative", alternative, ALTERNATIVES)
    require_number("wanted_difference", wanted_difference, above=0, finite=True)
    error, df = _error_and_df(a, b)
    return 1.0 if df is None else _power(wanted_difference / error, df, alpha, alternative)


def paired_detectable_difference(
    a_values: Iterable[float],
    b_values: Iterable[float],
    alpha: float = 0.05,
    power: float = 0.8,
    alternative: str = "two-sided",
) -> float:
    """The smallest true mean difference that a paired t-test at level `alpha` finds with
    probability `power`, taking the deviation of these differences for the true one.
    """
    differences = _paired_differences(a_values, b_values)
    return detectable_difference(differences, Sample.printed(0.0), alpha, power, alternative)


def runs_needed(
    a: Sample,
    b: Sample,
    wanted_difference: float,
    alpha: float = 0.05,
    power: float = 0.8,
    alternative: str = "two-sided",
    most: int = 10_000,
) -> int | None:
    """The smallest number of runs on each side with which a Welch test at level `alpha` finds a
    true difference of this size with probability `power`, taking these deviations for the true
    ones; None where that takes more than `most`.

    Where one side is a known number, the runs are those of the other. An answer below 5 is too
    hopeful, as `detectable_difference` is."""
    _require_levels(alpha, power, alternative)
    require_number("wanted_difference", wanted_difference, above=0, finite=True)
    require_integer("most", most, 2)

    def power_of(runs: int) -> float:
        error, df = _error_and_df(_with_runs(a, runs), _with_runs(b, runs))
        return 1.0 if df is None else _power(wanted_difference / error, df, alpha, alternative)

    enough = 2
    while enough < most and power_of(enough) < power:
        enough = min(2 * enough, most)
    if power_of(enough) < power:
        return None
    return bisect_left(range(enough), power, lo=2, key=power_of)


def _with_runs(sample: Sample, runs: int) -> Sample:
    return sample if sample.is_known_number else replace(sample, n=runs, values=None)


def _power(shift: float, df: float, alpha: float, alternative: str) -> float:
    """How often a t-test finds a difference of `shift` standard errors, in either of its
    directions if it is two-sided.
    """
    is_two_sided = alternative == "two-sided"
    critical = float(stats.t.isf(alpha / 2 if is_two_sided else alpha, df))
    if shift > FAR:
        # Beside such a shift, the chance in the mean is nothing to that in the deviation, and
        # scipy's noncentral t need not converge.
        ratio = shift / critical
        return float(stats.chi2.cdf(df * ratio * ratio, df))

    found = stats.nct.sf(critical, df, shift)
    if is_two_sided:
        # The lower tail, as the upper one of −shift: nct.cdf gives NaN in places.
        found += stats.nct.sf(critical, df, -shift)
    return float(found)


def _detectable_shift(df: float, alpha: float, power: float, alternative: str) -> float:
    """The difference, in standard errors, that is found with probability `power`."""

    def missing(shift: float) -> float:
        return power - _power(shift, df, alpha, alternative)

    enough = 1.0
    while missing(enough) > 0:
        enough *= 2
    return float(optimize.brentq(missing, 0.0, enough))


# Times to a target


@dataclass(frozen=True)
class TimesToTarget:
    """The times that runs took to reach a target; a run that did not reach it until its limit is
    censored there, not dropped: it would have taken longer.

    Fields:
        times: the time of each run; None where it did not reach the target.
        limits: how long each run was watched, in the same unit.
    """

    times: tuple[float | None, ...]
    limits: tuple[float, ...]

    def __post_init__(self) -> None:
        require(len(self.times) >= 1, "times", "hold at least one run", self.times)
        rule = f"be as many as 'times', {len(self.times)}"
        require(len(self.limits) == len(self.times), "limits", rule, self.limits)

        for time, limit in zip(self.times, self.limits, strict=True):
            require_number("limits", limit, at_least=0, finite=True)
            if time is not None:
                require_number("times", time, at_least=0, finite=True)
                require(time <= limit, "times", f"be at most the limit, {limit:g}", time)

    @classmethod
    def of(cls, times: Sequence[float | None], limits: Sequence[float]) -> TimesToTarget:
        """The time of each run, None where it did not reach the target until its limit."""
        given = tuple(None if time is None else number_in("times", time) for time in times)
        return cls(given, tuple(number_in("limits", limit) for limit in limits))

    @property
    def n(self) -> int:
        """The number of runs."""
        return len(self.times)

    @property
    def reached(self) -> int:
        """The number of runs that reached the target."""
        return len(self._arrivals)

    @property
    def median(self) -> float | None:
        """The Kaplan–Meier median: the first time by which half of the runs are estimated to have
        reached the target; None where fewer have.
        """
        curve = stats.ecdf(self._censored).sf
        # A product of fractions that is 1/2 may be computed as slightly more.
        is_half = curve.probabilities <= 0.5 + ROUNDING
        return float(curve.quantiles[is_half][0]) if is_half.any() else None

    @property
    def steps(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The Kaplan–Meier curve from time 0 on, for drawing: times, and from each of them on the
        estimated share of runs that have not yet reached the target.
        """
        curve = stats.ecdf(self._censored).sf
        times = (0.0, *map(float, curve.quantiles))
        shares = (1.0, *map(float, curve.probabilities))
        return times, shares

    @property
    def _arrivals(self) -> list[float]:
        return [time for time in self.times if time is not None]

    @property
    def _watched(self) -> list[float]:
        """How long each run was on its way: to the target, or to its limit."""
        pairs = zip(self.times, self.limits, strict=True)
        return [limit if time is None else time for time, limit in pairs]

    @property
    def _censored(self) -> stats.CensoredData:
        pairs = zip(self.times, self.limits, strict=True)
        right = [limit for time, limit in pairs if time is None]
        return stats.CensoredData(uncensored=self._arrivals, right=right)


def log_rank_test(a: TimesToTarget, b: TimesToTarget, alternative: str = "two-sided") -> Test:
    """The log-rank test (Mantel, 1966) of whether a and b take different times to the target, with
    the runs that did not reach it counted for as long as they were watched.

    "less" stands for a reaching it sooner, with a negative statistic; "greater" for later. Where
    no arrival tells the two apart, as when nobody reached it, p = 1 whatever the alternative."""
    require_choice("alternative", alternative, ALTERNATIVES)
    if not _tells_apart(a, b):
        return Test("log-rank", 0.0, None, 1.0, alternative)
    # scipy compares rates of arrival, the other way round than times: b stands first.
    result = stats.logrank(b._censored, a._censored, alternative=alternative)
    return Test("log-rank", float(result.statistic), None, float(result.pvalue), alternative)


def _tells_apart(a: TimesToTarget, b: TimesToTarget) -> bool:
    """Whether at some arrival runs of both were on their way, and not all of them arrived.

    Otherwise the variance is 0, and scipy divides rounding errors by it."""
    for time in {*a._arrivals, *b._arrivals}:
        a_under_way = sum(watched >= time for watched in a._watched)
        b_under_way = sum(watched >= time for watched in b._watched)
        arriving = a._arrivals.count(time) + b._arrivals.count(time)
        if a_under_way and b_under_way and arriving < a_under_way + b_under_way:
            return True
    return False


# Profiles over many problems


def performance_profile(
    costs: Mapping[str, Mapping[str, float | None]], ratios: Sequence[float]
) -> dict[str, list[float]]:
    """Dolan and Moré's (2002) performance profile: per method, the share of problems that it solved
    at no more than `ratio` times the cost of the best method on that problem.

    `costs` has the cost of each method on each problem; None or infinite where it did not solve
    it. A problem that nobody solved counts for nobody, and still as a problem."""
    for ratio in ratios:
        require_number("ratios", ratio, at_least=1, finite=True)
    by_method = _costs_by_method(costs)

    best = [min(of_problem) for of_problem in zip(*by_method.values(), strict=True)]
    return {
        method: [_solved_share(own, best, ratio) for ratio in ratios]
        for method, own in by_method.items()
    }


def _costs_by_method(costs: Mapping[str, Mapping[str, float | None]]) -> dict[str, list[float]]:
    """The costs of each method in one order of problems."""
    problems = list(next(iter(costs.values()), {}))
    require(bool(problems), "costs", "have at least one method and one problem", costs)

    for method, own in costs.items():
        rule = f"have the same problems for {method!r} as for the others; None where not solved"
        require(set(own) == set(problems), "costs", rule, list(own))
    return {method: [_cost(own[name]) for name in problems] for method, own in costs.items()}


def _cost(given: float | None) -> float:
    """A cost that can be compared: infinite where the problem was not solved."""
    cost = math.inf if given is None else number_in("costs", given)
    require_number("costs", cost, at_least=0)
    return cost


def _solved_share(own: list[float], best: list[float], ratio: float) -> float:
    pairs = zip(own, best, strict=True)
    solved = [cost <= ratio * least for cost, least in pairs if math.isfinite(cost)]
    return sum(solved) / len(own)


# What the above is made of


def _numbers(field: str, values: Iterable[float], at_least: int) -> tuple[float, ...]:
    numbers = tuple(number_in(field, value) for value in values)
    for number in numbers:
        require(math.isfinite(number), field, "be finite: a failed run has no figure", number)
    reason = ": one run has no spread" if at_least == 2 else ""
    rule = f"hold at least {at_least} of them{reason}"
    require(len(numbers) >= at_least, field, rule, list(numbers))
    return numbers


def _paired_differences(a_values: Iterable[float], b_values: Iterable[float]) -> Sample:
    a = _numbers("a_values", a_values, at_least=2)
    b = _numbers("b_values", b_values, at_least=2)
    rule = f"hold one value for each of 'a_values', {len(a)}"
    require(len(a) == len(b), "b_values", rule, len(b))
    return Sample.of(_minus(x, y) for x, y in zip(a, b, strict=True))


def _minus(x: float, y: float) -> float:
    """x − y. What differs by rounding alone is equal: with no spread, any difference is
    significant.
    """
    return 0.0 if math.isclose(x, y, rel_tol=ROUNDING) else x - y


def _kind(a: Sample, b: Sample, of_two: str, of_one: str) -> str:
    return of_one if a.is_known_number or b.is_known_number else of_two


def _deviation_and_runs(sample: Sample) -> tuple[float, int]:
    """Those of a known number are 0 and 2: without spread it adds nothing to the standard error or
    the degrees of freedom, and with fewer than 2 the formulas divide by 0.
    """
    return (0.0, 2) if sample.deviation is None else (sample.deviation, sample.n)


def _error_and_df(a: Sample, b: Sample) -> tuple[float, float | None]:
    """The standard error of mean(a) − mean(b), and Welch–Satterthwaite's degrees of freedom of it;
    None where there is no spread.
    """
    rule = "have a deviation where 'a' has none: two numbers alone cannot be compared"
    require(not (a.is_known_number and b.is_known_number), "b", rule, b)

    a_deviation, a_runs = _deviation_and_runs(a)
    b_deviation, b_runs = _deviation_and_runs(b)
    a_error = a_deviation / math.sqrt(a_runs)
    b_error = b_deviation / math.sqrt(b_runs)
    error = math.hypot(a_error, b_error)
    if error == 0:
        return 0.0, None

    a_part = (a_error / error) ** 4 / (a_runs - 1)
    b_part = (b_error / error) ** 4 / (b_runs - 1)
    return error, 1 / (a_part + b_part)


def _t_and_p(a: Sample, b: Sample, hypothesis: float, alternative: str) -> tuple[float, float]:
    """Welch's t and p of mean(a) − mean(b) against a hypothetical difference."""
    gap = _minus(difference(a, b), hypothesis)
    a_deviation, a_runs = _deviation_and_runs(a)
    b_deviation, b_runs = _deviation_and_runs(b)

    # In units of the larger deviation no square is too small or too large for a float.
    unit = max(a_deviation, b_deviation)
    if unit == 0:
        return _limit(gap), _limiting_p(gap, alternative)
    scaled = (gap / unit, a_deviation / unit, a_runs, 0.0, b_deviation / unit, b_runs)
    result = stats.ttest_ind_from_stats(*scaled, equal_var=False, alternative=alternative)
    return float(result.statistic), float(result.pvalue)


def _limit(gap: float) -> float:
    """What a difference in units of a spread tends to, as the spread goes to 0."""
    return math.copysign(math.inf, gap) if gap else 0.0


def _limiting_p(gap: float, alternative: str) -> float:
    """p at that limit: 0, 1/2 or 1 one-sided, 0 or 1 two-sided."""
    if alternative == "two-sided":
        return 0.0 if gap else 1.0
    favoured = gap if alternative == "greater" else -gap
    return float(np.heaviside(-favoured, 0.5))


def _require_share(field: str, value: float) -> None:
    require_number(field, value, above=0, below=1)


def _require_levels(alpha: float, power: float, alternative: str) -> None:
    require_choice("alternative", alternative, ALTERNATIVES)
    require_number("alpha", alpha, above=0, below=0.5)
    _require_share("power", power)
    rule = f"be above 'alpha', {alpha:g}: so often a test finds what is not there"
    require(power > alpha, "power", rule, power)
