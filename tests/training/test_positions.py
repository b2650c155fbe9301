"""Where replicas are, in a few numbers; and data that a run holds out."""

from __future__ import annotations

import pytest
import torch

import flockstep as fs
from flockstep.training import planned_steps
from flockstep.training.positions import DIMENSIONS, position_of


def test_distances_are_kept_roughly_and_sums_exactly():
    random = torch.Generator().manual_seed(0)
    replicas = torch.randn(20, 5_000, generator=random)
    positions = torch.tensor([position_of(each) for each in replicas])
    assert positions.shape == (20, DIMENSIONS)
    true, shown = torch.pdist(replicas), torch.pdist(positions.float())
    ratios = shown / true
    assert 0.85 < ratios.mean() < 1.15
    assert ratios.min() > 0.3
    assert ratios.max() < 1.7
    centre = torch.tensor(position_of(replicas.mean(0)))
    assert torch.allclose(positions.mean(0), centre, atol=1e-3)  # a projection is linear


@pytest.mark.parametrize("backend", ["sim", "local"])
def test_a_run_with_positions_is_the_run_without(backend, request):
    place = request.getfixturevalue("local") if backend == "local" else fs.Simulator()
    fields = {"workers": 3, "steps": 9, "look_every": 3}
    plain = fs.run("digits-mlp", fs.LocalSGD(4), backend=place, **fields)
    seen = fs.run("digits-mlp", fs.LocalSGD(4), backend=place, measure="positions", **fields)
    assert torch.equal(seen.replicas[1], plain.replicas[1])
    assert seen.metrics["test_loss"] == plain.metrics["test_loss"]
    looks = [look.positions for look in seen.history]
    assert [len(each) for each in looks] == [3, 3, 3]
    # The last look is of the replicas as they stood at the end.
    assert looks[-1] == [position_of(each) for each in seen.replicas]
    assert plain.history[-1].positions is None


def test_averaged_replicas_stand_at_the_same_place():
    history = fs.run(
        "digits-mlp", fs.LocalSGD(4), 3, steps=8, look_every=2, measure="positions"
    ).history
    apart, together = history[0].positions, history[1].positions
    assert apart[0] != apart[1]
    assert together[0] == together[1] == together[2]


def test_a_share_that_is_held_out_is_looked_at_and_not_trained_on():
    held = fs.run("digits-mlp", fs.SyncSGD(), 2, epochs=1, validation=0.25)
    plain = fs.run("digits-mlp", fs.SyncSGD(), 2, epochs=1)
    assert held.metrics["samples"] == round(0.75 * 1437)
    assert plain.metrics["samples"] == 1437
    assert held.history[-1].accuracy != held.metrics["test_accuracy"]
    assert held.config["validation"] == 0.25
    again = fs.run(held.spec)
    assert again.metrics["test_loss"] == held.metrics["test_loss"]


@pytest.mark.parametrize(
    ("task", "share", "message"),
    [
        ("digits-mlp", 1.5, "'validation' must be above 0 and below 1 \\(got 1.5\\)"),
        ("digits-mlp", 0.0001, "'validation' must leave samples on both sides, of 1437"),
        ("cifar10-resnet20", 0.1, "'validation' must be None where the task has validation data"),
    ],
)
def test_a_share_that_cannot_be_held_out_is_refused(task, share, message):
    with pytest.raises(fs.InvalidField, match=message):
        fs.run(task, fs.SyncSGD(), 2, epochs=1, validation=share)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"epochs": 2}, 46),
        ({"steps": 7}, 7),
        ({"seconds": 0.5, "compute": "10ms"}, 50),
        ({"bytes": 1000}, None),
    ],
)
def test_how_many_steps_a_run_will_take_is_known_before(fields, steps):
    spec = fs.RunSpec("digits-mlp", "sync_sgd", workers=4, **fields)
    assert planned_steps(spec) == steps
