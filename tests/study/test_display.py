"""What a person sees of a study that runs."""

from __future__ import annotations

import dataclasses
import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.support.outcomes import made_up_record, made_up_study

from flockstep.study import display as displays
from flockstep.study.display import Display
from flockstep.study.planning import planned_runs


@pytest.fixture
def shown(monkeypatch):
    """A display on a terminal of 100 columns, and what it has written there."""
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(displays, "Console", lambda stderr: console)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(displays, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setattr(displays, "REFRESH_SECONDS", 0.0)
    return screen


def test_it_shows_how_far_it_is_what_failed_and_the_table_so_far(shown):
    study = made_up_study(seeds=2, name="small")
    runs = planned_runs(study, {})
    told = {"type": "NonFiniteLoss", "message": "rank 1: loss is nan", "traceback": ""}
    with Display(study, None) as display:
        display.begin(runs, {}, runs)
        for run in runs[:4]:
            display.add(made_up_record(run.spec, run.id, 0.9 + 0.01 * run.spec.seed))
        last = made_up_record(runs[4].spec, runs[4].id, 0.5)
        display.add(dataclasses.replace(last, status="failed", error=told))
        display.tick()
        drawn = shown.getvalue()
    assert "5/6" in drawn
    assert "runs/min" in drawn
    assert "left, 1 failed" in drawn
    assert "sync_sgd" in drawn
    assert "90.50%" in drawn  # the mean of its two runs
    assert "0.71%" in drawn
    assert "NonFiniteLoss: rank 1: loss is nan" in drawn


def test_elsewhere_it_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(displays, "LINE_SECONDS", 0.0)
    study = made_up_study(seeds=2, name="small")
    runs = planned_runs(study, {})
    with Display(study, True) as display:
        display.begin(runs, {}, runs)
        display.tick()
        display.add(made_up_record(runs[0].spec, runs[0].id, 0.9))
        display.tick()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("small: 1 of 6 runs, ")


def test_where_nobody_looks_it_is_silent(capsys):
    study = made_up_study(seeds=2)
    runs = planned_runs(study, {})
    with Display(study, None) as display:
        display.begin(runs, {}, runs)
        display.add(made_up_record(runs[0].spec, runs[0].id, 0.9))
        display.tick()
    assert capsys.readouterr() == ("", "")
