"""The commands about studies. Runs are carried out in this process, but where it says otherwise."""

from __future__ import annotations

import csv
import json
from contextlib import nullcontext

import pytest
from tests.study.test_running import Here

import flockstep as fs
from flockstep.study import running

SMALL = """
question = "How rarely?"
seeds = 2
[base]
task = "digits-mlp"
workers = 2
steps = 4
strategy = "local_sgd(period={period})"
[axes]
period = [1, 2]
[[hypotheses]]
cell = { period = 2 }
expect = "worse"
source = "somebody, Table 1"
[full]
seeds = 3
"""


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "small.toml").write_text(SMALL)
    made = Here()
    monkeypatch.setattr(running, "_workers", lambda jobs, on: nullcontext(made))
    return made


def test_a_study_is_run_told_and_reported(here, flockstep, tmp_path):
    done = flockstep("study", "studies/small.toml")
    assert done.returncode == 0, done.stderr
    assert "How rarely?" in done.stdout
    assert "period=2 against period=1" in " ".join(done.stdout.split())
    assert "The report: studies/results/small/report.html" in done.stdout
    assert len(here.orders) == 4
    folder = tmp_path / "studies" / "results" / "small"
    assert len(list(folder.glob("*.json"))) == 4
    assert (folder / "report.html").stat().st_size < 6e6

    told = json.loads(flockstep("study", "studies/small.toml", "--json").stdout)
    assert len(here.orders) == 4  # nothing is run again
    assert [cell["n"] for cell in told["cells"]] == [2, 2]
    assert [each["family"] for each in told["comparisons"]] == ["baseline", "hypothesis"]

    listed = json.loads(flockstep("list", "studies", "--json").stdout)["studies"]["small"]
    assert listed["question"] == "How rarely?"
    assert listed["published"] == "somebody, Table 1"
    assert listed["n"] == 2
    assert listed["date"].startswith("20")


def test_runs_that_did_not_reach_the_target_are_counted_in_the_list(here, flockstep, tmp_path):
    never = 'metric = "steps_to:2.0"\n'
    (tmp_path / "studies" / "small.toml").write_text(never + SMALL.replace("worse", "greater"))
    flockstep("study", "studies/small.toml")
    listed = json.loads(flockstep("list", "studies", "--json").stdout)["studies"]["small"]
    assert listed["n"] == 2


def test_studies_are_listed_with_question_claim_verdict_n_and_date(here, flockstep, tmp_path):
    told = 'published_claim = "Rarely will do."\n'
    (tmp_path / "studies" / "other.toml").write_text(told + SMALL)
    flockstep("study", "studies/small.toml")
    listed = flockstep("list", "studies").stdout
    outcome = fs.load_outcome(tmp_path / "studies" / "results" / "small")
    date = outcome.finished[0][1].started[:10]
    assert "small: How rarely?" in listed
    assert "Published: somebody, Table 1" in listed
    assert f"Verdict: {outcome.verdict} n = 2, {date}" in " ".join(listed.split())
    assert "Published: Rarely will do." in listed
    assert "Verdict: not run" in listed


def test_a_map_of_studies_says_who_wins_where(here, flockstep, tmp_path):
    flockstep("study", "studies/small.toml")
    refused = flockstep("report", "studies/results/small", "--map", "map.png").stderr
    assert "'map' must be of studies with several methods under several conditions" in refused
    grid = SMALL.replace("[[hypotheses]]", "workers = [2, 4]\n[[hypotheses]]").replace(
        "workers = 2\n", ""
    )
    (tmp_path / "studies" / "grid.toml").write_text(grid)
    flockstep("study", "studies/grid.toml")
    drawn = flockstep("report", "studies/results/grid", "--map", "map.png")
    assert "The map: map.png" in drawn.stdout, drawn.stderr
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"


def test_several_studies_are_run_packed_and_told_on_short_pages(here, flockstep, tmp_path):
    folder = tmp_path / "studies"
    told = 'published_claim = "Rarely will do."\nscaling = "Two workers."\n'
    (folder / "other.toml").write_text(told + SMALL.replace("seeds = 2", "seeds = [3, 4]"))
    flockstep("study", "studies/small.toml", "studies/other.toml", "--out", "again")
    assert len(here.orders) == 8

    done = flockstep("pack", "again/small", "again/other")
    assert "again/other/records.jsonl.xz" in done.stdout
    (tmp_path / "again" / "other" / "verdict.md").write_text("It depends.")
    flockstep("report", "again/small", "again/other", "--format", "page")
    page = (tmp_path / "again" / "other" / "page.md").read_text()
    for part in ("How rarely?", "Rarely will do.", "Two workers.", "It depends.", "page.png"):
        assert part in page
    outcome = fs.load_outcome(tmp_path / "again" / "other")
    assert outcome.verdict in page
    assert outcome.verdict.startswith("Of 1 claim: ")
    assert f"{100 * outcome.cells[0].mean:.4g}" in page
    assert (tmp_path / "again" / "other" / "page.png").read_bytes()[:4] == b"\x89PNG"

    flockstep("study", "studies/small.toml", "studies/other.toml", "--out", "again")
    assert len(here.orders) == 8  # nothing is run again
    refused = flockstep("report", "again/small", "again/other", "--out", "x.md")
    assert "--out takes one FOLDER" in refused.stderr


