"""Verdicts: what a study says of figures whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from tests.support.outcomes import made_up_outcome, made_up_study, normal_scores

import flockstep as fs
from flockstep.study import Outcome
from flockstep.study.planning import planned_tries
from flockstep.study.statistics import Sample, mean_test

SYNC, LOCAL, NOSYNC = "sync_sgd", "local_sgd(period=8)", "nosync(pull=0.1)"
TWO = {"strategy": [SYNC, LOCAL]}


def outcome_of(means, deviation=0.005, seed=0, **fields):
    study = made_up_study(**fields)
    return made_up_outcome(study, normal_scores(means, deviation, seed))


def values(outcome, label):
    (cell,) = [each for each in outcome.study.cells if each.label == label]
    return [*outcome.values(cell).values()]


def test_every_cell_is_compared_with_the_baseline_and_says_all_of_it():
    outcome = outcome_of({SYNC: 0.94, LOCAL: 0.90, NOSYNC: 0.94}, margin=0.02)
    local, nosync = outcome.comparisons
    a, b = values(outcome, LOCAL), values(outcome, SYNC)
    theirs = stats.ttest_ind(a, b, equal_var=False)
    assert local.p == pytest.approx(theirs.pvalue)
    assert local.corrected_p == pytest.approx(2 * theirs.pvalue)  # the smaller of two, by Holm
    assert local.paired_p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    interval = theirs.confidence_interval()
    assert local.interval == pytest.approx((interval.low, interval.high))
    assert local.n == (5, 5)
    assert local.means == pytest.approx((np.mean(a), np.mean(b)))
    assert local.deviations == pytest.approx((np.std(a, ddof=1), np.std(b, ddof=1)))
    assert local.difference == pytest.approx(np.mean(a) - np.mean(b))
    assert local.effect_size < -2
    assert local.improvement == 0
    assert local.verdict == local.finding == "less"
    assert "is worse than sync_sgd" in local.words
    assert "Welch, two-sided" in local.words
    assert nosync.verdict == "equal"
    assert "equals sync_sgd within ±2.00 points" in nosync.words


def test_nothing_shown_is_told_with_the_difference_that_could_have_been_seen():
    (told,) = outcome_of({SYNC: 0.94, LOCAL: 0.94}, axes=TWO, deviation=0.02).comparisons
    assert told.verdict == "open"
    assert told.detectable > 0.02
    assert "no difference is shown" in told.words
    assert "would have seen" in told.words


def test_one_run_says_nothing():
    outcome = outcome_of({SYNC: 0.9, LOCAL: 0.8}, axes=TWO, seeds=1)
    (told,) = outcome.comparisons
    assert told.verdict == "too few runs"
    assert told.p is None
    assert "at least 2 on each side (n = 1 and 1)" in told.words
    assert outcome.cells[0].interval is None


def test_five_hundred_null_studies_raise_the_alarm_in_five_per_cent():
    means = {SYNC: 0.9, LOCAL: 0.9}
    welch = made_up_study(axes=TWO)
    paired = welch.replace(test="paired")
    alarms = {"welch": 0, "paired": 0}
    for seed in range(500):
        outcome = made_up_outcome(welch, normal_scores(means, 0.01, seed), looks=1)
        for each in (outcome, Outcome(paired, outcome.records)):
            alarms[each.study.test] += each.comparisons[0].finding in ("greater", "less")
    assert 15 <= alarms["welch"] <= 35
    assert 15 <= alarms["paired"] <= 35


def test_a_table_of_many_nulls_raises_any_alarm_in_at_most_five_per_cent():
    names = [SYNC, LOCAL, NOSYNC, "independent", "gosgd"]
    study = made_up_study(axes={"strategy": names})
    alarms = 0
    for seed in range(200):
        outcome = made_up_outcome(
            study, normal_scores(dict.fromkeys(names, 0.9), 0.01, seed), looks=1
        )
        alarms += any(each.finding != "open" for each in outcome.comparisons)
    assert alarms <= 0.09 * 200  # without Holm some 17 %


HYPOTHESIS = {"cell": {"strategy": LOCAL}, "claim": "local is not as good"}


@pytest.mark.parametrize(
    ("expect", "gap", "verdict"),
    [
        ("worse", -0.05, "agrees"),
        ("less", -0.05, "agrees"),
        ("better", -0.05, "disagrees"),
        ("greater", -0.05, "disagrees"),
        ("worse", 0.0, "disagrees"),  # shown to be equal
        ("equal", 0.0, "agrees"),
        ("equal", -0.05, "disagrees"),
    ],
)
def test_a_claim_agrees_or_disagrees(expect, gap, verdict):
    hypotheses = [{**HYPOTHESIS, "expect": expect, "source": "Table 1"}]
    means = {SYNC: 0.9, LOCAL: 0.9 + gap}
    outcome = outcome_of(means, axes=TWO, hypotheses=hypotheses, margin=0.02)
    _, told = outcome.comparisons
    assert (told.family, told.verdict) == ("hypothesis", verdict)
    assert told.words.startswith(f"Local is not as good: {verdict}.")


def test_a_sure_difference_that_may_be_within_the_margin_refutes_no_equality():
    hypotheses = [{**HYPOTHESIS, "expect": "equal"}]
    means = {SYNC: 0.9, LOCAL: 0.88}
    outcome = outcome_of(means, 0.007, axes=TWO, hypotheses=hypotheses, margin=0.02)
    plain, told = outcome.comparisons
    assert plain.finding == told.finding == "less"
    assert told.verdict == "too little power"
    assert told.equivalence_p > 0.05
    assert "whether by more than 2.00 points is open" in told.words


@pytest.mark.parametrize("expect", ["worse", "equal", "better"])
def test_a_claim_with_too_few_runs_has_too_little_power(expect):
    hypotheses = [{**HYPOTHESIS, "expect": expect}]
    means = {SYNC: 0.9, LOCAL: 0.9}
    outcome = outcome_of(means, 0.02, axes=TWO, hypotheses=hypotheses, margin=0.01)
    _, told = outcome.comparisons
    assert told.verdict == "too little power"
    assert 0 < told.power < 0.5
    assert "runs on each side are needed" in told.words


def test_of_a_loss_less_is_better():
    study = made_up_study(axes=TWO, metric="test_loss")
    assert not study.higher_is_better
    outcome = made_up_outcome(study, normal_scores({SYNC: 0.9, LOCAL: 0.9}, 0.01, 0))
    assert outcome.comparisons[0].metric == "test_loss"
    assert outcome.cells[0].mean == pytest.approx(0.1 + np.exp(-3))


def test_one_sided_tests_are_one_sided():
    hypotheses = [{**HYPOTHESIS, "expect": "less"}]
    outcome = outcome_of({SYNC: 0.9, LOCAL: 0.895}, axes=TWO, hypotheses=hypotheses)
    a, b = values(outcome, LOCAL), values(outcome, SYNC)
    theirs = stats.ttest_ind(a, b, equal_var=False, alternative="less")
    assert outcome.comparisons[1].p == pytest.approx(theirs.pvalue)
    assert outcome.comparisons[1].test == "Welch, less"


def test_runs_that_do_not_start_alike_are_not_paired():
    axes = {"workers": [2, 4]}
    base = {"task": "digits-mlp", "strategy": "sync_sgd", "epochs": 1}
    study = made_up_study(base=base, axes=axes, test="paired")
    outcome = made_up_outcome(study, lambda labels, seed: 0.9 + 0.001 * seed)
    (told,) = outcome.comparisons
    assert told.paired_p is None
    assert told.test == "Welch, two-sided"


def test_of_pairs_only_runs_with_a_partner_have_a_say():
    """The runs without one would turn the sign."""
    study = made_up_study(axes=TWO, test="paired", seeds=8)

    def score(labels, seed):
        if labels["strategy"] == SYNC:
            return None if seed >= 4 else 0.9 + 0.001 * seed
        return 0.901 + 0.001 * seed + 0.00001 * (seed % 2) if seed < 4 else 0.5

    (told,) = made_up_outcome(study, score).comparisons
    assert told.n == (4, 4)
    assert told.verdict == "greater"
    assert told.difference == pytest.approx(0.001, abs=1e-4)
    assert told.interval[0] < told.difference < told.interval[1]


def test_a_directed_claim_under_the_null_is_rarely_shown_either_way():
    hypotheses = [{**HYPOTHESIS, "expect": "less"}]
    study = made_up_study(axes=TWO, hypotheses=hypotheses)
    verdicts = []
    for seed in range(300):
        outcome = made_up_outcome(
            study, normal_scores({SYNC: 0.9, LOCAL: 0.9}, 0.01, seed), looks=1
        )
        verdicts.append(outcome.comparisons[1].verdict)
    assert verdicts.count("agrees") <= 0.09 * 300  # at alpha, and chance
    assert verdicts.count("disagrees") <= 0.055 * 300  # at half of it


# ---- Published figures


def published(one, other, **more):
    figures = [
        {"cell": {"strategy": SYNC}, "mean": one, "unit": "%", **more},
        {"cell": {"strategy": LOCAL}, "mean": other, "unit": "%", "source": "Table 2", **more},
    ]
    return {"axes": TWO, "published": figures}


@pytest.mark.parametrize(
    ("here", "verdict"), [(0.85, "agrees"), (0.94, "disagrees"), (0.90, "disagrees")]
)
def test_a_published_difference_is_a_claim(here, verdict):
    declared = published(82.0, 75.0)
    outcome = outcome_of({SYNC: 0.9, LOCAL: here}, margin=0.02, **declared)
    _, told = outcome.comparisons
    assert (told.family, told.expect, told.verdict) == ("published", "less", verdict)
    assert told.published == pytest.approx(-0.07)
    assert told.source == "Table 2"


def test_a_published_difference_within_the_margin_claims_equality():
    outcome = outcome_of({SYNC: 0.9, LOCAL: 0.9}, margin=0.02, **published(82.0, 81.0))
    assert (outcome.comparisons[1].expect, outcome.comparisons[1].verdict) == ("equal", "agrees")


def test_printed_deviations_are_tested_by_themselves():
    declared = published(82.0, 75.0, deviation=1.5, n=5)
    told = outcome_of({SYNC: 0.9, LOCAL: 0.85}, **declared).comparisons[1]
    printed = mean_test(Sample.printed(0.75, 0.015, 5), Sample.printed(0.82, 0.015, 5))
    assert told.printed_p == pytest.approx(printed.p)


def test_a_published_value_may_be_compared_itself():
    declared = published(90.0, 80.0)
    outcome = outcome_of({SYNC: 0.9, LOCAL: 0.9}, margin=0.02, published_by="value", **declared)
    verdicts = {
        each.cell: each.verdict for each in outcome.comparisons if each.family == "published"
    }
    assert verdicts == {SYNC: "agrees", LOCAL: "disagrees"}


# ---- Costs to a target


def test_unreached_targets_are_censored_and_never_dropped():
    study = made_up_study(axes=TWO, metric="seconds_to_target", target=0.85)
    scores = {SYNC: 0.95, LOCAL: 0.5}
    outcome = made_up_outcome(study, lambda labels, seed: scores[labels["strategy"]] + 0.001 * seed)
    sync, local = outcome.cells
    assert (sync.times.n, sync.times.reached) == (5, 5)
    assert (local.times.n, local.times.reached) == (5, 0)
    assert local.mean is None
    (told,) = outcome.comparisons
    assert told.test == "log-rank, two-sided"
    assert told.n == (5, 5)
    assert told.verdict == "greater"
    assert f"{LOCAL} is slower than {SYNC}" in told.words


def test_epochs_to_a_score_are_compared_without_a_target():
    """As in a figure that shows how many epochs 87 % takes."""
    study = made_up_study(axes=TWO, metric="epochs_to:0.87")
    assert not study.higher_is_better
    scores = {SYNC: 0.95, LOCAL: 0.5}
    outcome = made_up_outcome(study, lambda labels, seed: scores[labels["strategy"]] + 0.001 * seed)
    sync, local = outcome.cells
    assert (sync.times.reached, local.times.reached) == (5, 0)
    for record in outcome.records_of(sync.cell):
        first = next(look for look in record.history if look["accuracy"] >= 0.87)
        assert outcome.value(record) == first["epoch"]
    (told,) = outcome.comparisons
    assert told.test == "log-rank, two-sided"
    assert f"{LOCAL} is at the target after more epochs than {SYNC}" in told.words
    assert outcome.target == 0.87


def test_a_score_that_is_no_number_is_no_metric():
    for name in ("epochs_to:high", "looks_to:0.8", "epochs_to:", "epochs_to:inf"):
        with pytest.raises(fs.UnknownName, match=rf"unknown metric '{name}'.*epochs_to:0.87"):
            made_up_study(metric=name)


@pytest.mark.parametrize(
    ("metric", "measure"),
    [("distance_mean", "distance"), ("test_replicas_min", "replicas"), ("staleness_max", "stal")],
)
def test_what_has_to_be_measured_must_be_asked_for(metric, measure, tmp_path):
    with pytest.raises(fs.InvalidField, match=f"'metric' must be measured: measure = '{measure}"):
        fs.run_study(made_up_study(axes=TWO, metric=metric), tmp_path)


def test_without_a_declared_target_it_is_the_lowest_mean():
    outcome = outcome_of({SYNC: 0.9, LOCAL: 0.8}, axes=TWO, deviation=0.0)
    assert outcome.target == pytest.approx(0.8)
    assert outcome_of({SYNC: 0.9, LOCAL: 0.8}, axes=TWO, target=0.7).target == 0.7


def test_a_target_is_declared_once():
    base = {"task": "digits-mlp", "workers": 2, "target": 0.5}
    with pytest.raises(fs.InvalidField, match="'target' must be given once"):
        made_up_study(base=base, target=0.6)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (published(82, 75) | {"published_by": "value"}, "'margin' must be given: how near"),
        (published(82, 82), "'margin' must be given where published figures are equal"),
        (published(82, 75) | {"metric": "steps_to_target"}, "'metric' must be one that has a mean"),
        (
            {"axes": TWO, "published": [{"cell": {"strategy": LOCAL}, "mean": 1}]},
            "'published' must have a figure of the baseline, sync_sgd",
        ),
        (
            {"axes": TWO, "published": [{"cell": {"strategy": SYNC}, "mean": 1}] * 2},
            "'published' must have one figure of sync_sgd",
        ),
        (
            {
                "axes": TWO,
                "metric": "seconds_to_target",
                "margin": 1.0,
                "hypotheses": [{"cell": {"strategy": LOCAL}, "expect": "equal"}],
            },
            "hypothesis 1: 'expect' must be a direction",
        ),
        ({"alpha": 0.6}, "'alpha' must be above 0 and below 0.5"),
    ],
)
def test_what_could_get_no_verdict_is_refused(declared, message):
    with pytest.raises(fs.InvalidField, match=message):
        made_up_study(**declared)


@pytest.mark.parametrize("metric", ["seconds_to_target", "bytes_sent", "test_loss"])
def test_tuning_goes_by_validation_whatever_is_compared(metric):
    """Of equal bytes, or of seconds to a target, the rate with the better curve is picked."""
    study = made_up_study(axes=TWO, tune={"lr": [0.01, 0.1]}, metric=metric, target=0.6)

    def score(labels, seed):
        return 0.9 if labels.get("lr") in (None, "0.1") else 0.5

    picks = made_up_outcome(study, score).picks
    wanted = 0.01 if metric == "test_loss" else 0.1  # made-up losses are equal: the lower rate
    assert {pick.lr for pick in picks.values()} == {wanted}


def test_the_table_of_comparisons_has_a_column_for_each_figure():
    table = outcome_of({SYNC: 0.94, LOCAL: 0.90, NOSYNC: 0.94}).comparison_table()
    assert len(table) == 2
    wanted = {"n", "n_against", "mean", "deviation", "interval_low", "p", "corrected_p", "verdict"}
    assert wanted <= set(table.columns)


def test_runs_that_failed_are_counted():
    study = made_up_study(axes=TWO)
    outcome = made_up_outcome(
        study, lambda labels, seed: None if labels["strategy"] == LOCAL and seed == 1 else 0.9
    )
    assert [each.n for each in outcome.cells] == [5, 4]
    assert outcome.comparisons[0].n == (4, 5)


def test_tuning_picks_by_validation_and_tells_of_an_edge():
    study = made_up_study(axes=TWO, tune={"lr": [0.1, 0.01, 0.03]}, seeds=3)
    best = {SYNC: "0.03", LOCAL: "0.1"}

    def score(labels, seed):
        return 0.9 if labels.get("lr") in (None, best[labels["strategy"]]) else 0.8

    outcome = made_up_outcome(study, score)
    picks = outcome.picks
    assert {label: pick.lr for label, pick in picks.items()} == {SYNC: 0.03, LOCAL: 0.1}
    assert not picks[SYNC].is_at_the_edge
    assert picks[LOCAL].is_at_the_edge
    assert picks[SYNC].tries == 3
    assert all(run.spec.validation == 0.2 for run in outcome.runs)
    assert {
        run.spec.optimizer.lr if run.spec.optimizer else run.spec.lr for run in outcome.runs
    } == {
        0.03,
        0.1,
    }


def test_where_the_replicas_own_scores_are_compared_tuning_goes_by_those():
    study = fs.Study(
        "Which is best?",
        base={"task": "digits-mlp", "workers": 2, "epochs": 2, "measure": ["replicas"]},
        axes={"strategy": ["independent"]},
        metric="test_replicas_mean",
        tune={"lr": [0.01, 0.3]},
        seeds=1,
    )
    outcome = study.run(jobs=1, progress=False)
    tries = {run.rate: outcome.records[run.id] for run in planned_tries(study)}
    seen = {rate: record.history[-1] for rate, record in tries.items()}
    (pick,) = outcome.picks.values()
    assert pick.scores == {rate: look["replicas_mean"] for rate, look in seen.items()}
    assert pick.scores != {rate: look["accuracy"] for rate, look in seen.items()}


def test_the_draws_of_a_search_are_the_same_for_all_and_within_bounds():
    tuning = fs.Tuning({"low": 0.001, "high": 1.0, "tries": 20})
    assert tuning.rates == fs.Tuning({"low": 0.001, "high": 1.0, "tries": 20}).rates
    assert len(tuning.rates) == 20
    assert 0.001 <= min(tuning.rates) < 0.01
    assert 0.1 < max(tuning.rates) <= 1.0


# --- differences of differences -------------------------------------------------------------------

GAINS = {
    "cell": {"workers": 8, "strategy": LOCAL},
    "expect": "greater",
    "than": {"workers": 2},
    "claim": "eight workers gain more",
}
FOUR = {"workers": [2, 8], "strategy": [SYNC, LOCAL]}


def gaining(labels, seed):
    """Seeds differ by far more than two runs of one seed do."""
    gain = {"2": 0.01, "8": 0.02}[labels["workers"]] if labels["strategy"] == LOCAL else 0.0
    noise = np.random.default_rng([seed, int(labels["workers"]), len(labels["strategy"])]).normal()
    return 0.8 + 0.02 * np.sin(seed) + gain + 0.001 * noise


def test_a_difference_is_compared_with_another_one_seed_by_seed():
    outcome = made_up_outcome(made_up_study(axes=FOUR, hypotheses=[GAINS]), gaining)
    told = outcome.comparisons[-1]
    gains = []
    for workers in (8, 2):
        one, other = (values(outcome, f"workers={workers}, {name}") for name in (LOCAL, SYNC))
        gains.append(np.subtract(one, other))
    theirs = stats.ttest_ind(*gains, equal_var=False, alternative="greater")
    assert (told.family, told.verdict, told.n) == ("hypothesis", "agrees", (5, 5))
    assert told.p == pytest.approx(theirs.pvalue)
    assert told.means == pytest.approx([gain.mean() for gain in gains])
    assert told.cell == f"(workers=8, {LOCAL}) − (workers=8, {SYNC})"
    assert told.against == f"(workers=2, {LOCAL}) − (workers=2, {SYNC})"


def test_differences_of_one_run_each_are_too_few():
    study = made_up_study(axes=FOUR, hypotheses=[GAINS], seeds=1)
    assert made_up_outcome(study, gaining).comparisons[-1].verdict == "too few runs"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"than": {"workers": 3}}, "unknown level of workers in 'than' '3'; known: 2, 8"),
        ({"than": {"workers": 8}}, "'than' must be another cell"),
    ],
)
def test_what_a_difference_is_compared_with_must_be_there(fields, message):
    with pytest.raises(ValueError, match=message):
        made_up_study(axes=FOUR, hypotheses=[GAINS | fields])


def test_costs_to_a_target_have_no_differences_of_differences():
    with pytest.raises(ValueError, match="'than' must be left out of costs to a target"):
        made_up_study(axes=FOUR, hypotheses=[GAINS], metric="seconds_to:0.8")
