"""Runs whose representative gets statistics of batch normalisation of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import flockstep as fs
from flockstep.tasks import TASKS
from flockstep.training.recalibrating import recalibration_data


def normed():
    return nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))


TASK = dataclasses.replace(TASKS["digits-mlp"], model=normed)
BOTH = pytest.mark.parametrize("strategy", [fs.LocalSGD(10), fs.EAWild(5)], ids=str)


def short(strategy=None, task=TASK, workers=4, **fields):
    return fs.run(task, strategy or fs.LocalSGD(10), workers, **{"steps": 24, "seed": 1, **fields})


@BOTH
def test_the_model_of_a_run_has_statistics_of_the_training_data_at_no_cost(strategy):
    plain = short(strategy)
    result = short(strategy, recalibrate=True, look_every="8 steps")
    by_hand = fs.recalibrate(plain.model, TASK.loaded().train)
    state = result.model.state_dict()
    for name, value in by_hand.state_dict().items():
        if "num_batches" not in name:
            assert torch.allclose(value, state[name], rtol=1e-6), name
    loss, accuracy = TASK.loaded().evaluate(by_hand)
    assert result.metrics["test_loss"] == pytest.approx(loss, rel=1e-6)
    assert result.metrics["test_accuracy"] == accuracy
    assert result.metrics["test_loss"] != plain.metrics["test_loss"]

    assert all(map(torch.equal, plain.replicas, result.replicas))  # the run itself is the same
    for name in ("seconds", "bytes_sent", "exchanges"):
        assert result.metrics[name] == plain.metrics[name]


def test_a_look_is_scored_as_a_run_that_ends_there():
    seen = short(recalibrate=True, look_every="8 steps").history[0]
    ended = short(recalibrate=True, steps=8)
    assert (seen.step, seen.loss) == (8, ended.metrics["test_loss"])
    assert seen.loss != short(look_every="8 steps").history[0].loss


@BOTH
def test_a_run_that_reaches_its_target_ends_with_the_model_that_was_seen(strategy):
    result = short(strategy, recalibrate=True, look_every="4 steps", target=0.6, steps=200)
    loss, accuracy = TASK.loaded().evaluate(result.model)
    last = result.history[-1]
    assert last.accuracy >= 0.6
    assert (last.loss, last.accuracy) == pytest.approx((loss, accuracy), rel=1e-6)
    assert result.metrics["test_loss"] == pytest.approx(loss, rel=1e-6)


def test_the_workers_own_models_keep_their_own_statistics():
    fields = {"measure": "replicas", "look_every": "8 steps"}
    plain, result = short(**fields), short(recalibrate=True, **fields)
    assert result.metrics["test_replicas"] == plain.metrics["test_replicas"]
    assert [look.replicas_mean for look in result.history] == [
        look.replicas_mean for look in plain.history
    ]


def test_what_has_no_such_statistics_is_as_it_was():
    task = TASKS["digits-mlp"]
    plain, result = short(task=task), short(task=task, recalibrate=True)
    assert plain.metrics | {"wall_seconds": 0} == result.metrics | {"wall_seconds": 0}


def test_the_samples_are_evenly_spaced_and_as_many_as_asked_for():
    assert recalibration_data(torch.zeros(10, 1), 4).indices == [0, 2, 5, 7]
    assert recalibration_data(torch.zeros(10, 1), 4096).indices == [*range(10)]
    assert recalibration_data(torch.zeros(10, 1), False) is None


def test_how_many_samples_makes_a_difference():
    few, all_of_them = (short(recalibrate=samples) for samples in (16, True))
    assert few.metrics["test_loss"] != all_of_them.metrics["test_loss"]


def test_a_stream_would_be_used_up():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(64), torch.tensor(1))] * 64)

    with pytest.raises(fs.InvalidField, match="'recalibrate' must be False where .* a stream"):
        short(task=dataclasses.replace(TASK, train=Stream()), recalibrate=True)


def test_on_real_processes_the_same_statistics_are_found(backend):
    fields = {"workers": 2, "recalibrate": True, "look_every": "8 steps"}
    real, simulated = short(backend=backend, **fields), short(**fields)
    assert [look.loss for look in real.history] == pytest.approx(
        [look.loss for look in simulated.history], rel=1e-6
    )
    assert real.metrics["test_loss"] == pytest.approx(simulated.metrics["test_loss"], rel=1e-6)
