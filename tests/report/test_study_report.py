"""The report of a study: every figure that there is something to show for, and its table."""

from __future__ import annotations

import re

import numpy as np
import plotly.graph_objects as go
import pytest
from tests.support.outcomes import made_up_outcome, made_up_study, normal_scores

import flockstep as fs
from flockstep.report.page import FigureView, TableView
from flockstep.report.study.costs import pareto_front
from flockstep.report.study.figures import all_figures
from flockstep.report.study.whole_page import study_page
from flockstep.study import Outcome

SYNC, LOCAL, NOSYNC = "sync_sgd", "local_sgd(period=8)", "nosync(pull=0.1)"
NAMES = [SYNC, LOCAL, NOSYNC]


def rich_outcome() -> Outcome:
    """A study that has something for every figure."""
    study = made_up_study(
        base={"workers": 4, "epochs": 2},
        axes={"task": ["digits-mlp", "digits-cnn"], "strategy": NAMES},
        margin=0.02,
        target=0.85,
        tune={"lr": [0.01, 0.1, 0.3]},
        hypotheses=[{"cell": {"strategy": LOCAL}, "expect": "equal", "claim": "no difference"}],
        published=[
            {"cell": {"task": "digits-mlp", "strategy": SYNC}, "mean": 92.0, "unit": "%"},
            {
                "cell": {"task": "digits-mlp", "strategy": LOCAL},
                "mean": 90.0,
                "deviation": 0.5,
                "n": 5,
                "unit": "%",
                "source": "Table 3",
            },
        ],
    )
    means = {SYNC: 0.92, LOCAL: 0.90, NOSYNC: 0.80}

    def score(labels, seed):
        random = np.random.default_rng([seed, NAMES.index(labels["strategy"])])
        penalty = {"0.01": 0.05, "0.1": 0.0, "0.3": 0.1}.get(labels.get("lr", "0.1"), 0.0)
        return float(means[labels["strategy"]] - penalty + 0.005 * random.normal())

    return made_up_outcome(study, score, shows=True)


@pytest.fixture(scope="module")
def outcome():
    return rich_outcome()


@pytest.fixture(scope="module")
def figures(outcome):
    return {each.key: each for some in all_figures(outcome).values() for each in some}


def test_every_figure_is_there(figures):
    assert set(figures) == {
        "final-scores",
        "differences",
        "curves",
        "published",
        "to-target",
        "reached",
        "trade-off",
        "profiles",
        "grid",
        "tuning",
        "timeline",
        "replicas",
    }


