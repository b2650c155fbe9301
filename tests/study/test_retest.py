"""Printed figures, tested again: against scipy and statsmodels, and what becomes of verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

import flockstep as fs
from flockstep.study import TESTS

STUDIES = Path(__file__).parents[2] / "studies"
THESIS = sorted(STUDIES.glob("e*.toml"))


def study_of(name: str) -> fs.Study:
    return fs.Study.from_toml(STUDIES / f"{name}.toml")


def of_cell(found: tuple[fs.Retest, ...], **levels: object) -> fs.Retest:
    """The one that is about these levels."""
    wanted = {f"{name}={value}" for name, value in levels.items()}
    (each,) = [each for each in found if wanted <= {*each.cell.split(", ")}]
    return each


@pytest.fixture(scope="module")
def batch():
    return fs.retest(study_of("e2_3_batch"))


@pytest.fixture(scope="module")
def households():
    return fs.retest(study_of("e3_2_2_constant_effective_batch"))


# The figures of the thesis, copied from it: mean and deviation of 5 runs.
FULL, DISJOINT = (84.44, 0.71), (83.60, 0.63)
OWN = {32: (88.29, 0.51), 64: (87.77, 0.72), 128: (87.26, 0.31)}
SHARED = {
    (32, "two"): ((89.26, 0.42), 0.014),
    (32, "one"): ((89.27, 0.15), 0.007),
    (64, "two"): ((88.95, 0.21), 0.0113),
    (64, "one"): ((88.64, 0.38), 0.0375),
    (128, "two"): ((88.29, 0.13), 0.001),
    (128, "one"): ((88.08, 0.30), 0.0065),
}


def by_scipy(one: tuple[float, float], two: tuple[float, float]):
    """Welch's test of one > two."""
    return stats.ttest_ind_from_stats(*one, 5, *two, 5, equal_var=False, alternative="greater")


def test_the_test_that_comes_near_is_significant_with_welchs_degrees_of_freedom(batch):
    each = of_cell(batch, data="full", batch=4096)
    expected = by_scipy(FULL, DISJOINT)
    assert each.welch_p == pytest.approx(expected.pvalue)
    assert each.p == pytest.approx(stats.t.sf(expected.statistic, 4))
    assert (round(each.p, 4), round(each.welch_p, 4)) == (0.0595, 0.0419)
    assert each.two_sided_p == pytest.approx(2 * each.welch_p)
    assert each.difference == pytest.approx(0.0084)
    assert each.figures[0] == pytest.approx((5, 0.8444, 0.0071))
    assert each.figures[1] == pytest.approx((5, 0.8360, 0.0063))
    assert (each.printed_p, each.published, each.fitting) == (0.059, False, "df = n − 1")
    assert each.changed == ("Welch",)
    assert each.rounded_away == ()
    assert each.is_equal is False
    assert "published: not significant (p = 0.059); significant by Welch (p = 0.0419)" in each.words
    assert "After Holm's correction for 13 tests it is not" in each.words


@pytest.mark.parametrize(("period", "shards"), SHARED)
def test_the_printed_p_values_of_households_are_those_of_4_degrees_of_freedom(
    households, period, shards
):
    each = of_cell(households, households=8, period=period, shards=shards)
    figures, printed = SHARED[period, shards]
    expected = by_scipy(figures, OWN[period])
    assert each.welch_p == pytest.approx(expected.pvalue)
    assert each.p == pytest.approx(stats.t.sf(expected.statistic, 4))
    assert each.against == "shards=own"
    assert (each.printed_p, each.fitting, each.tail) == (printed, "df = n − 1", "greater")
    assert each.p_range[0] < each.p < each.p_range[1]
    assert each.welch_p_range[0] < each.welch_p < each.welch_p_range[1]
    assert abs(each.p - printed) < 0.0013
    # One does not fit, whatever was rounded; the others do, as printed.
    digits = len(str(printed)) - 2
    low, high = (round(end, digits) for end in each.p_range)
    assert (low <= printed <= high) == ((period, shards) != (64, "two"))


def test_corrections_are_those_of_statsmodels(batch, households):
    for table in (batch, households):
        tested = [each for each in table if each.p is not None]
        assert {each.tests_in_table for each in table} == {len(tested)}
        for source, target in (
            ("p", "corrected_p"),
            ("welch_p", "corrected_welch_p"),
            ("equivalence_p", "corrected_equivalence_p"),
        ):
            values = [getattr(each, source) for each in tested]
            expected = multipletests(values, method="holm")[1]
            assert [getattr(each, target) for each in tested] == pytest.approx(expected)
        # Alone, a table is all there is.
        assert [each.overall_p for each in tested] == [each.corrected_p for each in tested]


def test_equality_is_that_of_two_one_sided_tests(batch):
    each = of_cell(batch, data="full", batch=128)
    (one, two), margin = ((91.44, 0.20), (91.52, 0.11)), 0.5
    above = by_scipy((one[0] + margin, one[1]), two).pvalue
    below = 1 - by_scipy((one[0] - margin, one[1]), two).pvalue
    assert each.equivalence_p == pytest.approx(max(above, below))
    assert each.is_equal is True
    assert each.tail == "less"  # that of the printed difference
    assert not each.is_tail_known


