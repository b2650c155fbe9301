"""When looks take place: epochs whatever the overlap, and at synchronisations of all replicas."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import flockstep as fs


def small_task(samples):
    """With so many samples; with a batch of one, every worker has an equal part of them."""
    random = torch.Generator().manual_seed(5)
    x = torch.randn(samples + 50, 6, generator=random)
    y = (x[:, :3].sum(1) > 0).long()
    return fs.Task(
        "small",
        model=lambda: nn.Linear(6, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        loss=fs.classification_loss,
        metric=fs.classification_accuracy,
        train=(x[:samples], y[:samples]),
        test=(x[samples:], y[samples:]),
        batch_size=1,
    )


def steps_of(result):
    return [look.step for look in result.history]


def at_synchronisations(strategy, workers=4, task=None, **fields):
    task = small_task(40 * workers) if task is None else task
    return fs.run(task, strategy, workers, look_at="synchronisation", **fields)


# ---- The protocol of the thesis on households


@pytest.mark.parametrize(
    ("world_period", "per_epoch", "expected"),
    [
        (128, 47, [128, 256, 282]),  # rarer than epochs: at every average of the world
        (16, 63, [64, 128, 192, 256, 320, 378]),  # the first one after each epoch's end
    ],
)
def test_households_are_validated_at_the_first_average_of_the_world(
    world_period, per_epoch, expected
):
    """H = 8 households; the end of the training is looked at as always."""
    task, strategy = small_task(8 * per_epoch), fs.Households(8, world_period)
    result = at_synchronisations(strategy, 8, task, epochs=6, measure="spread")
    assert steps_of(result) == expected
    assert [look.spread for look in result.history[:-1]] == [0.0] * (len(expected) - 1)
    assert result.history[-1].spread > 0  # as they stand before they become one

    ended = fs.run(task, strategy, 8, steps=expected[1])
    seen = result.history[1]
    assert (seen.loss, seen.accuracy) == (
        ended.metrics["test_loss"],
        ended.metrics["test_accuracy"],
    )


def test_looks_where_they_are_due_show_the_average_that_would_be_made_there():
    due = fs.run(small_task(8 * 47), fs.Households(8, 128), 8, epochs=3, measure="spread")
    assert steps_of(due) == [47, 94, 141]
    assert all(look.spread > 0 for look in due.history)


def test_on_real_processes_the_same_looks_show_the_same(backend):
    fields = {"epochs": 3, "measure": "spread", "look_every": "1 epoch"}
    real, simulated = (
        at_synchronisations(fs.Households(2, 16), 2, small_task(60), backend=place, **fields)
        for place in (backend, "sim")
    )
    assert steps_of(real) == steps_of(simulated) == [32, 64, 90]
    assert [look.loss for look in real.history] == [look.loss for look in simulated.history]


# ---- Which steps


@pytest.mark.parametrize(
    "strategy",
    [
        fs.SyncSGD(),
        fs.LocalSGD(5),
        fs.PostLocalSGD(7, 4),
        fs.PostLocalSGD(0.5, 4),
        fs.DiLoCo(5),
        fs.SlowMo(5),
        fs.Households(2, 6),
        fs.Households(4, 12, 2, neighbourhoods=2, neighbourhood_period=4),
        fs.BestOnly(3),
        fs.NoSync(1.0, best=2, period=3),
    ],
    ids=str,
)
def test_replicas_are_equal_after_the_steps_that_a_strategy_says_and_no_others(strategy):
    steps = 25
    fields = {"look_every": "1 step", "measure": "spread", "steps": steps + 1}
    looks = fs.run(small_task(160), strategy, 4, **fields).history[:-1]
    said = [strategy.next_synchronisation(step, steps + 1) for step in range(1, steps + 1)]
    equal = [look.step for look in looks if look.spread == 0]
    assert equal == [step for step, next_one in enumerate(said, start=1) if next_one == step]
    for step, next_one in enumerate(said, start=1):
        assert next_one == min((each for each in equal if each >= step), default=next_one)


@pytest.mark.parametrize(
    "strategy",
    [
        fs.NoSync(0.1),
        fs.NoSync(1.0, staleness=1),
        fs.Independent(),
        fs.EAWild(4),
        fs.LocalSGD(None),
    ],
    ids=str,
)
def test_a_strategy_without_synchronisation_has_no_such_looks(strategy):
    with pytest.raises(fs.InvalidField, match=r"'look_at' must be 'due' with .*equal \(got 'sync"):
        at_synchronisations(strategy)


def test_a_fraction_of_a_training_whose_length_nobody_knows_is_no_step():
    with pytest.raises(fs.InvalidField, match="'look_at' must be 'due' with PostLocalSGD"):
        at_synchronisations(fs.PostLocalSGD(0.5, 4), seconds=1.0)


@dataclasses.dataclass(frozen=True)
class Wild(fs.EAWild):
    def next_synchronisation(self, steps, total_steps):
        return steps


def test_workers_that_share_tensors_cannot_be_looked_at_after_the_same_step():
    with pytest.raises(fs.FlockstepError, match="'look_at' must be 'due' with Wild"):
        at_synchronisations(Wild(4))


# ---- By steps, by seconds, of a stream


def test_looks_by_steps_wait_for_the_next_synchronisation_too():
    result = at_synchronisations(fs.LocalSGD(6), steps=40, look_every="10 steps")
    assert steps_of(result) == [12, 24, 30, 40]


def test_looks_by_seconds_wait_for_the_next_synchronisation_too():
    fields = {"network": "ideal", "compute": fs.Compute(0.01), "look_every": "0.1 seconds"}
    result = at_synchronisations(fs.LocalSGD(8), steps=40, **fields)
    assert steps_of(result) == [16, 24, 32, 40]


def test_an_epoch_of_a_stream_is_looked_at_at_the_synchronisation_after_it():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(6), torch.tensor(1))] * 40)

    task = dataclasses.replace(small_task(40), train=Stream())
    result = at_synchronisations(fs.LocalSGD(8), 4, task, epochs=4)
    assert steps_of(result) == [16, 24, 32, 40]


def test_a_look_that_waits_is_waited_for_after_a_resume(tmp_path):
    """Of a run that stopped between the epoch's end and the next average."""
    folder = tmp_path / "run"
    spec = fs.RunSpec(
        "digits-mlp", fs.LocalSGD(16), 8, epochs=3, look_at="synchronisation", measure="distance"
    )
    whole = fs.run(spec, checkpoint=folder, every="13 steps", keep=9)
    first = min(folder.iterdir(), key=lambda path: path.name)
    for other in folder.iterdir():
        if other != first:
            for file in other.iterdir():
                file.unlink()
            other.rmdir()
    resumed = fs.resume(folder)
    assert steps_of(whole) == [16, 32, 36]  # epochs end after 12, 24 and 36 steps
    assert [dict(look) for look in resumed.history] == [dict(look) for look in whole.history]


# ---- Overlap


@pytest.mark.parametrize(
    "assignment",
    ["disjoint", "full_overlap", "coarse(2)", "medium_coarse(2)", "fine_grained(2)"],
)
def test_looks_come_every_so_many_iterations_whatever_the_overlap(assignment):
    """⌈N / B_global⌉: with 4 workers of batch 3, 100 samples are 9 iterations."""
    fields = {"batch_size": 3, "epochs": 8, "assignment": assignment}
    steps = steps_of(fs.run(small_task(100), fs.LocalSGD(4), 4, **fields))
    per_epoch = math.ceil(100 / (3 * 4))
    assert len(steps) >= 7
    assert steps[:-1] == [per_epoch * number for number in range(1, len(steps))]