def test_plotly_takes_every_figure(figures):
    """Colours aside, which are names of the page's own."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        is_colour = isinstance(value, str) and re.fullmatch(r"@\w+(/\d+)?", value)
        return "#123456" if is_colour else value

    for figure in figures.values():
        for content in figure.contents:
            go.Figure(plain(list(content.data)), plain(dict(content.layout)))


def test_every_figure_has_words_and_tables(figures):
    for figure in figures.values():
        assert figure.alt
        assert figure.caption
        assert all(content.table.rows for content in figure.contents)


def test_the_curves_are_means_over_seeds_against_four_costs(outcome, figures):
    contents = {content.name: content for content in figures["curves"].contents}
    assert set(contents) == {"seconds", "steps", "samples", "bytes"}
    lines = [trace for trace in contents["steps"].data if trace.get("showlegend", True)]
    assert len(lines) == len(outcome.study.cells) == 6
    assert len(contents["steps"].data) == 12  # each with a band
    (first, *_) = outcome.study.cells
    finals = [record.history[-1]["accuracy"] for record in outcome.records_of(first)]
    assert lines[0]["y"][-1] == pytest.approx(100 * np.mean(finals))
    assert lines[0]["x"][-1] == 50


def test_every_run_is_a_dot_and_every_cell_has_an_interval(outcome, figures):
    dots, means = figures["final-scores"].data
    assert len(dots["x"]) == len(outcome.finished) == 30
    assert len(means["x"]) == 6
    sample = outcome.cells[0]
    assert means["error_x"]["array"][0] == pytest.approx(
        50 * (sample.interval[1] - sample.interval[0])
    )


def test_runs_that_missed_the_target_are_drawn_where_they_ended(outcome, figures):
    seconds = figures["to-target"].contents[0]
    reached, missed, medians = seconds.data
    assert len(reached["x"]) == 20
    assert len(missed["x"]) == 10  # those of the third strategy
    assert set(missed["x"]) == {0.5}
    assert len(medians["x"]) == 4


def test_the_grid_has_a_figure_for_every_cell(outcome, figures):
    (content,) = figures["grid"].contents
    (trace,) = content.data
    assert np.shape(trace["z"]) == (3, 2)  # the longer axis downwards
    assert len(content.layout["annotations"]) == 6
    assert trace["z"][0][0] == pytest.approx(100 * outcome.cells[0].mean)


def test_the_map_keeps_what_is_apart_apart(figures):
    contents = figures["replicas"].contents
    assert len(contents) == 2 * (1 + 3)  # of each task the centres and each cell
    paths = contents[1].data
    assert len(paths) == 4  # workers
    assert len(paths[0]["x"]) == 5  # looks


def test_verdicts_come_first_and_say_all(outcome):
    page = study_page(outcome)
    words = [verdict.word for verdict in page.verdicts]
    assert "Agrees" in words or "Too little power" in words or "Disagrees" in words
    assert [section.title for section in page.sections] == [
        "Results",
        "Scores",
        "Costs",
        "Grid",
        "Tuning",
        "Workers",
        "All runs",
        "How to read this",
        "How to repeat this",
    ]
    tables = {view.title: view for view in page.sections[0].views if isinstance(view, TableView)}
    assert {"Cells", "Against the baseline", "Hypotheses", "Published claims"} <= set(tables)
    assert len(tables["Cells"].rows) == 6
    (code, *_) = [view.text for view in page.sections[-1].views if hasattr(view, "language")]
    assert fs.Study.from_toml(code) == outcome.study


def test_a_study_without_runs_has_a_page_too():
    page = study_page(Outcome(made_up_study(), {}, is_running=True))
    assert page.renews_every == 60
    assert {verdict.word for verdict in page.verdicts} == {"Too few runs"}
    assert not any(isinstance(view, FigureView) for each in page.sections for view in each.views)


def test_many_cells_wait_in_the_legend():
    study = made_up_study(base={"task": "digits-mlp", "strategy": "sync_sgd", "steps": 3},
                          axes={"workers": list(range(2, 27))}, seeds=2)  # fmt: skip
    outcome = made_up_outcome(study, lambda labels, seed: 0.5 + 0.01 * int(labels["workers"]))
    curves = {each.key: each for some in all_figures(outcome).values() for each in some}["curves"]
    lines = [trace for trace in curves.data if trace.get("showlegend", True)]
    assert len(lines) == 25
    shown = [trace["name"] for trace in lines if trace["visible"] is True]
    assert shown == ["workers=2", *(f"workers={count}" for count in range(18, 27))]


def test_a_cell_that_is_left_out_is_unsolved_in_a_profile():
    study = made_up_study(
        base={"workers": 4, "epochs": 2},
        axes={"task": ["digits-mlp", "digits-cnn"], "strategy": NAMES},
        exclude=[{"task": "digits-cnn", "strategy": NOSYNC}],
        seeds=2,
    )
    outcome = made_up_outcome(study, lambda labels, seed: 0.9 + 0.01 * seed)
    figures = {each.key: each for some in all_figures(outcome).values() for each in some}
    shares = {trace["name"]: trace["y"][-1] for trace in figures["profiles"].data}
    assert shares == {SYNC: 100, LOCAL: 100, NOSYNC: 50}


def test_names_are_no_markup(capsys):
    from rich.console import Console

    from flockstep.report import cells_table

    axes = {"strategy": {"[/b] mine": "sync_sgd", "[red]": "gosgd"}}
    outcome = made_up_outcome(made_up_study(question="[/i] which?", axes=axes), lambda *_: 0.9)
    Console().print(cells_table(outcome))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[/b] mine", "[red]", "[/i] which?"))


def test_the_pareto_front_has_whom_nobody_beats():
    points = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.8), (1.0, 0.4), (9.0, 0.95)]
    assert pareto_front(points) == [0, 1, 4]
    assert pareto_front(points, higher_is_better=False) == [3]


def test_formats_for_papers(outcome, tmp_path):
    text = outcome.report(tmp_path / "report.md").read_text()
    assert text.startswith("# study\n\nWhich is best?\n")
    assert "**Agrees**" in text or "**Disagrees**" in text or "**Too little power**" in text
    assert outcome.report(tmp_path / "report.csv").read_text().count("\n") == 31
    with pytest.raises(fs.InvalidField, match="'report' must be in a folder that exists"):
        outcome.report(tmp_path / "missing" / "report.md")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.csv", "report.md"]


def test_a_large_study_makes_a_page_of_less_than_six_megabytes(tmp_path):
    names = [f"local_sgd(period={period})" for period in range(1, 51)]
    study = made_up_study(axes={"strategy": names}, seeds=10)
    means = dict.fromkeys(names, 0.9)
    outcome = made_up_outcome(study, normal_scores(means, 0.01, 0), looks=100, shows=True)
    assert len(outcome.finished) == 500
    path = outcome.report(tmp_path / "large.html")
    assert path.stat().st_size < 6e6
