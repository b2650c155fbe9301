"""Workers that never wait, where time passes by itself: when they are looked at, when they end, and
what their clocks show.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from dataclasses import dataclass

import pytest

import flockstep as fs
from flockstep.tasks import TASKS
from flockstep.training.figures import Figures, Table

STEP = 0.01  # seconds that a paced step takes, and three times that on the slow rank
BYTES = 4 * (64 * 128 + 128 + 128 * 10 + 10)  # of the model of digits-mlp


def pause(worker, step=STEP):
    time.sleep(3 * step if worker.comm.rank == 1 else step)


@dataclass(frozen=True)
class PacedWild(fs.EAWild):
    def before_step(self, worker, state):
        pause(worker)
        super().before_step(worker, state)


@dataclass(frozen=True)
class SlowWild(fs.EAWild):
    def before_step(self, worker, state):
        pause(worker, 0.1)
        super().before_step(worker, state)


@dataclass(frozen=True)
class PacedGossip(fs.GoSGD):
    def before_step(self, worker, state):
        pause(worker)
        super().before_step(worker, state)


@dataclass(frozen=True)
class PacedAveraging(fs.ADPSGD):
    def before_step(self, worker, state):
        pause(worker)
        super().before_step(worker, state)


@dataclass(frozen=True)
class PacedAlone(fs.Independent):
    def before_step(self, worker, state):
        pause(worker)
        super().before_step(worker, state)


def short(strategy, backend, workers=2, **fields):
    return fs.run("digits-mlp", strategy, workers, backend, **{"seed": 2, **fields})


def scored_slowly(seconds):
    """A task whose metric takes so long."""

    def metric(model, batch):
        time.sleep(seconds)
        return fs.classification_accuracy(model, batch)

    return dataclasses.replace(TASKS["digits-mlp"], metric=metric)


# --- looks --------------------------------------------------------------------------------------


@pytest.mark.wall_clock
@pytest.mark.parametrize(
    ("strategy", "every"), [(PacedWild(2), 10), (PacedGossip(0.1), 6)], ids=str
)
def test_looks_by_steps_come_when_all_together_have_taken_so_many(local, strategy, every):
    result = short(strategy, local, steps=5 * every, look_every=f"{every} steps")
    steps = [look.step for look in result.history]
    assert steps == pytest.approx([every * number for number in range(1, 6)], abs=3)
    assert steps[-1] == 5 * every


@pytest.mark.wall_clock
def test_looks_that_were_passed_are_not_made_up_for(local):
    """A step of each is more than the interval: there is one look for each, not one for all."""
    result = short(PacedAlone(), local, steps=12, look_every="1 steps")
    steps = [look.step for look in result.history]
    assert steps == sorted(set(steps))
    result = short(PacedAlone(), local, steps=12, look_every="0.005 seconds")
    seconds = [look.seconds for look in result.history]
    assert all(after - before >= STEP / 2 for before, after in itertools.pairwise(seconds))


@pytest.mark.wall_clock
def test_a_look_by_time_says_when_it_was_and_not_when_it_was_due(local):
    result = short(SlowWild(1), local, steps=3, look_every="0.001 seconds", target=0.01)
    assert result.metrics["steps_to_target"] == 1
    assert result.metrics["seconds_to_target"] == result.metrics["seconds"] >= 0.3


def figures(steps, seconds, nbytes=0, is_done=False, waiting=0.0):
    return Figures(steps, 0, seconds, nbytes, 0, waiting, 0, 0, 0, 0, math.nan, math.nan, is_done)


def test_the_moment_of_a_goal_is_told_by_each_workers_own_clock_and_pace():
    before = Table([figures(2, 1.0), figures(2, 3.0)], [0, 1])
    table = Table([figures(12, 2.0, 100), figures(5, 4.5, 0)], [0, 1])  # 10 and 2 steps a second
    moment = table.moment_of(60, before)
    assert 12 + 10 * (moment - 2) + 5 + 2 * (moment - 4.5) == pytest.approx(60)
    assert table.moment_of(160, before, "bytes_sent") == pytest.approx(2 + 60 / 100)

    done = Table([figures(12, 2.0, is_done=True), figures(5, 4.5)], [0, 1])
    assert done.moment_of(20, before) == pytest.approx(4.5 + 3 / 2)
    one_lost = Table([figures(5, 4.5)], [1])
    assert one_lost.moment_of(7, before) == pytest.approx(5.5)
    assert table.moment_of(60, table) == math.inf  # nobody has moved since


def test_who_is_done_waits_until_the_furthest_clock():
    table = Table([figures(12, 2.0, is_done=True, waiting=0.5), figures(5, 4.0)], [0, 1])
    caught_up = table.caught_up()
    assert [each.seconds for each in caught_up.figures] == [4.0, 4.0]
    assert caught_up.shares_of_time()["waiting"] == [2.5 / 4, 0]


# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.wall_clock
@pytest.mark.parametrize("strategy", [PacedAveraging(), PacedWild(2)], ids=str)
@pytest.mark.parametrize("every", ["10 steps", "0.1 seconds"])
def test_a_budget_of_bytes_is_that_of_all_together(local, strategy, every):
    """Of ADPSGD only the even ranks send. The mean at the end is an exchange, too."""
    limit = 20 * 2 * BYTES
    result = short(strategy, local, bytes=limit, look_every=every)
    assert limit <= result.metrics["bytes_sent"] <= limit + 4 * 2 * BYTES
    # A meeting for the budget is not a look.
    for before, after in itertools.pairwise(result.history[:-1]):
        if every == "10 steps":
            assert after.step - before.step >= 5
        else:
            assert math.floor(after.seconds / 0.1) > math.floor(before.seconds / 0.1)


@dataclass(frozen=True)
class ToldItsLength(PacedWild):
    """Is told at the last meeting how long the training was to be."""

    def finish(self, worker, state):
        assert worker.total_steps == worker.steps
        super().finish(worker, state)


def test_a_budget_of_bytes_tells_how_long_the_training_will_be(local):
    short(ToldItsLength(1), local, bytes=30 * 2 * BYTES)


def test_a_budget_of_bytes_that_nobody_sends_is_an_error(local):
    with pytest.raises(fs.FlockstepError, match="the budget has no end: Independent"):
        short(fs.Independent(), local, bytes=1000)


# --- clocks -------------------------------------------------------------------------------------


@pytest.mark.wall_clock
@pytest.mark.parametrize("strategy", [fs.LocalSGD(4), PacedAlone()], ids=str)
def test_looking_takes_no_time_of_the_run_however_long_it_takes(local, strategy):
    task, fields = scored_slowly(0.3), {"steps": 24, "look_every": "4 steps", "measure": "replicas"}
    began = time.monotonic()
    result = fs.run(task, strategy, 2, local, **fields)
    took = time.monotonic() - began
    assert len(result.history) >= 5
    assert took >= 5 * 0.3
    computing = 24 * 3 * STEP if isinstance(strategy, PacedAlone) else 0
    assert result.metrics["seconds"] < computing + 1  # what a busy machine adds


@pytest.mark.wall_clock
def test_measuring_replicas_at_the_end_takes_no_time_of_the_run(local):
    result = fs.run(scored_slowly(1.0), fs.LocalSGD(4), 2, local, steps=4, measure="replicas")
    assert result.history[-1].replicas_mean is not None
    assert result.metrics["seconds"] < 0.8


@dataclass(frozen=True)
class LastOne(fs.Independent):
    """Rank 1 has not half done when the other has ended, however busy the machine is."""

    def before_step(self, worker, state):
        if worker.comm.rank == 1:
            time.sleep(0.25)


@pytest.mark.wall_clock
def test_who_has_ended_waits_for_the_last_on_its_clock_and_in_its_trace(local, tmp_path):
    path = tmp_path / "trace.json"
    result = short(LastOne(), local, steps=4, measure="time", trace=path)
    seconds, last = result.metrics["seconds"], result.history[-1]
    assert seconds >= 1
    assert last.waiting[0] > 0.5
    assert last.waiting[1] < 0.1
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    for rank in range(2):
        own = [each for each in events if each["tid"] == rank]
        end = max(each["ts"] + each["dur"] for each in own) / 1e6
        assert end == pytest.approx(seconds, abs=0.3)
        waiting = sum(each["dur"] for each in own if each["cat"] == "waiting") / 1e6
        assert waiting == pytest.approx(last.waiting[rank] * seconds, abs=0.01)


@pytest.mark.wall_clock
def test_a_look_counts_the_waiting_of_who_has_ended(local):
    result = short(LastOne(), local, steps=5, measure="time", look_every="0.9 seconds")
    look = result.history[0]  # when the fast one has long ended
    assert 0.9 <= look.seconds < result.metrics["seconds"]
    assert look.waiting[0] > 0.4
    assert look.waiting[1] < 0.1
