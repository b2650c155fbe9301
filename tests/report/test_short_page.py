"""The short page of a study."""

from __future__ import annotations

import dataclasses

import pytest
from matplotlib.image import imread
from tests.support.outcomes import made_up_outcome, made_up_study

from flockstep.report.study import for_papers
from flockstep.report.study.for_papers import write_picture
from flockstep.report.study.short_page import short_page

TOLD = {"published_claim": "Local steps cost nothing.", "scaling": "Four workers."}
CLAIM = {
    "cell": {"strategy": "local_sgd(period=8)"},
    "expect": "less",
    "claim": "local steps cost accuracy",
    "source": "somebody, Table 3",
}


def score(labels, seed):
    return 0.9 + 0.001 * seed - 0.1 * ("local" in labels["strategy"])


def test_it_has_question_claim_scaling_verdict_tables_and_picture():
    outcome = made_up_outcome(made_up_study(**TOLD, hypotheses=[CLAIM]), score)
    page = short_page(outcome, "Local steps cost ten points.")
    parts = ["**Which is best?**", "Local steps cost nothing. (somebody, Table 3)", "Four workers."]
    parts += ["Of 1 claim: agrees 1.", "Local steps cost ten points."]
    parts += ["| local steps cost accuracy | local_sgd(period=8) | sync_sgd | -10 |"]
    parts += ["| local_sgd(period=8) | 5 | 80.2 | 0.1581 | 5 |", "![Scores of all cells](page.png)"]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert "What failed" not in page


def test_where_seconds_to_a_target_are_compared_it_says_how_fast_each_cell_went():
    page = short_page(made_up_outcome(made_up_study(metric="seconds_to:0.5"), score))
    assert "| cell | n | median | MB sent | samples/s |" in page
    assert "| sync_sgd | 5 of 5 | 0.1 | 5 | 6,400 |" in page  # 3,200 samples in 0.5 seconds


def test_of_costs_to_a_target_it_says_why_no_detectable_difference_is_told():
    costs = made_up_outcome(made_up_study(metric="seconds_to:0.5", hypotheses=[CLAIM]), score)
    scores = made_up_outcome(made_up_study(hypotheses=[CLAIM]), score)
    told = "for a log-rank test no smallest difference that could have been seen is told"
    assert told in short_page(costs)
    assert told not in short_page(scores)
    assert "could have seen" in short_page(scores)


def test_other_metrics_stand_beside_the_study_s_own():
    study = made_up_study(also_shown=["steps", "train_accuracy"])
    page = short_page(made_up_outcome(study, score))  # whose runs do not know the second
    assert "| cell | n | mean | deviation | steps | MB sent |" in page
    assert "| local_sgd(period=8) | 5 | 80.2 | 0.1581 | 50 | 5 |" in page


def test_it_names_rates_at_the_edge_of_those_tried():
    outcome = made_up_outcome(made_up_study(tune={"lr": [0.1, 0.2]}), score)
    page = short_page(outcome)
    edges = [label for label, pick in outcome.picks.items() if pick.is_at_the_edge]
    assert edges
    assert f"At the edge of those tried: {'; '.join(edges)}." in page
    assert "edge" not in short_page(made_up_outcome(made_up_study(), score))


def test_printed_figures_are_counted_by_themselves_and_by_what():
    printed = [
        {"cell": {"strategy": name}, "mean": mean, "unit": "%", "source": "Table 3"}
        for name, mean in (("sync_sgd", 90.0), ("local_sgd(period=8)", 85.0))
    ]
    study = made_up_study(hypotheses=[CLAIM], published=printed, margin=0.01)
    told = "Of 1 claim: agrees 1. Of 1 printed figure, by direction: agrees 1."
    assert made_up_outcome(study, score).verdict == told


def test_it_says_what_failed():
    outcome = made_up_outcome(made_up_study(), score)
    run = outcome.runs[1]
    error = {"type": "NonFiniteLoss", "message": "the loss is nan", "traceback": ""}
    lost = dataclasses.replace(outcome.records[run.id], status="failed", error=error)
    broken = dataclasses.replace(outcome, records={**outcome.records, run.id: lost})
    page = short_page(broken)
    assert "## What failed\n\n| cell | error | runs |\n| --- | --- | --- |" in page
    assert f"| {run.cell.label} | NonFiniteLoss | 1 |" in page


def test_the_picture_has_curves_only_where_runs_were_looked_at_on_their_way(tmp_path):
    outcome = made_up_outcome(made_up_study(), score)
    ends = {
        name: dataclasses.replace(record, history=record.history[-1:])
        for name, record in outcome.records.items()
    }
    write_picture(outcome, tmp_path / "curves.png")
    write_picture(dataclasses.replace(outcome, records=ends), tmp_path / "ends.png")
    widths = [imread(tmp_path / f"{name}.png").shape[1] for name in ("curves", "ends")]
    assert widths[0] > 1.5 * widths[1]


def test_the_picture_draws_training_scores_where_all_looks_have_them(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(for_papers, "save_figure", lambda figure, *_: figures.append(figure))
    outcome = made_up_outcome(made_up_study(), score)
    known = {
        name: dataclasses.replace(
            record, history=[look | {"train_accuracy": 0.99} for look in record.history]
        )
        for name, record in outcome.records.items()
    }
    measured = dataclasses.replace(outcome, records=known)
    for each in (measured, outcome):
        write_picture(each, tmp_path / "page.png")
    drawn = [[(axes.get_ylabel(), axes.get_xlabel()) for axes in each.axes[1:]] for each in figures]
    steps, score_title = "steps of a worker", "accuracy (%)"
    assert drawn[0] == [(score_title, steps), ("train accuracy (%)", steps)]
    assert drawn[1] == [(score_title, "seconds"), (score_title, "MB sent by all workers")]
    validation, training = (axes.lines[0].get_ydata() for axes in figures[0].axes[1:])
    assert training == pytest.approx([99.0] * len(training))
    assert max(validation) < 99


def test_a_long_question_fits_over_the_picture(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(for_papers, "save_figure", lambda figure, *_: figures.append(figure))
    question = "How many words may a question have before it sticks out " * 3 + "on both sides?"
    outcome = made_up_outcome(made_up_study(question=question), score)
    ends = {
        name: dataclasses.replace(record, history=record.history[-1:])
        for name, record in outcome.records.items()
    }
    for each in (outcome, dataclasses.replace(outcome, records=ends)):  # a wide and a narrow one
        write_picture(each, tmp_path / "page.png")
    for figure in figures:
        figure.draw_without_rendering()
        (title,) = [text for text in figure.texts if text.get_text()]
        assert title.get_window_extent().width < figure.bbox.width
        assert title.get_text().replace("\n", " ") == question