def test_all_cells_of_the_published_scale_are_tested_against_the_baseline(batch):
    against = [each for each in batch if each.against == "data=disjoint"]
    assert len(against) == 12  # six batches, of which the scaled study has two
    (claim,) = [each for each in batch if each not in against]
    assert (claim.cell, claim.against) == ("data=disjoint, batch=4096", "batch=1024")
    assert (claim.tail, claim.published, claim.changed) == ("less", True, ())
    assert claim.printed == "less, without a test"
    degrees = fs.retest(study_of("e2_2_degrees"))
    assert {each.against for each in degrees} == {"data=disjoint"}
    assert len(degrees) == 14


def test_what_has_no_figures_is_told_and_not_tested(households):
    each = of_cell(households, households=8, period=16, shards="two")
    assert (each.p, each.published, each.changed, each.is_equal) == (None, True, (), None)
    assert each.words.endswith("published: significant; no figures are printed.")


def test_of_a_difference_and_a_p_the_range_of_welchs_p_is_told():
    (each,) = fs.retest(study_of("e3_2_3_scaled_rate"))
    low = stats.t.sf(stats.t.isf(0.09, 4), 8)
    assert f"between {low:.4f} and 0.0900 whatever they were" in each.words
    assert "(+0.57 points)" in each.words
    assert "equality within ±0.50 points cannot be shown" in each.words


@pytest.fixture(scope="module")
def thesis():
    return fs.retest(*map(fs.Study.from_toml, THESIS))


def test_over_all_tables_figures_that_several_have_are_one_test(thesis):
    tested = [each for each in thesis if each.p is not None]
    distinct = {(each.figures, each.tail): each for each in tested}
    assert {each.tests_overall for each in tested} == {len(distinct)}
    assert {(each.cell, each.study, each.also_in) for each in tested if each.also_in} == {
        ("data=full", "e2_2_degrees", "e2_1_full_overlap"),
        ("data=full, batch=128", "e2_3_batch", "e2_1_full_overlap"),
        ("data=half, batch=128", "e2_3_batch", "e2_2_degrees"),
    }
    for source, target in (("p", "overall_p"), ("welch_p", "overall_welch_p")):
        values = [getattr(each, source) for each in distinct.values()]
        expected = dict(zip(distinct, multipletests(values, method="holm")[1], strict=True))
        for each in tested:
            assert getattr(each, target) == pytest.approx(expected[each.figures, each.tail])


def test_the_verdicts_of_the_thesis_that_change(thesis):
    changed = {(each.study[:4], each.cell): each.changed for each in thesis if each.changed}
    both, over_all = tuple(TESTS)[:2], tuple(TESTS)[4:]
    assert changed == {
        ("e1_w", "workers=16"): both,
        ("e2_2", "data=coarse-4"): both,
        ("e2_2", "data=medium-2"): ("Welch",),
        ("e2_2", "data=fine-6"): both,
        ("e2_2", "data=fine-8"): both,
        ("e2_3", "data=full, batch=4096"): ("Welch",),
        ("e3_2", "households=8, period=32, shards=two"): over_all,
        ("e3_2", "households=8, period=32, shards=one"): over_all,
        ("e3_2", "households=8, period=64, shards=two"): over_all,
        ("e3_2", "households=8, period=64, shards=one"): over_all,
        ("e3_2", "households=8, period=128, shards=one"): over_all[:1],
    }
    unsure = [each.cell for each in thesis if {*each.rounded_away} & {*each.changed}]
    assert unsure == ["data=fine-8"]


# ---- Small studies


def small(**changes: object) -> fs.Study:
    figures = [
        {"cell": {"workers": 1}, "mean": 2.0, "deviation": 0.5, "n": 3},
        {"cell": {"workers": 2}, "mean": 3.5, "deviation": 0.25, "n": 10},
        {"cell": {"workers": 4}, "mean": 3.0},
    ]
    declared = {
        "base": {"task": "digits-mlp", "strategy": "sync_sgd"},
        "axes": {"workers": [1, 2, 4]},
        "metric": "test_loss",
        "published": figures,
    }
    return fs.Study("?", **declared | changes)


def test_unequal_numbers_of_runs_and_figures_that_are_no_percentages():
    (each,) = fs.retest(small())
    expected = stats.ttest_ind_from_stats(
        3.5, 0.25, 10, 2.0, 0.5, 3, equal_var=False, alternative="greater"
    )
    assert each.welch_p == pytest.approx(expected.pvalue)
    assert expected.pvalue == pytest.approx(stats.t.sf(expected.statistic, each.df))
    assert each.p == pytest.approx(stats.t.sf(expected.statistic, 2))  # the fewer runs decide
    assert (each.published, each.changed, each.equivalence_p) == (None, (), None)
    assert each.words.startswith("workers=2 against workers=1 (+1.5): no verdict is printed; Welch")
    row = each.row()
    assert (row["cell"], row["changed"], row["is_equal"]) == ("workers=2", [], None)
    assert row["words"] == each.words