def test_flags_choose_scale_seeds_and_cells(here, flockstep):
    flockstep("study", "studies/small.toml", "--full", "--only", "period=2")
    assert [order.spec.seed for order in here.orders] == [0, 1, 2]
    flockstep("study", "studies/small.toml", "--seeds", "1", "--out", "elsewhere")
    assert len(here.orders) == 5


def test_a_dry_run_lists_runs_and_how_long_they_take(here, flockstep, tmp_path):
    done = flockstep("study", "studies/small.toml", "--dry-run")
    assert "4 runs, 4 of them to do: about" in done.stdout
    assert not (tmp_path / "studies" / "results").exists()
    flockstep("study", "studies/small.toml", "--only", "period=1")
    told = json.loads(flockstep("study", "studies/small.toml", "--dry-run", "--json").stdout)
    assert [run["done"] for run in told["runs"]] == [True, False, True, False]
    assert told["seconds"] > 0
    assert len(here.orders) == 2


def test_a_dry_run_says_that_runs_may_end_at_their_target(here, flockstep, tmp_path):
    path = tmp_path / "studies" / "small.toml"
    path.write_text(SMALL.replace("[axes]", "target = 0.5\n[axes]"))
    done = flockstep("study", "studies/small.toml", "--dry-run")
    assert "4 of them to do: at most about" in done.stdout
    assert "as runs end at their target, with" in done.stdout


def test_a_study_with_failures_ends_with_an_exit_code(here, flockstep, tmp_path):
    path = tmp_path / "studies" / "small.toml"
    path.write_text(SMALL.replace("[axes]", "lr = 1e30\n[axes]"))
    done = flockstep("study", "studies/small.toml")
    assert done.returncode == 1
    assert "failed: period=1, seed 0: NonFiniteLoss" in done.stdout


@pytest.mark.parametrize("ending", ["html", "md", "csv", "png", "svg"])
def test_a_report_in_every_format(ending, here, flockstep, tmp_path):
    flockstep("study", "studies/small.toml")
    done = flockstep("report", "studies/results/small", "--format", ending)
    path = tmp_path / "studies" / "results" / "small" / f"report.{ending}"
    assert done.stdout == f"The report: {path.relative_to(tmp_path)}\n"
    content = path.read_bytes()
    if ending == "md":
        assert b"# small" in content
        assert b"| period=2 |" in content
    if ending == "csv":
        rows = list(csv.DictReader(content.decode().splitlines()))
        assert [row["period"] for row in rows] == ["1", "2", "1", "2"]
        outcome = fs.load_outcome(path.parent)
        assert float(rows[0]["test_loss"]) == outcome.table()["test_loss"][0]
    if ending == "png":
        assert content.startswith(b"\x89PNG")


def test_strategies_are_compared_in_one_line(here, flockstep, tmp_path):
    arguments = ["digits-mlp", "sync_sgd", "local_sgd(period=2)", "nosync(pull=0.1)"]
    flags = ["--seeds", "2", "--workers", "2", "--steps", "3", "--report", "out.html"]
    done = flockstep("compare", *arguments, *flags)
    assert done.returncode == 0, done.stderr
    assert "nosync(pull=0.1)" in done.stdout
    assert "The report: out.html" in done.stdout
    assert (tmp_path / "out.html").exists()
    assert len(here.orders) == 6
    told = json.loads(flockstep("compare", *arguments, *flags[:-2], "--json").stdout)
    assert [cell["cell"] for cell in told["cells"]] == arguments[1:]


def test_rates_are_tuned_from_the_command_line(here, flockstep):
    flags = ["--seeds", "2", "--workers", "2", "--steps", "3", "--tune", "0.01,0.1"]
    done = flockstep("compare", "digits-mlp", "sync_sgd", "gosgd", *flags)
    assert done.stdout.count("- tuned: ") == 2
    flags[-1] = "0.01:1:3"
    told = json.loads(
        flockstep("compare", "digits-mlp", "sync_sgd", "gosgd", *flags, "--json").stdout
    )
    assert all(len(pick["scores"]) == 3 for pick in told["picks"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study", "missing.toml"], "missing.toml: cannot be read: No such file"),
        (["study", "studies/small.toml", "--only", "period"], "'--only' must be AXIS=VALUE"),
        (["study", "studies/small.toml", "--only", "perod=1"], "unknown axis in 'only' 'perod'"),
        (["study", "studies/small.toml", "--seeds", "0"], "'seeds' must be at least 1 (got 0)"),
        (["study", "studies/small.toml", "--report", "x/y.html"], "'report' must be in a folder"),
        (["report", "studies"], "'studies' holds no study: it has no study.toml"),
        (["compare", "digits-mlp", "sync_sgd"], "'strategies' must be a list of at least two"),
        (
            ["compare", "digits", "sync_sgd", "gosgd"],
            "cell sync_sgd: unknown task 'digits'; did you mean",
        ),
        (["compare", "digits-mlp", "sync_sgd", "gsgd"], "unknown strategy 'gsgd'; did you mean"),
        (["compare", "digits-mlp", "sync_sgd", "gosgd", "--tune", "x"], "'--tune' must be rates"),
        (["compare", "digits-mlp", "a", "b", "--report", "x.doc"], "'report' must end in .html"),
    ],
)
def test_bad_input_is_one_line(here, refused, arguments, message):
    refused(arguments, message)
    assert here.orders == []
