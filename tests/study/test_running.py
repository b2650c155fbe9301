"""Running a study: what is missing, whatever becomes of single runs. The runs are carried out in
this process; `test_jobs.py` has the processes that carry them out elsewhere.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext

import pytest
import torch

import flockstep as fs
from flockstep.study import running
from flockstep.study.one_run import Order, Places, carried_out, lost_record

BASE = {"task": "digits-mlp", "workers": 2, "steps": 4}
AXES = {"strategy": ["sync_sgd", "local_sgd(2)"]}
STUDY = fs.Study("Which?", base=BASE, axes=AXES, seeds=2, name="small")


class Here:
    """Carries out orders in this process, and counts them."""

    def __init__(self):
        self.orders = []
        self.dies_at = None

    def run(self, together, alone, tick):
        with Places() as places:
            for order in [*together, *alone]:
                if len(self.orders) == self.dies_at:
                    raise KeyboardInterrupt
                self.orders.append(order)
                yield carried_out(order, places)
                tick()


@pytest.fixture
def here(monkeypatch):
    made = Here()
    monkeypatch.setattr(running, "_workers", lambda jobs, on: nullcontext(made))
    return made


def names(folder):
    return sorted(path.name for path in folder.glob("*.json"))


def test_a_study_runs_every_cell_with_every_seed(here, tmp_path):
    outcome = STUDY.run(folder=tmp_path)
    table = outcome.table()
    assert len(table) == len(here.orders) == 4
    assert sorted(zip(table["cell"], table["seed"], strict=True)) == [
        ("local_sgd(2)", 0),
        ("local_sgd(2)", 1),
        ("sync_sgd", 0),
        ("sync_sgd", 1),
    ]
    alone = fs.run("digits-mlp", "local_sgd(2)", 2, steps=4, seed=1)
    (row,) = table[(table["cell"] == "local_sgd(2)") & (table["seed"] == 1)].to_dict("records")
    assert row["test_loss"] == alone.metrics["test_loss"]  # bit for bit
    assert row["id"] == alone.spec.id
    assert fs.load_outcome(tmp_path).table().equals(table)


def test_the_shown_run_of_a_cell_is_the_same_run(here, tmp_path):
    """Positions and timelines are seen without a trace in the run itself."""
    outcome = STUDY.run(folder=tmp_path)
    shown = [record for run, record in outcome.finished if run.is_shown]
    assert all(record.timeline["workers"] for record in shown)
    assert all(len(record.history[-1]["positions"]) == 2 for record in shown)
    alone = fs.run("digits-mlp", "sync_sgd", 2, steps=4, seed=0)
    (record,) = [each for each in shown if each.id == alone.spec.id]
    assert record.metrics["test_loss"] == alone.metrics["test_loss"]
    others = [record for run, record in outcome.finished if not run.is_shown]
    assert all(record.timeline is None for record in others)
    assert all("positions" not in record.history[-1] for record in others)


def test_stopped_and_started_again_it_repeats_nothing_and_loses_nothing(here, tmp_path):
    here.dies_at = 2
    with pytest.raises(KeyboardInterrupt):
        STUDY.run(folder=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}
    assert len(before) == 2
    here.dies_at = None
    outcome = STUDY.run(folder=tmp_path)
    assert len(outcome.table()) == 4
    assert len(here.orders) == len({order.id for order in here.orders}) == 4
    assert all((tmp_path / name).read_bytes() == text for name, text in before.items())
    STUDY.run(folder=tmp_path)
    assert len(here.orders) == 4


def test_more_seeds_run_what_is_missing(here, tmp_path):
    STUDY.run(folder=tmp_path)
    STUDY.replace(seeds=3).run(folder=tmp_path)
    assert len(here.orders) == 6


def test_cells_of_the_same_run_share_it(here, tmp_path):
    base = {**BASE, "strategy": "sync_sgd", "workers": "{count}"}
    study = fs.Study("?", base=base, axes={"count": [2, 4], "note": ["a", "b"]}, computed={
        "schedule": "'constant' if note == 'a' else 'constant'"
    })  # fmt: skip
    outcome = study.replace(seeds=1).run(folder=tmp_path)
    assert len(here.orders) == 2
    assert len(outcome.table()) == 4


def test_only_some_cells(here, tmp_path):
    STUDY.run(folder=tmp_path, only={"strategy": "sync_sgd"})
    assert {order.spec.strategy.name for order in here.orders} == {"sync_sgd"}
    with pytest.raises(fs.UnknownName, match="unknown level of strategy in 'only' 'x'"):
        STUDY.run(folder=tmp_path, only={"strategy": "x"})


def test_a_run_that_fails_is_recorded_and_stops_no_other(here, tmp_path):
    base = {**BASE, "strategy": "sync_sgd"}
    study = fs.Study("?", base=base, axes={"lr": [0.1, 1e30]}, seeds=2)
    outcome = study.run(folder=tmp_path)
    assert len(here.orders) == 4
    assert len(outcome.finished) == 2
    assert {record.error["type"] for _, record in outcome.failures} == {"NonFiniteLoss"}
    for _, record in outcome.failures:
        told = record.error["traceback"]
        assert 'File "flockstep/' in told
        assert not [folder for folder in sys.path if folder and f"{folder}/" in told]
    assert len([name for name in names(tmp_path) if ".failed." in name]) == 2
    assert [each.failed for each in outcome.cells] == [0, 2]

    study.run(folder=tmp_path)
    assert len(here.orders) == 4  # what has failed is not tried again
    study.run(folder=tmp_path, retry_failed=True)
    assert len(here.orders) == 6  # unless it is asked for, and then once


def test_every_strategy_gets_the_same_rates_and_the_best_is_used(here, tmp_path):
    study = STUDY.replace(tune={"lr": [0.01, 0.3]}, seeds=2)
    outcome = study.run(folder=tmp_path)
    tries = [order for order in here.orders if order.spec.seed == 0]
    assert len(tries) == 4
    assert all(order.spec.validation == 0.2 for order in here.orders)
    for label, pick in outcome.picks.items():
        assert pick.lr == max(pick.scores, key=pick.scores.get)
        assert pick.tries == 2
        assert pick.wall_seconds > 0
        rates = {
            record.config["optimizer"]
            for run, record in outcome.finished
            if run.cell.label == label
        }
        assert rates == {f"OptimizerSpec('sgd', lr={pick.lr}, momentum=0.9)"}
    # A try with the rate that was picked is not run again.
    assert len(here.orders) == 4 + 2


def test_a_damaged_record_ends_the_study_and_stays(here, tmp_path):
    STUDY.run(folder=tmp_path)
    path = tmp_path / names(tmp_path)[0]
    path.write_text("{")
    with pytest.raises(fs.RecordError, match=f"'{path}' is truncated"):
        STUDY.run(folder=tmp_path)
    assert path.read_text() == "{"
    assert len(here.orders) == 4


def test_two_studies_at_once_in_one_folder_are_refused(here, tmp_path):
    with (
        running.records_in(STUDY, tmp_path),
        pytest.raises(fs.RecordError, match="is in use: a study is running there"),
    ):
        STUDY.run(folder=tmp_path)


def test_a_study_from_a_file_keeps_its_records_beside_it(here, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(STUDY.to_toml().replace('name = "small"\n', ""))
    fs.Study.from_toml(path).run()
    assert len(names(tmp_path / "results" / "small")) == 4


def test_without_a_folder_nothing_is_left(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert len(STUDY.run().table()) == 4
    assert list(tmp_path.iterdir()) == []


def test_a_task_of_a_script_is_compared_but_not_kept(here, tmp_path):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    task = fs.Task(
        "mine",
        model=lambda: torch.nn.Linear(4, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=fs.classification_loss,
        metric=fs.classification_accuracy,
        train=(x, y),
        test=(x, y),
        batch_size=8,
    )
    outcome = fs.compare(task, [fs.SyncSGD(), fs.Independent()], seeds=2, workers=2, epochs=2)
    assert len(outcome.table()) == 4
    assert len({run.id for run in outcome.runs}) == 4
    other = dataclasses.replace(task, test=(x, 1 - y))
    study = fs.Study(
        "?", base={"strategy": "sync_sgd", "epochs": 2}, axes={"task": {"a": task, "b": other}}
    )
    a, b = study.replace(seeds=1).run().table()["test_accuracy"]
    assert a == pytest.approx(1 - b)  # two tasks, though they have one name
    with pytest.raises(fs.SpecError, match="task 'mine' cannot be written as text"):
        fs.compare(task, [fs.SyncSGD(), fs.Independent()], seeds=2, folder=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_a_strategy_of_a_script_is_compared(here):
    @dataclasses.dataclass(frozen=True)
    class Own(fs.Strategy):
        name = "own"

    outcome = fs.compare("digits-mlp", [fs.SyncSGD(), Own()], seeds=2, workers=2, steps=3)
    assert len(outcome.table()) == 4


def test_a_report_that_cannot_be_drawn_for_now_stops_no_run(here, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "REPORT_SECONDS", 0.0)

    def write(outcome, path):
        if outcome.is_running:
            raise ZeroDivisionError("nothing yet")

    monkeypatch.setattr(running, "write_report", write)
    with pytest.warns(UserWarning, match="no report for now: ZeroDivisionError: nothing yet"):
        outcome = STUDY.run(folder=tmp_path, report=tmp_path / "report.html")
    assert len(outcome.table()) == 4


def test_failed_tries_are_no_failures(here, tmp_path):
    outcome = STUDY.replace(tune={"lr": [0.1, 1e30]}).run(folder=tmp_path)
    assert outcome.failures == []
    assert len(outcome.failed_tries) == 2
    assert {pick.lr for pick in outcome.picks.values()} == {0.1}


def test_compare_takes_names_and_texts_and_fields_of_a_run(here):
    outcome = fs.compare(
        "digits-mlp", {"all": "sync_sgd", "few": fs.LocalSGD(4)}, seeds=2, workers=2, steps=3
    )
    assert [each.cell.label for each in outcome.cells] == ["all", "few"]
    assert "few against all" in str(outcome) or "few equals" in str(outcome)
    assert str(outcome).splitlines()[0] == "Which strategy is best for digits-mlp?"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategies": ["sync_sgd"]}, "'strategies' must be a list of at least two"),
        ({"strategies": ["sync_sgd", "sync_sgd()"]}, "'strategies' must have none twice"),
        ({"strategies": ["sync_sgd", "gosgd"], "sed": 1}, "unknown field of a comparison 'sed'"),
        ({"strategies": ["sync_sgd", "gosgd"], "seeds": 0}, "'seeds' must be at least 1"),
        ({"strategies": ["sync_sgd", "gosgd"], "jobs": 0}, "'jobs' must be at least 1"),
        ({"strategies": ["sync_sgd", "gosgd"], "on": "mars"}, "'on' must be one of"),
        ({"strategies": ["sync_sgd", "gosgd"], "report": "x.doc"}, "'report' must end in .html"),
        (
            {"strategies": ["sync_sgd", "gosgd"], "backend": "torchrun"},
            "'backend' must be one that",
        ),
        ({"strategies": ["sync_sgd", "gosgd"], "tune": []}, "'tune.lr' must be a list of rates"),
    ],
)
def test_a_careless_comparison_is_refused_before_anything_runs(here, arguments, message):
    with pytest.raises(fs.FlockstepError, match=message):
        fs.compare("digits-mlp", **arguments)
    assert here.orders == []


def test_a_report_is_written_while_the_study_runs_and_renews_itself(here, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "REPORT_SECONDS", 0.0)
    page = tmp_path / "report.html"
    seen = []
    original = running.write_report

    def write(outcome, path):
        original(outcome, path)
        seen.append((outcome.is_running, "data-renews-every=" in path.read_text(encoding="utf-8")))

    monkeypatch.setattr(running, "write_report", write)
    STUDY.run(folder=tmp_path, report=page)
    assert seen[0] == (True, True)
    assert seen[-1] == (False, False)


def test_a_lost_process_is_a_failed_run():
    spec = STUDY.cells[0].spec(0)
    record = lost_record(Order(spec.id, spec), "the process of the run ended with SIGKILL")
    assert not record.is_done
    assert record.error["message"].endswith("SIGKILL")