def test_a_tail_is_that_of_the_paper_then_of_a_claim():
    claims = [{"cell": {"workers": 2}, "expect": "better"}]  # of a loss: less
    (claimed,) = fs.retest(small(hypotheses=claims))
    assert (claimed.tail, claimed.is_tail_known, claimed.published) == ("less", True, True)
    assert claimed.p > 0.9
    tests = [{"cell": {"workers": 2}, "significant": True, "tail": "two-sided"}]
    (printed,) = fs.retest(small(hypotheses=claims, printed_tests=tests))
    (greater,) = fs.retest(small())
    assert printed.p == pytest.approx(2 * greater.p)
    assert printed.welch_p == pytest.approx(2 * greater.welch_p)


def test_of_two_printed_tests_of_a_pair_the_one_with_more_levels_counts():
    one, every = {"cell": {"workers": 2}, "p": 0.04}, {"cell": {}, "significant": False}
    for tests in ([one, every], [every, one]):
        found = fs.retest(small(printed_tests=tests))
        assert [each.printed for each in found] == ["significant (p = 0.04)", "not significant"]
    again = {**one, "p": 0.06}
    assert fs.retest(small(printed_tests=[one, again]))[0].published is False  # the later


def test_a_pair_of_figures_without_a_spread():
    equal = [
        {"cell": {"workers": 1}, "mean": 2.0, "deviation": 0.0, "n": 3},
        {"cell": {"workers": 2}, "mean": 2.0, "deviation": 0.0, "n": 3},
    ]
    (each,) = fs.retest(small(published=equal, margin=0.1))
    assert (each.p, each.welch_p, each.df, each.equivalence_p) == (0.5, 0.5, None, 0)


def test_the_same_figures_twice_in_one_table_are_two_tests():
    same = {"mean": 3.5, "deviation": 0.25, "n": 10}
    figures = [
        {"cell": {"workers": 1}, "mean": 2.0, "deviation": 0.5, "n": 3},
        {"cell": {"workers": 2}, **same},
        {"cell": {"workers": 4}, **same},
    ]
    study = small(published=figures)
    found = fs.retest(study, study.replace(name="again"))
    assert [each.tests_overall for each in found] == [2] * 4
    assert [each.also_in for each in found] == ["", "", "study", "study"]
    assert [each.overall_p for each in found] == [found[0].corrected_p] * 4


def test_only_studies_are_taken():
    with pytest.raises(fs.InvalidField, match="'studies' must be at least one"):
        fs.retest()
    with pytest.raises(fs.InvalidField, match="'studies' must be of fs.Study"):
        fs.retest("studies/e2_3_batch.toml")


# ---- Declaring


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({"cell": {"workers": 2}}, "'p' must be given, or 'significant'"),
        ({"p": 0.1}, "'cell' must be given"),
        ({"cell": {"workers": 2}, "p": 1.5}, "'p' must be between 0 and 1"),
        ({"cell": {"workers": 2}, "significant": "no"}, "'significant' must be True or False"),
        ({"cell": {"workers": 2}, "p": 0.1, "tail": "up"}, "'tail' must be one of"),
        ({"cell": {"workers": 2}, "p": 0.1, "difference": "x"}, "'difference' must be a number"),
        ({"cell": {"workers": 2}, "p": 0.1, "n": 1}, "'n' must be at least 2"),
        ({"cell": {"workers": 2}, "p": 0.1, "unit": "‰"}, "'unit' must be one of"),
        ({"cell": {"workers": 3}, "p": 0.1}, "'cell' must be one that exists"),
        (
            {"cell": {"workers": 2}, "against": {"workers": 3}, "p": 0.1},
            "'against' must be one that exists",
        ),
        ({"cell": {"workers": 1}, "p": 0.1}, "'against' must be of another cell that exists"),
        ({"cell": {}, "p": 0.1}, "'cell' must be one cell, not 2, where figures are printed"),
        ({"cell": {"workers": 2}, "pp": 0.1}, "unknown field 'pp'"),
    ],
)
def test_a_wrong_printed_test_is_named(test, message):
    with pytest.raises(fs.FlockstepError) as caught:
        small(printed_tests=[test])
    assert str(caught.value).startswith(f"printed test 1: {message}"), caught.value


def test_printed_tests_read_back_from_their_text():
    study = small(
        printed_tests=[
            fs.PrintedTest({}, significant=False, source="text"),
            fs.PrintedTest({"workers": 4}, {"workers": 2}, p=0.0, tail="less"),
            {"cell": {"workers": 4}, "p": 0.09, "difference": -0.5, "n": 5, "unit": "%"},
        ]
    )
    assert fs.Study.from_toml(study.to_toml()) == study
    for path in THESIS:
        declared = fs.Study.from_toml(path)
        assert fs.Study.from_toml(declared.to_toml()) == declared
