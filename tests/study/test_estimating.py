"""How long a study will take."""

from __future__ import annotations

import pytest

import flockstep as fs
from flockstep.study import estimating
from flockstep.study.planning import planned_runs

BASE = {"task": "digits-mlp", "strategy": "sync_sgd", "workers": 2, "steps": 30}
STUDY = fs.Study("How long?", base=BASE, seeds=1)


@pytest.mark.parametrize(
    ("seconds", "expected", "timed"),
    [
        # 2 steps take 3 s and 8 steps take 6 s: half a second per step of both workers.
        ({2: 3.0, 8: 6.0}, 3.0 + 30 * 0.5, [2, 2, 8]),
        ({2: 40.0}, 30 * 20.0, [2]),  # of steps as long as that a few are enough
    ],
)
def test_a_few_steps_tell_how_long_a_run_takes(monkeypatch, seconds, expected, timed):
    asked = []
    monkeypatch.setattr(
        estimating, "_timed", lambda spec, steps: asked.append(steps) or seconds[steps]
    )
    (run,) = planned_runs(STUDY, {})
    assert estimating.Estimates([run], {}).seconds_of(run) == pytest.approx(expected)
    assert asked == timed


def test_a_run_by_the_wall_takes_its_budget_and_the_start_of_its_processes():
    base = {**BASE, "steps": None, "backend": "local", "seconds": 9.0}
    (run,) = planned_runs(STUDY.replace(base=base), {})
    assert estimating.Estimates([run], {}).seconds_of(run) == 9.0 + estimating.LAUNCH_SECONDS


def test_a_batch_that_grows_is_timed_at_its_end():
    growing = "batch_growth(initial=8, at=(0.5,), factor=2, maximum=32)"
    base = {**BASE, "steps": None, "epochs": 1, "batch_size": growing}
    (run,) = planned_runs(STUDY.replace(base=base), {})
    seconds = estimating.Estimates([run], {}).seconds_of(run)
    assert seconds is not None and seconds > 0
