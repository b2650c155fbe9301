"""`fs.run(on_look=…)`: every look as it happens, in the process that called it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import flockstep as fs


def seen_by(strategy, workers=3, **fields):
    looks, threads = [], set()

    def on_look(look):
        assert isinstance(look, fs.Look)
        looks.append(look)
        threads.add(threading.current_thread())

    settings = {"steps": 12, "look_every": "3 steps", **fields}
    result = fs.run("digits-mlp", strategy, workers, on_look=on_look, **settings)
    assert threads == {threading.current_thread()}
    return looks, result.history


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"measure": "replicas,spread,distance,staleness,time"},
        {"look_every": "0.05 seconds"},
        {"steps": None, "seconds": 0.3},
        {"steps": None, "bytes": 2_000_000},
        {"steps": None, "epochs": 3, "look_every": "1 epoch"},
        {"steps": 300, "target": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", [fs.LocalSGD(4), fs.EAWild(2), fs.EASGD(2)], ids=str)
def test_every_look_of_the_history_is_seen_once_and_in_order(strategy, fields):
    looks, history = seen_by(strategy, **fields)
    if len(looks) > len(history):  # a look was the last of all, before that of the final model
        assert looks.pop(-2).step == looks[-1].step
    assert looks == history
    assert len(looks) > 2


@pytest.mark.parametrize("strategy", [fs.LocalSGD(4), fs.EAWild(2)], ids=str)
def test_on_processes(backend, strategy):
    looks, history = seen_by(strategy, workers=2, backend=backend)
    assert len(looks) > 1
    assert looks == history


def test_looks_are_seen_while_the_run_goes_on():
    """Its last steps wait for the callback: it cannot be told at the end."""
    is_seen, seen, steps = threading.Event(), [], []
    data = (torch.randn(64, 4), torch.randint(2, (64,)))

    def loss(model, batch):
        if model.training:
            steps.append(len(batch))
            assert len(steps) < 3 or is_seen.wait(60)
        return fs.classification_loss(model, batch)

    def on_look(look):
        seen.append(look)
        is_seen.set()

    task = fs.Task(
        "own",
        model=lambda: nn.Linear(4, 2),
        train=data,
        test=data,
        loss=loss,
        metric=fs.classification_accuracy,
        optimizer=fs.OptimizerSpec("sgd", lr=0.1),
    )
    fs.run(task, fs.SyncSGD(), 1, steps=6, look_every="1 steps", on_look=on_look)
    assert len(seen) == 6


@pytest.mark.parametrize("place", ["sim", "local"])
def test_what_the_callback_raises_ends_the_run(place, request):
    backend = "sim" if place == "sim" else request.getfixturevalue("local")

    class Enough(Exception):
        pass

    def on_look(look):
        raise Enough(look.step)

    with pytest.raises(Enough, match="^3$"):
        fs.run("digits-mlp", fs.SyncSGD(), 2, backend, steps=9, look_every="3 steps",
               on_look=on_look)  # fmt: skip


def test_a_callback_that_cannot_be_called():
    with pytest.raises(fs.InvalidField, match="'on_look' must be callable with an fs.Look"):
        fs.run("digits-mlp", fs.SyncSGD(), 2, on_look="yes")
