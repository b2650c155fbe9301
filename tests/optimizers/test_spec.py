"""Optimizers as values."""

from __future__ import annotations

import cloudpickle
import pytest
import torch
from torch.optim import SGD, AdamW

import flockstep as fs
from flockstep.errors import InvalidField, UnknownName
from flockstep.optimizers import OPTIMIZERS, fields_of

NEEDS = {
    "lars": {"lr": 0.1},
    "lamb": {"lr": 0.1},
    "rmsprop_warmup": {"lr": 0.1},
    "two_stage": {
        "first": fs.OptimizerSpec("sgd", lr=0.1),
        "second": fs.OptimizerSpec("adam"),
        "warmup_epochs": 1,
    },
}


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 2))]


def stepped(optimizer, given):
    """The parameters after two steps."""
    for _ in range(2):
        optimizer.zero_grad()
        sum((parameter**2).sum() for parameter in given).backward()
        optimizer.step()
    return given[0].detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_made_by_name_and_steps_like_its_class(name):
    fields = NEEDS.get(name, {})
    spec, own, same = fs.OptimizerSpec(name, **fields), parameters(), parameters()
    direct = OPTIMIZERS[name](same, **fields)
    moved = stepped(spec(own), own)
    assert torch.equal(moved, stepped(direct, same))
    assert not torch.equal(moved, parameters()[0])
    assert type(spec(own)) is type(direct)
    assert cloudpickle.loads(cloudpickle.dumps(spec)) == spec


def test_names_are_those_of_torch_in_any_spelling():
    assert {"sgd", "adam", "adamw", "nadam", "radam", "adafactor", "rmsprop", "asgd"} < {
        *OPTIMIZERS
    }
    for spelling in ("adamw", "adam_w", "AdamW", "ADAMW"):
        assert fs.OptimizerSpec(spelling) == fs.OptimizerSpec("adamw")
    assert type(fs.OptimizerSpec("adam_w")(parameters())) is AdamW
    assert fs.OptimizerSpec("RMSpropWarmup", lr=1).name == "rmsprop_warmup"


def test_specs_are_equal_if_the_optimizers_are():
    spec = fs.OptimizerSpec("sgd", momentum=0.9, lr=1)
    assert spec == fs.OptimizerSpec("sgd", lr=1.0, momentum=0.9, nesterov=False, dampening=0)
    assert hash(spec) == hash(fs.OptimizerSpec("sgd", lr=1.0, momentum=0.9))
    assert spec.fields == (("lr", 1.0), ("momentum", 0.9))
    assert repr(spec) == "OptimizerSpec('sgd', lr=1.0, momentum=0.9)"
    assert spec != fs.OptimizerSpec("sgd", lr=1, momentum=0.8)
    assert fs.OptimizerSpec("adam", betas=[0.9, 0.999]) == fs.OptimizerSpec("adam")


def test_the_rate_can_be_set_and_left_open():
    assert fs.OptimizerSpec("sgd", momentum=0.9).with_lr(2) == fs.OptimizerSpec(
        "sgd", lr=2.0, momentum=0.9
    )
    assert fs.OptimizerSpec("sgd", lr=2.0).without_lr() == fs.OptimizerSpec("sgd")
    assert fs.OptimizerSpec("lars").with_lr(2)(parameters()).param_groups[0]["lr"] == 2.0
    with pytest.raises(InvalidField, match=r"^'lr' of lars must be given: lars\(lr=…\)$"):
        fs.OptimizerSpec("lars")(parameters())
    two_stage = fs.OptimizerSpec("two_stage", **NEEDS["two_stage"])
    with pytest.raises(InvalidField, match="'lr' must be set in the parts of two_stage"):
        two_stage.with_lr(0.1)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("moon", {}, "unknown optimizer 'moon'; did you mean 'muon'? known: "),
        (3, {}, "'name' must be an optimizer's name such as 'adam' (got 3)"),
        ("lbfgs", {}, "'optimizer' must not be lbfgs: it needs a closure"),
        ("SparseAdam", {}, "'optimizer' must not be sparse_adam: it needs sparse gradients"),
        ("sgd", {"momentun": 0.9}, "unknown field of sgd 'momentun'; did you mean 'momentum'? "),
        ("sgd", {"params": []}, "unknown field of sgd 'params'; known: "),
        ("sgd", {"momentum": "0.9"}, "'momentum' must be a number (got '0.9')"),
        ("sgd", {"nesterov": 1}, "'nesterov' must be true or false (got 1)"),
        ("sgd", {"lr": -1}, "'lr' must be at least 0 and finite (got -1.0)"),
        ("sgd", {"lr": None}, "'lr' must be a number (got None)"),
        ("adam", {"betas": 0.9}, "'betas' must be numbers such as 0.5,0.75 (got 0.9)"),
        ("adam", {"betas": (0.9,)}, "'betas' must be 2 values (got (0.9,))"),
        ("adam", {"betas": (0.9, "x")}, "'betas' must be a number (got 'x')"),
        ("two_stage", {}, "'first' of two_stage must be given: two_stage(first=…)"),
        (
            "two_stage",
            NEEDS["two_stage"] | {"first": SGD},
            "'two_stage.first' must be an fs.OptimizerSpec such as sgd(lr=0.1)",
        ),
        (
            "two_stage",
            NEEDS["two_stage"] | {"first": fs.OptimizerSpec("lars")},
            "'lr' of lars must be given",
        ),
    ],
)
def test_what_is_wrong_is_said_when_the_spec_is_made(name, fields, message):
    with pytest.raises((InvalidField, UnknownName)) as caught:
        fs.OptimizerSpec(name, **fields)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


def test_what_torch_refuses_is_one_line_that_names_the_optimizer():
    with pytest.raises(InvalidField) as caught:
        fs.OptimizerSpec("sgd", momentum=-1)(parameters())
    assert str(caught.value) == "'optimizer' sgd cannot be made: Invalid momentum value: -1.0"


def test_decay_is_for_matrices_alone():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    make = fs.OptimizerSpec("adamw_on_matrices", lr=0.1, weight_decay=0.5)
    for given in ([matrix, vector], [{"params": [matrix]}, {"params": [vector], "lr": 0.2}]):
        groups = [group for group in make(given).param_groups if group["params"]]
        assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
        assert [group["params"] for group in groups] == [[matrix], [vector]]
    assert groups[1]["lr"] == 0.2


def test_the_fields_of_every_optimizer_are_known():
    assert all("params" not in fields_of(name) for name in OPTIMIZERS)
    assert list(fields_of("lars"))[:2] == ["lr", "momentum"]


def test_a_tensor_as_rate_is_its_number_which_no_schedule_changes():
    rate, betas = torch.tensor(0.5), (torch.tensor(0.25), torch.tensor(0.75))
    spec = fs.OptimizerSpec("adam", lr=rate, betas=betas)
    made = spec(parameters())
    rate.fill_(9.0)
    fs.Warmup(epochs=1).apply(made, fs.Progress(step=0, total_steps=10, epoch=0.0))
    assert made.param_groups[0]["lr"] == 0.0
    assert spec == fs.OptimizerSpec("adam", lr=0.5, betas=(0.25, 0.75))
    assert spec(parameters()).param_groups[0]["lr"] == 0.5
