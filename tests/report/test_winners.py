"""The map of who wins where: winners, runners-up, and whether their lead is sure."""

from __future__ import annotations

import re
import zlib

import numpy as np
import pytest
from matplotlib.image import imread
from tests.support.outcomes import made_up_outcome, made_up_study

from flockstep.report.study.short_page import short_page
from flockstep.report.study.winners import contests, field_text, map_table, write_map

METHODS = {"sync": "sync_sgd", "local": "local_sgd(8)", "gossip": "gosgd(0.1)"}


def study_of(**fields):
    axes = {"method": METHODS, "place": ["lan-10g", "wifi"], "speed": [0.01, 0.02]}
    base = {"task": "digits-mlp", "workers": 4, "epochs": 2, "strategy": "{method}"}
    base |= {"network": "{place}", "compute": "{speed}"}
    return made_up_study(**{"base": base, "axes": axes, "baseline": {"method": "sync"}} | fields)


def score(labels, seed):
    """Local steps win clearly by wifi; on a LAN the two others are all but alike."""
    means = {"sync": 0.9, "local": 0.85, "gossip": 0.8999}
    if labels["place"] == "wifi":
        means = {"sync": 0.7, "local": 0.9, "gossip": 0.8}
    random = np.random.default_rng([seed, zlib.crc32(repr(sorted(labels.items())).encode())])
    return float(means[labels["method"]] + 0.003 * random.normal())


def cost(labels, seed):
    """A higher score is reached sooner on the curves of records that are made up."""
    return score(labels, seed) if labels["method"] != "gossip" else 0.3


def test_each_condition_has_a_winner_and_a_runner_up():
    found = contests([made_up_outcome(study_of(), score)])
    assert [each.where for each in found] == [
        "place=lan-10g, speed=0.01",
        "place=lan-10g, speed=0.02",
        "place=wifi, speed=0.01",
        "place=wifi, speed=0.02",
    ]
    for each in found[2:]:
        assert each.ranked == ("local", "gossip", "sync")
        assert (each.winner, each.runner_up) == ("local", "gossip")
        assert each.is_sure
        assert field_text(each) == "local\ngossip: × 0.89"
    for each in found[:2]:
        assert {each.winner, each.runner_up} == {"sync", "gossip"}
        assert not each.is_sure


def test_the_p_values_of_one_map_are_corrected_together():
    outcome = made_up_outcome(study_of(), score)
    one, two = contests([outcome]), contests([outcome, outcome])
    assert len(two) == 8
    assert min(each.p for each in two) == min(each.p for each in one)
    smallest = min(one, key=lambda each: each.p)
    assert smallest.corrected_p == pytest.approx(4 * smallest.p)
    again = min(two, key=lambda each: each.p)
    assert again.corrected_p == pytest.approx(8 * smallest.p)


def test_of_costs_the_smaller_median_wins_and_who_does_not_arrive_is_last():
    outcome = made_up_outcome(study_of(metric="seconds_to:0.8"), cost, looks=40)
    wifi = [each for each in contests([outcome]) if each.labels["place"] == "wifi"]
    for each in wifi:  # only local steps reach it there
        assert each.winner == "local"
        assert each.figure(0) is not None
        assert each.figure(1) is None
        assert each.is_sure
        assert field_text(each).startswith("local\nbefore ")
    (lan, *_) = contests([outcome])
    assert lan.ranked == ("sync", "local", "gossip")


def test_a_condition_in_which_nobody_arrives_has_no_winner():
    outcome = made_up_outcome(study_of(metric="seconds_to:0.99"), score)
    for each in contests([outcome]):
        assert each.winner is None
        assert each.runner_up is None
        assert each.corrected_p is None
        assert field_text(each) == "nobody"


def test_one_run_of_each_is_no_test():
    for each in contests([made_up_outcome(study_of(seeds=1), score)]):
        assert each.winner is not None
        assert each.p is None
        assert not each.is_sure


def test_cells_that_are_left_out_or_not_run_are_no_rivals_and_one_alone_wins_nothing():
    def some(labels, seed):
        return None if labels["method"] == "gossip" else score(labels, seed)

    study = study_of(exclude=[{"method": "sync", "place": "wifi"}])
    found = contests([made_up_outcome(study, some)])
    assert [each.where for each in found] == [
        "place=lan-10g, speed=0.01",
        "place=lan-10g, speed=0.02",
    ]
    assert [each.ranked for each in found] == [("sync", "local")] * 2


def test_there_is_no_map_without_conditions_or_with_a_baseline_on_several_axes():
    assert map_table(made_up_outcome(made_up_study(), lambda labels, seed: 0.9)) is None
    study = study_of(baseline={"method": "sync", "place": "wifi"})
    assert map_table(made_up_outcome(study, score)) is None


def test_the_table_has_the_best_of_each_row_in_bold_and_is_on_the_short_page():
    outcome = made_up_outcome(study_of(), score)
    table = map_table(outcome)
    assert table.columns == (
        "where",
        "sync",
        "local",
        "gossip",
        "runner-up",
        "corrected p",
        "sure",
    )
    for row in table.rows:
        assert sum(str(value).startswith("**") for value in row) == 1
    assert [row[-1] for row in table.rows] == ["open", "open", "yes", "yes"]
    assert re.fullmatch(r"\*\*[89]\d(\.\d+)?\*\*", table.rows[2][2])
    page = short_page(outcome)
    assert "## Who wins where" in page
    assert "| place=wifi, speed=0.01 | " in page


def test_several_studies_are_one_picture(tmp_path):
    outcomes = [made_up_outcome(study_of(name=name), score) for name in ("even", "uneven")]
    write_map(outcomes, tmp_path / "map.png")
    height, width, _ = imread(tmp_path / "map.png").shape
    assert height > 300
    assert width > 500
