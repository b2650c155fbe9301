"""A run ends after epochs, steps, seconds of its clock or bytes, or when it has reached its target;
equally for all workers.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import flockstep as fs
from flockstep.tasks import TASKS

EVEN = {"network": "ideal", "compute": fs.Compute(0.01)}
BYTES = 4 * (64 * 128 + 128 + 128 * 10 + 10)  # of the model of digits-mlp


def short(strategy, workers=4, backend="sim", **fields):
    return fs.run("digits-mlp", strategy, workers, backend, **fields)


def test_a_budget_of_steps_ends_every_worker_there():
    result = short(fs.LocalSGD(4), steps=30)
    assert result.metrics["steps"] == 30
    assert result.history[-1].step == 30


@pytest.mark.parametrize("steps", [1, 22, 23, 24, 100])
def test_a_budget_of_steps_may_end_anywhere_in_an_epoch(steps):
    assert short(fs.SyncSGD(), steps=steps).metrics["steps"] == steps


def test_schedules_know_how_long_a_budget_of_steps_is():
    rates = []

    class Remembering(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    task = dataclasses.replace(
        TASKS["digits-mlp"],
        optimizer=lambda parameters: Remembering(parameters, lr=1.0),
        schedule=fs.Polynomial(power=1),
    )
    fs.run(task, fs.Independent(), 1, steps=4)
    assert rates == pytest.approx([1, 0.75, 0.5, 0.25])
    rates.clear()
    fs.run(task, fs.Independent(), 1, seconds=0.4, **EVEN)
    assert len(rates) == 40
    assert rates[1:] == pytest.approx([1 - step / 40 for step in range(1, 40)])


@pytest.mark.parametrize(
    "strategy",
    [fs.SyncSGD(), fs.LocalSGD(7), fs.NoSync(0.1, period=3), fs.Independent(), fs.EAWild(4)],
    ids=lambda strategy: strategy.name,
)
def test_a_budget_of_seconds_ends_with_the_step_that_uses_it_up(strategy):
    result = short(strategy, seconds=0.5, **EVEN)
    assert result.metrics["steps"] == 50
    assert result.metrics["seconds"] == pytest.approx(0.5)


def test_workers_that_do_not_wait_use_the_same_time_each_at_its_own_pace():
    result = short(
        fs.AsyncSGD(), seconds=1.0, network="ideal", compute=fs.Compute(0.01, slow={2: 4.0})
    )
    assert result.metrics["steps"] == 100
    assert result.metrics["samples"] == pytest.approx((3 * 100 + 25) * 16, rel=0.1)
    assert result.metrics["seconds"] == pytest.approx(1.0, abs=0.05)


def test_workers_that_wait_end_after_the_same_step_whatever_their_pace():
    compute = fs.Compute(0.01, jitter=0.5, slow={1: 2.0})
    result = short(fs.LocalSGD(5), seconds=1.0, compute=compute, seed=3)
    same = result.history[-1].samples / result.metrics["steps"]
    assert same == pytest.approx(4 * 16, rel=0.1)
    assert 1.0 <= result.metrics["seconds"] < 1.2


@pytest.mark.parametrize("strategy", [fs.SyncSGD(), fs.LocalSGD(4), fs.EAWild(2)], ids=str)
def test_a_budget_of_bytes_ends_with_the_exchange_that_uses_it_up(strategy):
    exchange = 2 * 4 * BYTES if isinstance(strategy, fs.EAWild) else 2 * 3 * BYTES
    limit = 20 * exchange
    result = short(strategy, bytes=limit, **EVEN)
    assert limit <= result.metrics["bytes_sent"] <= limit + 2 * exchange


def test_a_budget_of_bytes_that_nobody_sends_is_an_error_and_no_endless_run():
    with pytest.raises(fs.FlockstepError, match="the budget has no end: Independent"):
        short(fs.Independent(), 2, bytes=1000)


@pytest.mark.parametrize("lanes", [1, 2])
def test_budgets_of_the_clock_repeat_bit_for_bit(lanes):
    def once(lanes):
        compute = fs.Compute(0.01, jitter=0.3)
        return short(fs.AsyncSGD(), 3, seconds=0.3, compute=compute, lanes=lanes)

    first, second = once(1), once(lanes)
    assert [dict(look) for look in first.history] == [dict(look) for look in second.history]
    assert all(map(torch.equal, first.replicas, second.replicas))


@pytest.mark.parametrize(
    "strategy", [fs.SyncSGD(), fs.LocalSGD(8), fs.EAWild(2), fs.Independent()], ids=str
)
def test_a_target_ends_the_run_at_the_look_that_reaches_it(strategy):
    whole = short(strategy, 4, epochs=6, look_every="5 steps", seed=1)
    target = 0.8
    first = next(look for look in whole.history if look.accuracy >= target)
    ended = short(strategy, 4, epochs=6, look_every="5 steps", seed=1, target=target)
    assert ended.history == whole.history[: whole.history.index(first) + 1]
    assert ended.metrics["seconds_to_target"] == first.seconds == ended.metrics["seconds"]
    assert ended.metrics["steps_to_target"] == first.step
    assert ended.metrics["epochs_to_target"] == first.epoch > 0
    assert ended.metrics["bytes_to_target"] == first.bytes_sent == ended.metrics["bytes_sent"]
    assert ended.metrics["test_accuracy"] == first.accuracy


UNEVEN = fs.Compute(0.01, jitter=0.3, slow={2: 5.0})
SHARING = [
    fs.EASGD(2),
    fs.EAMSGD(2),
    fs.EAWild(2, groups=2),
    fs.StaleSync(30),
    fs.EAWild(2),
    fs.GoSGD(0.5),
    fs.ADPSGD(),
]


@pytest.mark.parametrize("every", ["4 steps", "0.05 seconds"])
@pytest.mark.parametrize("strategy", SHARING, ids=str)
def test_a_target_changes_nothing_before_it_is_reached(strategy, every):
    fields = {"compute": UNEVEN, "steps": 24, "seed": 1, "measure": "staleness"}
    whole = short(strategy, look_every=every, lanes=1, **fields)
    missed = short(strategy, look_every=every, target=2, lanes=1, **fields)
    assert missed.history == whole.history
    assert all(map(torch.equal, missed.replicas, whole.replicas))

    target = sorted(look.accuracy for look in whole.history)[len(whole.history) // 2]
    first = next(look for look in whole.history if look.accuracy >= target)
    ended = short(strategy, look_every=every, target=target, lanes=2, **fields)
    assert ended.history == whole.history[: whole.history.index(first) + 1]
    assert ended.metrics["seconds_to_target"] == first.seconds


@pytest.mark.parametrize("strategy", SHARING, ids=str)
@pytest.mark.parametrize("budget", [{"seconds": 0.5}, {"bytes": 20 * 4 * BYTES}], ids=str)
def test_budgets_change_nothing_before_their_end(strategy, budget):
    """Schedules know the end of a run by its budget, so the learning rate is constant here."""
    fields = {"compute": UNEVEN, "seed": 1, "look_every": "4 steps"}
    ended = short(strategy, **fields, **budget)
    # Workers that wait for each other have taken the same number of steps.
    whole = short(strategy, **fields, steps=ended.metrics["steps"] if strategy.waits else 90)
    assert len(ended.history) > 2
    common = len(ended.history) - (not strategy.waits)
    assert ended.history[:common] == whole.history[:common]
    ((name, limit),) = budget.items()
    used = ended.metrics["seconds" if name == "seconds" else "bytes_sent"]
    # Workers that wait must know the last step before the slowest comes there.
    assert (0.8 if strategy.waits else 1) * limit <= used < 1.4 * limit
    again = short(strategy, **fields, **budget, lanes=2)
    assert again.history == ended.history


@pytest.mark.parametrize(
    "strategy", [fs.LocalSGD(8), fs.DiLoCo(8), fs.PSOPS(4), fs.EAWild(8), fs.Downpour()], ids=str
)
def test_schedules_go_by_budgets_of_which_the_first_steps_use_nothing(strategy):
    result = short(strategy, bytes=30 * 6 * BYTES, schedule="warmup(1) * cosine")
    assert result.metrics["bytes_sent"] >= 30 * 6 * BYTES


def test_the_steps_of_a_run_that_reached_its_target_are_those_of_the_worker_with_most():
    compute = fs.Compute(0.01, slow={0: 4.0})
    fields = {"look_every": "0.1 seconds", "network": "ideal", "compute": compute, "seed": 1}
    result = short(fs.EAWild(2), 4, epochs=6, target=0.6, **fields)
    steps = round(result.metrics["seconds"] / 0.01)
    assert result.metrics["steps"] == steps
    assert result.metrics["steps_to_target"] == (3 * steps + steps // 4) // 4  # the mean


def test_a_target_that_is_not_reached_is_none_of_it():
    result = short(fs.SyncSGD(), 2, steps=5, target=0.999)
    names = ("seconds_to_target", "steps_to_target", "bytes_to_target", "epochs_to_target")
    assert [result.metrics[name] for name in names] == [None, None, None, None]


def test_a_target_that_only_the_final_model_reaches_counts():
    result = short(fs.SyncSGD(), 4, epochs=5, look_every="4 epochs", target=0.5)
    only_last = short(fs.SyncSGD(), 4, epochs=5, look_every="1000 steps", target=0.5)
    assert result.metrics["steps"] == 4 * 23
    assert only_last.metrics["steps_to_target"] == only_last.metrics["steps"] == 5 * 23


@pytest.mark.wall_clock
@pytest.mark.parametrize("strategy", [fs.LocalSGD(4), fs.EAWild(2)], ids=str)
def test_budgets_and_targets_on_local_processes(local, strategy):
    timed = short(strategy, 2, local, seconds=0.5, look_every="0.1 seconds")
    assert 0.5 <= timed.metrics["seconds"] < 0.8
    # With the first step at or after a tenth of a second; on a busy machine some are passed over.
    seconds = [look.seconds for look in timed.history[:-1]]
    tenths = [math.floor(10 * each) for each in seconds]
    assert tenths[0] >= 1
    assert tenths == sorted(set(tenths))
    aimed = short(strategy, 2, local, epochs=50, look_every="10 steps", target=0.6)
    assert aimed.metrics["steps"] < 50 * 45
    assert aimed.metrics["test_accuracy"] >= 0.6
    assert aimed.history[-1].accuracy == aimed.metrics["test_accuracy"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 3, "seconds": 1.0}, r"'steps'.*'seconds'|'seconds'.*'steps'"),
        ({"steps": 0}, r"'steps' must be at least 1 \(got 0\)"),
        ({"seconds": -1.0}, r"'seconds' must be above 0"),
        (
            {"seconds": 1.0, "batch_size": fs.BatchGrowth(8)},
            r"'batch_size' must be a number where the budget does not tell",
        ),
        (
            {"steps": 20, "batch_size": fs.BatchGrowth(8)},
            r"'batch_size' must be a number where the budget does not tell",
        ),
    ],
)
def test_budgets_that_make_no_sense_are_one_clear_line(fields, message):
    with pytest.raises(ValueError, match=message):
        short(fs.SyncSGD(), **fields)
