"""The statistics of repeated runs: against scipy and statsmodels, by hand, and by simulation."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from scipy import stats
from statsmodels.duration.survfunc import SurvfuncRight, survdiff
from statsmodels.stats.meta_analysis import effectsize_smd
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestIndPower, TTestPower
from statsmodels.stats.weightstats import ttost_ind, ttost_paired

from flockstep.errors import InvalidField
from flockstep.study import statistics
from flockstep.study.statistics import Sample, TimesToTarget

# Eighths are exact in floats: what is equal on paper is equal here.
figures = some.integers(-1000, 1000).map(lambda number: number / 8)


def runs(least: int = 2, most: int = 12) -> some.SearchStrategy[list[float]]:
    """Figures of runs that are not all equal."""
    lists = some.lists(figures, min_size=least, max_size=most)
    return lists.filter(lambda values: len(set(values)) > 1)


@some.composite
def pairs_of_runs(draw):
    """As many runs of a as of b, whose differences are not all equal."""
    pairs = draw(some.lists(some.tuples(figures, figures), min_size=2, max_size=12))
    assume(len({x - y for x, y in pairs}) > 1)
    return [x for x, _ in pairs], [y for _, y in pairs]


alternatives = some.sampled_from(["two-sided", "greater", "less"])
margins = some.integers(1, 400).map(lambda number: number / 8)
quickly = settings(max_examples=40, deadline=None)
close = partial(pytest.approx, rel=1e-7, abs=1e-12)

SAME = Sample.of([0.1, 0.1, 0.1])  # whose mean and deviation numpy rounds
HIGHER = Sample.of([0.7, 0.7])
KNOWN = Sample.printed(0.1)
SPREAD = Sample.of([1.0, 2.0, 4.0])

# Samples


@quickly
@given(runs())
def test_a_sample_has_the_mean_the_deviation_and_the_error_of_its_values(values):
    sample = Sample.of(iter(values))
    assert (sample.n, sample.values) == (len(values), tuple(values))
    assert sample.mean == close(np.mean(values))
    assert sample.deviation == close(np.std(values, ddof=1))
    assert sample.standard_error == close(stats.sem(values))
    assert not sample.is_known_number


def test_equal_values_have_no_spread_at_all():
    assert np.std([0.1, 0.1, 0.1], ddof=1) > 0  # by rounding
    assert (SAME.mean, SAME.deviation) == (0.1, 0.0)


def test_a_figure_from_a_paper_is_a_sample_only_with_its_deviation_and_its_runs():
    assert Sample.printed(84.44, deviation=0.71, n=5) == Sample(5, 84.44, 0.71)
    for number in (Sample.printed(84.44), Sample.printed(84.44, 0.71), Sample.printed(84.44, n=5)):
        assert number == Sample(1, 84.44, None)
        assert number.is_known_number
        assert number.standard_error is None


def test_figures_of_numpy_are_taken():
    assert Sample.of(np.array([1, 3], dtype=np.float32)) == Sample.of([1.0, 3.0])


# Intervals


@quickly
@given(runs(), some.floats(0.5, 0.999))
def test_the_t_interval_is_that_of_scipy(values, confidence):
    expected = stats.ttest_1samp(values, 0).confidence_interval(confidence)
    assert statistics.t_interval(Sample.of(values), confidence) == close(tuple(expected))


@quickly
@given(runs(), runs())
def test_the_interval_of_a_difference_is_that_of_scipy(a, b):
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.9)
    interval = statistics.difference_interval(Sample.of(a), Sample.of(b), 0.9)
    assert interval == close(tuple(expected))


@quickly
@given(pairs_of_runs())
def test_the_interval_of_a_paired_difference_is_that_of_scipy(both):
    expected = stats.ttest_rel(*both).confidence_interval(0.9)
    assert statistics.paired_difference_interval(*both, 0.9) == close(tuple(expected))


def test_the_difference_from_a_known_number_has_the_interval_of_one_sample():
    low, high = statistics.t_interval(SPREAD)
    known = Sample.printed(1.5)
    assert statistics.difference_interval(SPREAD, known) == close((low - 1.5, high - 1.5))
    assert statistics.difference_interval(known, SPREAD) == close((1.5 - high, 1.5 - low))


def test_intervals_are_of_95_percent_unless_told():
    values, zeros = [1.0, 2.0, 4.0], [0.0, 0.0, 0.0]
    by_student = statistics.t_interval(SPREAD, 0.95)
    assert statistics.t_interval(SPREAD) == by_student
    assert statistics.difference_interval(SPREAD, Sample.of(zeros)) == by_student
    assert statistics.paired_difference_interval(values, zeros) == by_student
    by_bootstrap = statistics.bootstrap_interval(values, 0.95)
    assert statistics.bootstrap_interval(values) == by_bootstrap


def test_intervals_without_spread_are_points():
    assert statistics.t_interval(SAME) == (0.1, 0.1)
    assert statistics.difference_interval(SAME, SAME) == (0, 0)
    assert statistics.paired_difference_interval([1.5, 2.5], [1.0, 2.0]) == (0.5, 0.5)
    assert statistics.bootstrap_interval([0.1, 0.1, 0.1]) == (0.1, 0.1)


def test_the_bootstrap_is_scipys_bca():
    values = [1.0, 2.0, 4.0, 8.0, 9.0]
    seeded = np.random.default_rng(3)
    expected = stats.bootstrap((values,), np.mean, confidence_level=0.9, method="BCa", rng=seeded)
    interval = statistics.bootstrap_interval(values, 0.9, seed=3)
    assert interval == tuple(expected.confidence_interval)


def test_the_seed_alone_decides_about_a_bootstrap():
    values = np.random.default_rng(0).normal(size=20)
    interval = statistics.bootstrap_interval(values, resamples=99, seed=1)
    assert statistics.bootstrap_interval(values, resamples=99, seed=1) == interval
    assert statistics.bootstrap_interval(values, resamples=99, seed=2) != interval


def test_where_bca_is_undefined_the_bootstrap_gives_percentiles():
    low, high = statistics.bootstrap_interval([0.0, 1.0, 5.0], resamples=1)
    assert low == high  # of the one resample
    assert 0 <= low <= 5


# Tests


@quickly
@given(runs(), runs(), alternatives)
def test_two_samples_are_compared_by_welchs_test(a, b, alternative):
    expected = stats.ttest_ind(a, b, equal_var=False, alternative=alternative)
    test = statistics.mean_test(Sample.of(a), Sample.of(b), alternative)
    assert (test.statistic, test.df, test.p) == close(
        (expected.statistic, expected.df, expected.pvalue)
    )
    assert (test.name, test.alternative) == ("Welch", alternative)
    assert statistics.difference(Sample.of(a), Sample.of(b)) == close(np.mean(a) - np.mean(b))


@quickly
@given(runs(), figures, alternatives)
def test_a_sample_is_compared_with_a_known_number_by_the_one_sample_test(a, number, alternative):
    expected = stats.ttest_1samp(a, number, alternative=alternative)
    test = statistics.mean_test(Sample.of(a), Sample.printed(number), alternative)
    assert (test.statistic, test.df, test.p) == close(
        (expected.statistic, expected.df, expected.pvalue)
    )
    assert test.name == "one-sample t"

    swapped = {"two-sided": "two-sided", "greater": "less", "less": "greater"}[alternative]
    other = statistics.mean_test(Sample.printed(number), Sample.of(a), swapped)
    assert (other.statistic, other.p) == close((-test.statistic, test.p))


@quickly
@given(pairs_of_runs(), alternatives)
def test_pairs_are_compared_by_the_paired_test(both, alternative):
    expected = stats.ttest_rel(*both, alternative=alternative)
    test = statistics.paired_test(*both, alternative)
    assert (test.statistic, test.df, test.p) == close(
        (expected.statistic, expected.df, expected.pvalue)
    )
    assert (test.name, test.alternative) == ("paired t", alternative)


@quickly
@given(runs(), runs(), margins)
def test_equivalence_is_that_of_statsmodels(a, b, margin):
    expected, lower, _ = ttost_ind(a, b, -margin, margin, usevar="unequal")
    test = statistics.equivalence_test(Sample.of(a), Sample.of(b), margin)
    assert (test.p, test.df) == close((expected, lower[2]))
    assert (test.name, test.alternative) == ("TOST (Welch)", "equivalent")


@quickly
@given(pairs_of_runs(), margins)
def test_equivalence_of_pairs_is_that_of_statsmodels(both, margin):
    expected, lower, upper = ttost_paired(*map(np.array, both), -margin, margin)
    test = statistics.paired_equivalence_test(*both, margin)
    larger = max(lower, upper, key=lambda found: found[1])
    assert (test.p, test.statistic) == close((expected, larger[0]))
    assert test.name == "TOST (paired)"


@quickly
@given(runs(), runs(), margins)
def test_beyond_a_margin_is_welch_of_shifted_runs(a, b, margin):
    above = stats.ttest_ind(np.array(a) - margin, b, equal_var=False, alternative="greater")
    below = stats.ttest_ind(np.array(a) + margin, b, equal_var=False, alternative="less")
    test = statistics.beyond_test(Sample.of(a), Sample.of(b), margin)
    smaller = min(above, below, key=lambda found: found.pvalue)
    assert (test.p, test.statistic) == close((min(1, 2 * smaller.pvalue), smaller.statistic))
    assert (test.name, test.alternative) == ("beyond the margin (Welch)", "beyond")


@quickly
@given(pairs_of_runs(), margins)
def test_beyond_a_margin_by_pairs_is_the_paired_test_of_shifted_runs(both, margin):
    a, b = both
    above = stats.ttest_rel(np.array(a) - margin, b, alternative="greater")
    below = stats.ttest_rel(np.array(a) + margin, b, alternative="less")
    test = statistics.paired_beyond_test(a, b, margin)
    assert test.p == close(min(1, 2 * above.pvalue, 2 * below.pvalue))
    assert test.name == "beyond the margin (paired)"


def test_equivalence_with_a_known_number_is_of_one_sample():
    test = statistics.equivalence_test(SPREAD, Sample.printed(2.0), margin=3.0)
    upper = stats.ttest_1samp(SPREAD.values, 2.0 + 3.0, alternative="less")
    assert (test.name, test.df) == ("TOST (one-sample)", close(2))
    assert (test.statistic, test.p) == close((upper.statistic, upper.pvalue))


@pytest.mark.parametrize("scale", [1e-300, 1e-100, 1e100, 1e300])
def test_no_unit_is_too_small_or_too_large(scale):
    usual = statistics.mean_test(Sample.printed(1, 0.5, 5), Sample.printed(2, 0.75, 5))
    a, b = Sample.printed(scale, 0.5 * scale, 5), Sample.printed(2 * scale, 0.75 * scale, 5)
    test = statistics.mean_test(a, b)
    assert (test.statistic, test.df, test.p) == close((usual.statistic, usual.df, usual.p))


# Figures of the thesis (n = 5): of more overlap, of less, and p with Welch's degrees of freedom
# and with n − 1 = 4.
THESIS = {
    "E2.3 at 4096, full against disjoint": ((84.44, 0.71), (83.60, 0.63), 0.0419, 0.0595),
    "E3.2 at 32, S_H 2 against 8": ((89.26, 0.42), (88.29, 0.51), 0.0059, 0.0152),
    "E3.2 at 32, S_H 1 against 8": ((89.27, 0.15), (88.29, 0.51), 0.0052, 0.0073),
    "E3.2 at 64, S_H 2 against 8": ((88.95, 0.21), (87.77, 0.72), 0.0095, 0.0122),
    "E3.2 at 64, S_H 1 against 8": ((88.64, 0.38), (87.77, 0.72), 0.0268, 0.0376),
    "E3.2 at 128, S_H 2 against 8": ((88.29, 0.13), (87.26, 0.31), 0.0004, 0.0012),
    "E3.2 at 128, S_H 1 against 8": ((88.08, 0.30), (87.26, 0.31), 0.0014, 0.0066),
}


@pytest.mark.parametrize(("more", "less", "welch", "cautious"), THESIS.values(), ids=list(THESIS))
def test_printed_figures_are_tested_again_without_their_runs(more, less, welch, cautious):
    test = statistics.mean_test(Sample.printed(*more, n=5), Sample.printed(*less, n=5), "greater")
    assert round(test.p, 4) == welch
    assert round(stats.t.sf(test.statistic, 4), 4) == cautious


@pytest.mark.parametrize(
    ("a", "b", "two_sided", "greater", "less", "statistic"),
    [
        (SAME, SAME, 1, 0.5, 0.5, 0),
        (SAME, KNOWN, 1, 0.5, 0.5, 0),
        (HIGHER, SAME, 0, 0, 1, math.inf),
        (HIGHER, KNOWN, 0, 0, 1, math.inf),
        (SAME, HIGHER, 0, 1, 0, -math.inf),
        (Sample.of([0.3, 0.3]), Sample.of([0.1 + 0.2, 0.1 + 0.2]), 1, 0.5, 0.5, 0),  # rounding
    ],
)
def test_without_spread_a_test_is_the_limit_of_small_spreads(
    a, b, two_sided, greater, less, statistic
):
    found = {
        alternative: statistics.mean_test(a, b, alternative)
        for alternative in ("two-sided", "greater", "less")
    }
    assert [test.p for test in found.values()] == [two_sided, greater, less]
    assert {test.statistic for test in found.values()} == {statistic}
    assert {test.df for test in found.values()} == {None}

    def nearly(sample: Sample) -> Sample:
        return sample if sample.is_known_number else Sample(sample.n, sample.mean, 1e-12)

    for alternative, test in found.items():
        limit = statistics.mean_test(nearly(a), nearly(b), alternative)
        assert test.p == pytest.approx(limit.p, abs=1e-4)


def test_pairs_that_all_differ_by_the_same_are_no_nan():
    a, b = [1.5, 2.5, 3.5], [1.0, 2.0, 3.0]
    assert statistics.paired_test(a, b).p == 0
    assert statistics.paired_test(a, b, "greater").p == 0
    assert statistics.paired_test(a, b, "less").p == 1
    assert statistics.paired_test(a, a).p == 1
    assert statistics.paired_test(a, a, "greater").p == 0.5


def test_pairs_that_differ_by_rounding_alone_are_equal():
    shares = [0.57, 0.28, 0.29]
    printed, computed = [57.0, 28.0, 29.0], [100 * share for share in shares]
    assert printed != computed
    assert statistics.paired_test(printed, computed).p == 1


def test_equivalence_without_spread_is_a_comparison_with_the_margin():
    assert statistics.equivalence_test(HIGHER, SAME, margin=0.7).p == 0
    assert statistics.equivalence_test(HIGHER, SAME, margin=0.6).p == 0.5
    assert statistics.equivalence_test(HIGHER, SAME, margin=0.5).p == 1
    assert statistics.paired_equivalence_test([1.5, 2.5], [1.0, 2.0], margin=1).p == 0


# False alarms, coverage and power, by simulation

STUDIES = 1000


def simulated(*, runs: int, shift: float = 0.0, deviation: float = 1.0, seed: int) -> np.ndarray:
    """One row of normal figures per study."""
    return np.random.default_rng(seed).normal(shift, deviation, size=(STUDIES, runs))


def share_found(test, a: np.ndarray, b: np.ndarray) -> float:
    """The share of studies that a test calls significant."""
    return float(np.mean([test(x, y).p <= 0.05 for x, y in zip(a, b, strict=True)]))


def by_means(x, y, alternative: str):
    return statistics.mean_test(Sample.of(x), Sample.of(y), alternative)


def by_equivalence(x, y, margin: float):
    return statistics.equivalence_test(Sample.of(x), Sample.of(y), margin)


@pytest.mark.parametrize("deviation", [1.0, 4.0])
@pytest.mark.parametrize("alternative", ["two-sided", "greater"])
def test_one_study_in_twenty_finds_what_is_not_there(deviation, alternative):
    a = simulated(runs=5, seed=1)
    b = simulated(runs=5, deviation=deviation, seed=2)
    by_welch = share_found(partial(by_means, alternative=alternative), a, b)
    by_pairs = share_found(partial(statistics.paired_test, alternative=alternative), a, b)
    assert by_welch == pytest.approx(0.05, abs=0.015)
    assert by_pairs == pytest.approx(0.05, abs=0.015)


@pytest.mark.parametrize("deviation", [1.0, 4.0])
def test_at_the_edge_of_the_margin_one_study_in_twenty_finds_equivalence(deviation):
    margin = 10.0
    a = simulated(runs=5, shift=margin, seed=3)
    b = simulated(runs=5, deviation=deviation, seed=4)
    by_welch = share_found(partial(by_equivalence, margin=margin), a, b)
    by_pairs = share_found(partial(statistics.paired_equivalence_test, margin=margin), a, b)
    assert by_welch == pytest.approx(0.05, abs=0.015)
    assert by_pairs == pytest.approx(0.05, abs=0.015)


def test_at_the_edge_of_the_margin_hardly_a_study_finds_a_difference_beyond_it():
    margin = 10.0
    a, b = simulated(runs=5, shift=margin, seed=3), simulated(runs=5, seed=4)
    share = share_found(
        lambda x, y: statistics.beyond_test(Sample.of(x), Sample.of(y), margin), a, b
    )
    assert share == pytest.approx(0.025, abs=0.0125)


def test_with_a_narrow_margin_equivalence_is_hardly_ever_found():
    a, b = simulated(runs=5, shift=0.5, seed=5), simulated(runs=5, seed=6)
    assert share_found(partial(by_equivalence, margin=0.5), a, b) <= 0.05 + 0.015
    assert share_found(partial(by_equivalence, margin=5.0), a, b) > 0.95


def share_covered(interval, studies: np.ndarray) -> float:
    intervals = np.array([interval(values) for values in studies])
    return float(np.mean((intervals[:, 0] <= 0) & (intervals[:, 1] >= 0)))


def test_the_t_interval_contains_the_mean_as_often_as_it_says():
    studies = simulated(runs=5, seed=7)
    for confidence, tolerance in ((0.95, 0.015), (0.8, 0.03)):
        share = share_covered(
            lambda values, c=confidence: statistics.t_interval(Sample.of(values), c), studies
        )
        assert share == pytest.approx(confidence, abs=tolerance)


def test_the_bootstrap_of_five_runs_is_as_much_too_narrow_as_it_says():
    studies = simulated(runs=5, seed=8)
    bootstrap = partial(statistics.bootstrap_interval, resamples=999)
    assert share_covered(bootstrap, studies) == pytest.approx(0.84, abs=0.025)

    some_studies = studies[:200]
    widths = np.array([np.ptp(bootstrap(values)) for values in some_studies])
    of_t = np.array([np.ptp(statistics.t_interval(Sample.of(values))) for values in some_studies])
    assert np.mean(widths / of_t) == pytest.approx(0.64, abs=0.02)


def share_of_many(a: Sample, b: Sample, shift: float, alternative: str = "two-sided") -> float:
    """The share of 20,000 studies in which a Welch test finds that a is `shift` above b."""
    chance = np.random.default_rng(9)
    a_runs = chance.normal(shift, a.deviation, size=(20_000, a.n))
    b_runs = chance.normal(0, b.deviation, size=(20_000, b.n))
    found = stats.ttest_ind(a_runs, b_runs, axis=1, equal_var=False, alternative=alternative)
    return float(np.mean(found.pvalue <= 0.05))


@pytest.mark.parametrize("deviations", [(1.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("sizes", [(5, 5), (10, 5)])
@pytest.mark.parametrize(("alternative", "sign"), [("two-sided", 1), ("greater", 1), ("less", -1)])
def test_four_studies_in_five_find_the_detectable_difference(sizes, deviations, alternative, sign):
    a = Sample.printed(0.0, deviations[0], sizes[0])
    b = Sample.printed(0.0, deviations[1], sizes[1])
    shift = statistics.detectable_difference(a, b, alternative=alternative)
    assert share_of_many(a, b, sign * shift, alternative) == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize(("size", "found"), [(5, 0.78), (3, 0.69), (2, 0.47)])
def test_very_few_runs_find_it_as_seldom_as_its_docstring_says(size, found):
    sample = Sample.printed(0.0, 1.0, size)
    shift = statistics.detectable_difference(sample, sample)
    assert share_of_many(sample, sample, shift) == pytest.approx(found, abs=0.01)


def test_four_studies_in_five_find_the_detectable_difference_of_pairs():
    values = [-1.0, 0.0, 0.0, 0.0, 1.0]  # of deviation √½
    shift = statistics.paired_detectable_difference(values, [0.0] * 5)
    a = simulated(runs=5, shift=shift, deviation=0.5, seed=13)
    b = simulated(runs=5, deviation=0.5, seed=14)
    assert share_found(statistics.paired_test, a, b) == pytest.approx(0.8, abs=0.04)


# Many tests


# Few: statsmodels collects the garbage of all of Python at each call.
@settings(max_examples=6, deadline=None)
@given(some.lists(some.floats(0, 1), min_size=6, max_size=12))
def test_holms_correction_is_that_of_statsmodels(p_values):
    _, expected, *_ = multipletests(p_values, method="holm")
    assert statistics.holm(p_values) == close(list(expected))


def test_holms_correction_by_hand():
    assert statistics.holm([0.04, 0.01, 0.03]) == close([0.06, 0.03, 0.06])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]
    assert statistics.holm([]) == []


# Sizes of effects


@quickly
@given(runs(least=5), runs(least=5))
def test_hedges_g_is_that_of_statsmodels_but_for_its_approximate_correction(a, b):
    of_a, of_b = Sample.of(a), Sample.of(b)
    expected, _ = effectsize_smd(
        of_a.mean, of_a.deviation, of_a.n, of_b.mean, of_b.deviation, of_b.n
    )
    assert statistics.effect_size(of_a, of_b) == pytest.approx(expected, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize(("a_runs", "b_runs"), [(2, 2), (5, 5), (3, 20), (200, 300)])
def test_the_correction_for_small_samples_is_exact(a_runs, b_runs):
    # With deviations of 1 the uncorrected effect is the difference; the mean of the noncentral
    # t is too large by what the correction takes away.
    effect = statistics.effect_size(Sample(a_runs, 3.0, 1.0), Sample(b_runs, 1.0, 1.0))
    assert effect == close(2.0 / stats.nct.mean(a_runs + b_runs - 2, 1.0))


def test_effects_that_have_no_finite_size():
    assert statistics.effect_size(SPREAD, KNOWN) is None
    assert statistics.effect_size(KNOWN, SPREAD) is None
    assert statistics.effect_size(SAME, SAME) == 0
    assert statistics.effect_size(HIGHER, SAME) == math.inf
    assert statistics.effect_size(SAME, HIGHER) == -math.inf


def test_the_probability_of_improvement_by_hand():
    assert statistics.probability_of_improvement([2, 4], [1, 2, 3]) == close((1.5 + 3) / 6)
    assert statistics.probability_of_improvement([5], [1, 2]) == 1
    assert statistics.probability_of_improvement([1], [1]) == 0.5


@quickly
@given(runs(), runs())
def test_the_probability_of_improvement_is_the_share_of_mann_and_whitneys_u(a, b):
    u = stats.mannwhitneyu(a, b).statistic
    assert statistics.probability_of_improvement(a, b) == close(u / (len(a) * len(b)))


# Power

ALTERNATIVES_OF_STATSMODELS = [("two-sided", "two-sided"), ("greater", "larger")]


@pytest.mark.parametrize(("alternative", "name"), ALTERNATIVES_OF_STATSMODELS)
@pytest.mark.parametrize("size", [4, 5, 10, 100])
@pytest.mark.parametrize(("alpha", "power"), [(0.05, 0.8), (0.1, 0.9)])  # beyond, it gives NaN
def test_the_detectable_difference_is_that_of_statsmodels(size, alpha, power, alternative, name):
    sample = Sample.printed(7.0, 2.0, size)
    levels = {"alpha": alpha, "power": power, "alternative": alternative}
    of_two = statistics.detectable_difference(sample, sample, **levels)
    expected = TTestIndPower().power(of_two / 2.0, size, alpha, alternative=name)
    assert expected == pytest.approx(power, abs=1e-8)

    of_one = statistics.detectable_difference(sample, KNOWN, **levels)
    expected = TTestPower().power(of_one / 2.0, size, alpha, alternative=name)
    assert expected == pytest.approx(power, abs=1e-8)


@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
def test_the_power_at_the_detectable_difference_is_the_one_asked_for(alternative):
    levels = {"alpha": 0.01, "alternative": alternative}
    a, b = Sample.printed(0.0, 1.0, 5), Sample.printed(0.0, 3.0, 7)
    detectable = statistics.detectable_difference(a, b, power=0.9, **levels)
    assert statistics.power_of_test(a, b, detectable, **levels) == pytest.approx(0.9, abs=1e-9)
    assert statistics.power_of_test(SAME, HIGHER, 0.001) == 1


@quickly
@given(pairs_of_runs())
def test_the_detectable_difference_of_pairs_is_that_of_one_sample(both):
    a, b = map(np.array, both)
    expected = statistics.detectable_difference(Sample.of(a - b), Sample.printed(0.0))
    assert statistics.paired_detectable_difference(a, b) == close(expected)
    assert expected > 0


def test_without_spread_any_difference_is_detectable():
    assert statistics.detectable_difference(SAME, HIGHER) == 0
    assert statistics.paired_detectable_difference([1.5, 2.5], [1.0, 2.0]) == 0
    assert statistics.runs_needed(SAME, HIGHER, 0.001) == 2


@pytest.mark.parametrize(("alternative", "name"), ALTERNATIVES_OF_STATSMODELS)
@pytest.mark.parametrize("wanted", [0.25, 1.0, 3.0])
def test_the_runs_needed_are_the_fewest_that_have_the_power(wanted, alternative, name):
    sample = Sample.printed(0.0, 1.0, 5)
    needed = statistics.runs_needed(sample, sample, wanted, alternative=alternative)
    power = partial(TTestIndPower().power, wanted, alpha=0.05, alternative=name)
    assert power(nobs1=needed) >= 0.8 > power(nobs1=needed - 1)

    needed = statistics.runs_needed(sample, KNOWN, wanted, alternative=alternative)
    power = partial(TTestPower().power, wanted, alpha=0.05, alternative=name)
    assert power(nobs=needed) >= 0.8 > power(nobs=needed - 1)


@quickly
@given(some.floats(0.1, 5), some.floats(0.1, 5), some.floats(0.3, 20))
def test_with_the_runs_needed_the_wanted_difference_is_detectable(a_deviation, b_deviation, wanted):
    a, b = Sample.printed(0, a_deviation, 5), Sample.printed(0, b_deviation, 3)
    needed = statistics.runs_needed(a, b, wanted)

    def detectable(size: int) -> float:
        sizes = [Sample.printed(0, each.deviation, size) for each in (a, b)]
        return statistics.detectable_difference(*sizes)

    assert detectable(needed) <= wanted * (1 + 1e-9)
    assert needed == 2 or detectable(needed - 1) > wanted * (1 - 1e-9)


def test_runs_beyond_the_most_are_none():
    sample = Sample.printed(0.0, 1.0, 5)
    needed = statistics.runs_needed(sample, sample, 0.25)
    assert statistics.runs_needed(sample, sample, 0.25, most=needed) == needed
    assert statistics.runs_needed(sample, sample, 0.25, most=needed - 1) is None
    assert statistics.runs_needed(sample, sample, 1e-6) is None


def test_levels_that_scipys_noncentral_t_cannot_reach_have_their_limit():
    # With two runs, t > c is |x̄| > c·|x₁ − x₂|/2, and x₁ − x₂ is normal of deviation √2.
    two = Sample.printed(0.0, 1.0, 2)
    shift = statistics.detectable_difference(two, KNOWN, alpha=1e-6, power=0.9)
    critical = stats.t.isf(1e-6 / 2, 1)
    found = 1 - 2 * stats.norm.sf(shift * 2 / critical, scale=math.sqrt(2))
    assert found == pytest.approx(0.9, abs=1e-6)
    assert statistics.runs_needed(Sample.printed(0, 1e-200, 5), KNOWN, 1.0) == 2


# Times to a target

BY_HAND = TimesToTarget.of([1, 2, None, 4, 5], limits=[9, 9, 3, 9, 9])


@some.composite
def times_to_target(draw):
    """Runs with ties, some of which did not reach the target."""
    pairs = draw(
        some.lists(some.tuples(some.integers(1, 9), some.booleans()), min_size=1, max_size=12)
    )
    times = [float(time) if is_reached else None for time, is_reached in pairs]
    return TimesToTarget.of(times, [float(time) for time, _ in pairs])


def durations(times: TimesToTarget) -> list[float]:
    pairs = zip(times.times, times.limits, strict=True)
    return [limit if time is None else time for time, limit in pairs]


def arrived(times: TimesToTarget) -> list[int]:
    return [int(time is not None) for time in times.times]


def test_kaplan_and_meiers_curve_by_hand():
    times, shares = BY_HAND.steps
    assert times == (0, 1, 2, 3, 4, 5)
    assert shares == close((1, 4 / 5, 3 / 5, 3 / 5, 3 / 10, 0))
    assert (BY_HAND.n, BY_HAND.reached, BY_HAND.median) == (5, 4, 4)


def test_a_run_that_did_not_arrive_makes_the_median_later():
    dropped = TimesToTarget.of([1, 2, 4, 5], limits=[9] * 4)
    assert dropped.median == 2
    assert BY_HAND.median == 4


def test_there_is_no_median_where_fewer_than_half_arrived():
    assert TimesToTarget.of([1, 2, None, None, None], [9] * 5).median is None
    assert TimesToTarget.of([None, None], [9, 9]).median is None
    assert TimesToTarget.of([None, None], [9, 9]).steps == ((0, 9), (1, 1))


@pytest.mark.parametrize("half", range(1, 40))
def test_exactly_half_of_the_runs_are_enough_for_a_median(half):
    times = TimesToTarget.of([*range(1, half + 1), *[None] * half], [99] * (2 * half))
    assert times.median == half


@quickly
@given(times_to_target())
def test_the_median_is_that_of_statsmodels(times):
    assume(times.reached > 0)  # statsmodels has no curve without arrivals
    curve = SurvfuncRight(durations(times), arrived(times))
    # At exactly one half, statsmodels waits for the next arrival.
    assume(not np.isclose(curve.surv_prob, 0.5).any())
    expected = curve.quantile(0.5)
    assert times.median == (None if math.isnan(expected) else expected)


@quickly
@given(times_to_target(), times_to_target())
def test_the_log_rank_test_is_that_of_statsmodels(a, b):
    test = statistics.log_rank_test(a, b)
    assume(test.statistic != 0)
    expected, p = survdiff(
        np.array(durations(a) + durations(b)),
        np.array(arrived(a) + arrived(b)),
        np.array([0] * a.n + [1] * b.n),
    )
    assert (test.statistic**2, test.p) == close((expected, p))
    assert (test.name, test.df) == ("log-rank", None)


def test_the_log_rank_test_by_hand_and_which_side_is_sooner():
    sooner, later = TimesToTarget.of([1, 2], [9, 9]), TimesToTarget.of([3, 4], [9, 9])
    expected_arrivals, variance = 1 / 2 + 1 / 3, 1 / 4 + 2 / 9
    z = (2 - expected_arrivals) / math.sqrt(variance)

    is_sooner = statistics.log_rank_test(sooner, later, "less")
    assert (is_sooner.statistic, is_sooner.p) == close((-z, stats.norm.sf(z)))
    assert statistics.log_rank_test(sooner, later, "greater").p == close(stats.norm.cdf(z))
    assert statistics.log_rank_test(later, sooner, "greater").p == close(stats.norm.sf(z))
    assert statistics.log_rank_test(sooner, later).p == close(2 * stats.norm.sf(z))


@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (TimesToTarget.of([None] * 3, [9] * 3), TimesToTarget.of([None] * 2, [5] * 2)),
        (TimesToTarget.of([5, 5], [9, 9]), TimesToTarget.of([5], [9])),
        # Nobody of b is watched when those of a arrive; 49 · (1/49) is not 1 in floats.
        (TimesToTarget.of(range(1, 50), [99] * 49), TimesToTarget.of([None], [0.5])),
    ],
    ids=["nobody arrived", "all arrived at once", "never watched together"],
)
def test_where_no_arrival_tells_them_apart_nothing_is_found(a, b, alternative):
    test = statistics.log_rank_test(a, b, alternative)
    assert (test.statistic, test.p, test.alternative) == (0, 1, alternative)
    assert statistics.log_rank_test(b, a, alternative).p == 1


# Performance profiles

COSTS = {
    "sgd": {"digits": 1.0, "moons": 4.0, "letters": None, "words": None},
    "adam": {"words": math.inf, "letters": 10.0, "moons": 2.0, "digits": 2.5},
}


def test_the_performance_profile_by_hand():
    assert statistics.performance_profile(COSTS, [1, 2, 2.5, 100]) == {
        "sgd": [1 / 4, 2 / 4, 2 / 4, 2 / 4],
        "adam": [2 / 4, 2 / 4, 3 / 4, 3 / 4],
    }


def test_a_problem_that_costs_nothing_is_solved_best_by_who_pays_nothing():
    costs = {"free": {"p": 0.0}, "dear": {"p": 1.0}}
    assert statistics.performance_profile(costs, [1, 100]) == {"free": [1, 1], "dear": [0, 0]}


# What is refused

NOTHING = Sample.printed(1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Sample.of([1.0]), "'values' must hold at least 2 of them: one run has no spread"),
        (lambda: Sample.of([]), "'values' must hold at least 2"),
        (lambda: Sample.of([1.0, math.nan]), "'values' must be finite.*nan"),
        (lambda: Sample.of([1.0, math.inf]), "'values' must be finite.*inf"),
        (lambda: Sample.of("12"), "'values' must be one number"),
        (lambda: Sample.printed(1.0, 0.5, 1), "'n' must be at least 2: one run has no spread"),
        (lambda: Sample.printed(1.0, -0.5, 5), "'deviation' must be at least 0"),
        (lambda: Sample.printed(math.nan), "'mean' must be finite"),
        (lambda: Sample(2, 1.0, 0.5, (1.0,)), "'values' must be as many as 'n', 2"),
        (lambda: statistics.t_interval(NOTHING), "'sample' must have a deviation"),
        (lambda: statistics.t_interval(SPREAD, 1.0), "'confidence' must be above 0 and below 1"),
        (lambda: statistics.t_interval(SPREAD, 95), "'confidence' must be above 0 and below 1"),
        (lambda: statistics.bootstrap_interval([1.0]), "'values' must hold at least 2"),
        (lambda: statistics.bootstrap_interval([1.0, 2.0], 0), "'confidence' must be above 0"),
        (lambda: statistics.bootstrap_interval([1, 2], resamples=0), "'resamples' must be at leas"),
        (lambda: statistics.bootstrap_interval([1, 2], seed=-1), "'seed' must be at least 0"),
        (lambda: statistics.difference_interval(NOTHING, NOTHING), "'b' must have a deviation"),
        (lambda: statistics.mean_test(NOTHING, NOTHING), "'b' must have a deviation where 'a'"),
        (lambda: statistics.mean_test(SPREAD, SPREAD, "larger"), "'alternative' must be one of"),
        (lambda: statistics.paired_test([1, 2, 3], [1, 2]), "'b_values' must hold one.* 3 .got 2"),
        (lambda: statistics.paired_test([1], [1]), "'a_values' must hold at least 2"),
        (lambda: statistics.paired_test([1, math.nan], [1, 2]), "'a_values' must be finite"),
        (lambda: statistics.equivalence_test(SPREAD, SPREAD, 0), "'margin' must be above 0"),
        (lambda: statistics.equivalence_test(NOTHING, NOTHING, 1), "'b' must have a deviation"),
        (lambda: statistics.paired_equivalence_test([1, 2], [1, 2], 0), "'margin' must be above 0"),
        (lambda: statistics.holm([0.5, 1.5]), "'p_values' must be between 0 and 1"),
        (lambda: statistics.holm([math.nan]), "'p_values' must be between 0 and 1"),
        (lambda: statistics.probability_of_improvement([], [1]), "'a_values' must hold at least 1"),
        (lambda: statistics.detectable_difference(NOTHING, NOTHING), "'b' must have a deviation"),
        (lambda: statistics.detectable_difference(SPREAD, SPREAD, 0.5), "'alpha' must be above 0"),
        (
            lambda: statistics.detectable_difference(SPREAD, SPREAD, power=0.04),
            "'power' must be above 'alpha', 0.05",
        ),
        (lambda: statistics.runs_needed(SPREAD, SPREAD, 0), "'wanted_difference' must be above 0"),
        (lambda: statistics.runs_needed(NOTHING, NOTHING, 1), "'b' must have a deviation"),
        (lambda: statistics.runs_needed(SPREAD, SPREAD, 1, most=1), "'most' must be at least 2"),
        (lambda: TimesToTarget.of([], []), "'times' must hold at least one run"),
        (lambda: TimesToTarget.of([1, None], [9]), "'limits' must be as many as 'times', 2"),
        (lambda: TimesToTarget.of([None], [math.inf]), "'limits' must be .*finite"),
        (lambda: TimesToTarget.of([math.nan], [1]), "'times' must be .*finite"),
        (lambda: TimesToTarget.of([-1], [1]), "'times' must be at least 0"),
        (lambda: TimesToTarget.of([10], [9]), "'times' must be at most the limit, 9 .got 10"),
        (
            lambda: statistics.log_rank_test(BY_HAND, BY_HAND, "sooner"),
            "'alternative' must be one of",
        ),
        (lambda: statistics.performance_profile(COSTS, [0.5]), "'ratios' must be at least 1"),
        (lambda: statistics.performance_profile({}, [1]), "'costs' must have at least one method"),
        (lambda: statistics.performance_profile({"sgd": {}}, [1]), "'costs' must have at least"),
        (
            lambda: statistics.performance_profile({"a": {"p": 1}, "b": {"q": 1}}, [1]),
            "'costs' must have the same problems for 'b'",
        ),
        (lambda: statistics.performance_profile({"a": {"p": -1}}, [1]), "'costs' must be at least"),
        (lambda: statistics.performance_profile({"a": {"p": math.nan}}, [1]), "'costs' must be"),
    ],
)
def test_what_cannot_be_is_refused_in_words(call, message):
    with pytest.raises(InvalidField, match=message):
        call()
