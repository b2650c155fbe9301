"""Weight decay of weights alone, and weight decay that follows a schedule."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flockstep as fs
from flockstep.errors import InvalidField
from flockstep.notation import read, written
from flockstep.optimizers import OPTIMIZERS, fields_of, learning_rate

WITH_DECAY = [name for name in OPTIMIZERS if "decay" in fields_of(name)]


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))


def make(name, **fields):
    return fs.OptimizerSpec(name, lr=0.1, weight_decay=0.5, **fields)


def after_a_step(model, optimizer):
    """The change that a step with gradients of zero makes: what decay alone does."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return [
        (parameter.ndim, not torch.equal(parameter, old))
        for parameter, old in zip(model.parameters(), before, strict=True)
    ]


def test_every_optimizer_with_weight_decay_can_spare_vectors():
    assert {"sgd", "adam", "adamw", "lars", "lamb", "rmsprop", "rmsprop_warmup"} <= {*WITH_DECAY}
    assert "two_stage" not in WITH_DECAY


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars", "lamb", "rmsprop"])
def test_weights_decay_and_biases_and_normalisation_do_not(name):
    model = net()
    changed = after_a_step(model, make(name, decay="weights")(model.parameters()))
    assert all(has_moved == (dimensions > 1) for dimensions, has_moved in changed)
    model = net()
    model[1].bias.data.fill_(1)  # a zero cannot decay
    assert all(has_moved for _, has_moved in after_a_step(model, make(name)(model.parameters())))


@pytest.mark.parametrize("name", WITH_DECAY)
def test_all_is_the_default_and_is_not_written(name):
    assert make(name, decay="all") == make(name)
    assert "decay='" not in written(make(name))
    assert "decay=weights" in written(make(name, decay="weights"))
    assert read(fs.OptimizerSpec, written(make(name, decay="weights"))) != make(name)


def test_the_default_makes_one_group_as_ever():
    groups = make("sgd", decay="all")(net().parameters()).param_groups
    assert len(groups) == 1
    assert fs.RunSpec("digits-mlp", "sync_sgd", optimizer="sgd(lr=0.1)").id == (
        fs.RunSpec("digits-mlp", "sync_sgd", optimizer="sgd(lr=0.1, decay='all')").id
    )


def test_one_rule_for_adamw_by_both_names():
    one, other = net(), net()
    makers = (
        fs.OptimizerSpec("adamw_on_matrices", lr=0.1, weight_decay=0.5),
        make("adamw", decay="weights"),
    )
    for model, maker in zip((one, other), makers, strict=True):
        optimizer = maker(model.parameters())
        model(torch.ones(4, 1, 4, 4)).sum().backward()
        optimizer.step()
    for mine, yours in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, yours)


def test_settings_of_groups_stay_and_so_does_the_first_rate():
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    given = [{"params": [bias, weight], "lr": 0.3}, {"params": torch.ones(2), "weight_decay": 9.0}]
    made = make("sgd", decay="weights")(given)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in made.param_groups] == [
        (0.3, 0.5, 1),
        (0.3, 0.0, 1),
        (0.1, 0.0, 1),
    ]
    assert learning_rate(made) == 0.3


def test_another_word_is_refused():
    with pytest.raises(InvalidField, match=r"'decay' must be 'all' or 'weights' \(got 'biases'\)"):
        make("sgd", decay="biases")


def task():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 1, 4, 4, generator=generator), torch.arange(32) % 2
    return fs.Task(
        name="small",
        model=net,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=make("sgd"),
        train=(x, y),
        test=(x, y),
        metric=fs.classification_accuracy,
        batch_size=4,
        epochs=2,
    )


@pytest.mark.parametrize(
    "strategy",
    [fs.LocalSGD(2, momentum="average"), fs.Codistillation(2, exchange_period=2, burn_in=1)],
    ids=repr,
)
def test_runs_resume_with_several_groups(strategy, tmp_path):
    spec = fs.RunSpec(
        task(),
        strategy,
        workers=2,
        optimizer="sgd(lr=0.05, momentum=0.9, weight_decay=0.1, decay=weights)",
        schedule="cosine",
        weight_decay_schedule="step_decay(at=('3 steps',), gamma=0.5)",
    )
    whole = fs.run(spec)

    class Stopped(Exception):
        pass

    def stop(look):
        raise Stopped

    with pytest.raises(Stopped):
        fs.run(spec, on_look=stop, checkpoint=tmp_path / "kept", every="3 steps")
    again = fs.resume(tmp_path / "kept", spec=spec)
    for mine, yours in zip(whole.replicas, again.replicas, strict=True):
        assert torch.equal(mine, yours)


# ---- A schedule of weight decay


def test_a_schedule_sets_weight_decay_and_leaves_the_rate():
    optimizer = make("sgd", decay="weights")(net().parameters())
    halves = fs.StepDecay(at=(2,), gamma=0.5)
    for step, expected in enumerate([0.5, 0.5, 0.25, 0.25]):
        halves.apply(optimizer, fs.Progress(step, None, 0.0), "weight_decay")
        assert [group["weight_decay"] for group in optimizer.param_groups] == [expected, 0.0]
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


def test_weight_decay_ends_where_the_rate_collapses():
    """Plain SGD by hand: x ← x − η(g + λ(t)·x), with λ = 0 in the last two of four steps."""

    def program(comm):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        gone = fs.StepDecay(at=(2,), gamma=1e-30)
        worker = fs.Worker(comm, model, optimizer, fs.SyncSGD(), weight_decay_schedule=gone)
        for x in worker.batches(torch.ones(4, 1), 1):
            loss = model(x).mean()
            loss.backward()
            worker.step(loss)
        return model.weight.item()

    x = 1.0
    for decay in (0.5, 0.5, 0.0, 0.0):
        x -= 0.1 * (1 + decay * x)
    assert fs.launch(program, 1)[0] == pytest.approx(x)


def test_runs_take_the_schedule_and_default_to_none():
    plain = fs.RunSpec(task(), "sync_sgd", workers=2)
    same = fs.run(plain.replace(weight_decay_schedule="constant"))
    other = fs.run(plain.replace(weight_decay_schedule="polynomial(power=2)"))
    assert torch.equal(fs.run(plain).replicas[0], same.replicas[0])
    assert not torch.equal(other.replicas[0], same.replicas[0])
    written_one = fs.RunSpec("digits-mlp", "sync_sgd")
    assert "weight_decay_schedule" not in written_one.to_toml()


def test_an_optimizer_without_weight_decay_is_refused():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            return None

    with pytest.raises(InvalidField, match=r"'weight_decay_schedule' must be left out with an"):
        fs.run(
            dataclasses.replace(task(), optimizer=Plain),
            "sync_sgd",
            workers=2,
            weight_decay_schedule="cosine",
        )
