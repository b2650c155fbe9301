"""Two optimizers in turn: what the switch keeps, and what it does not."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer, RMSprop

from flockstep.errors import InvalidField
from flockstep.optimizers.rmsprop_warmup import RMSpropWarmup
from flockstep.optimizers.two_stage import TwoStage
from flockstep.schedules.progress import Progress

X = torch.randn(10, 16, 5, generator=torch.Generator().manual_seed(4))
FIRST, SECOND = partial(SGD, lr=0.05, momentum=0.9), partial(Adam, lr=0.01)


def in_epoch(epoch):
    return Progress(0, None, epoch)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def made(model, warmup_epochs=2.0):
    return TwoStage(model.parameters(), FIRST, SECOND, warmup_epochs)


def train(model, optimizer, batches):
    for x in batches:
        F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_before_the_switch_it_is_the_first_optimizer_bit_for_bit():
    ours, theirs = net(), net()
    optimizer = made(ours)
    optimizer.at(in_epoch(1.99))
    train(ours, optimizer, X)
    train(theirs, FIRST(theirs.parameters()), X)
    assert same(ours, theirs)


def test_the_switch_keeps_the_parameters_and_starts_adam_afresh_bit_for_bit():
    ours = net()
    optimizer = made(ours)
    train(ours, optimizer, X[:4])
    theirs, sgd = copy.deepcopy(ours), optimizer.active
    assert sgd.state
    optimizer.at(in_epoch(2.0))
    assert same(ours, theirs)
    assert not sgd.state
    assert isinstance(optimizer.active, Adam)
    assert not optimizer.state
    adam = SECOND(theirs.parameters())
    for count, x in enumerate(X[4:], start=1):
        optimizer.at(in_epoch(2.0 + count))  # switches only once
        train(ours, optimizer, [x])
        train(theirs, adam, [x])
        assert same(ours, theirs)
        assert {float(optimizer.state[p]["step"]) for p in ours.parameters()} == {count}
        assert all("momentum_buffer" not in optimizer.state[p] for p in ours.parameters())


def test_groups_and_state_are_the_active_optimizers_own():
    model = net()
    optimizer = made(model)
    assert isinstance(optimizer, Optimizer)
    for epoch in (0.0, 2.0):
        optimizer.at(in_epoch(epoch))
        assert optimizer.param_groups is optimizer.active.param_groups
        train(model, optimizer, X[:1])
        assert optimizer.state is optimizer.active.state
        assert set(optimizer.state) == set(model.parameters())
        optimizer.state.clear()  # what a strategy does that resets
        assert not optimizer.active.state


def test_without_a_warm_up_the_second_takes_the_first_step():
    ours, theirs = net(), net()
    optimizer = made(ours, warmup_epochs=0)
    optimizer.at(in_epoch(0.0))
    train(ours, optimizer, X)
    train(theirs, SECOND(theirs.parameters()), X)
    assert same(ours, theirs)


@pytest.mark.parametrize(
    "given",
    [
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
        lambda m: m.named_parameters(),
        lambda m: [{"params": m[0].parameters()}, {"params": m[2].parameters()}],
        lambda m: ({"params": p} for p in m.parameters()),
    ],
    ids=["iterator", "list", "named", "groups", "tensors"],
)
def test_parameters_may_be_given_in_any_way_that_torch_takes(given):
    ours, theirs = net(), net()
    optimizer, adam = TwoStage(given(ours), FIRST, SECOND, 1.0), SECOND(given(theirs))
    for epoch in (0.0, 1.0):
        optimizer.at(in_epoch(epoch))
        assert [p for g in optimizer.param_groups for p in g["params"]] == list(ours.parameters())
    train(ours, optimizer, X)
    train(theirs, adam, X)
    assert same(ours, theirs)


def test_a_groups_own_settings_and_groups_added_later_count_in_both_stages():
    model = net()
    optimizer = TwoStage(
        [{"params": model[0].parameters(), "weight_decay": 0.3}], FIRST, SECOND, 1.0
    )
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.7})
    for epoch, rate in ((0.0, 0.05), (1.0, 0.01)):
        optimizer.at(in_epoch(epoch))
        assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
            (rate, 0.3, 2),
            (0.7, 0, 2),
        ]
        assert optimizer.param_groups is optimizer.active.param_groups


@pytest.mark.parametrize("switched", [False, True])
def test_a_saved_state_carries_the_stage_and_goes_on_bit_for_bit(switched):
    ours = net()
    optimizer = made(ours)
    if switched:
        optimizer.at(in_epoch(2.0))
    train(ours, optimizer, X[:3])
    theirs, saved = copy.deepcopy(ours), copy.deepcopy(optimizer.state_dict())
    loaded = made(theirs)
    if not switched:  # back to the first stage, too, from where the second starts afresh again
        loaded.at(in_epoch(5.0))
        train(theirs, loaded, X[:3])
        theirs.load_state_dict(ours.state_dict())
    loaded.load_state_dict(saved)
    assert isinstance(loaded.active, Adam if switched else SGD)
    assert loaded.param_groups is loaded.active.param_groups
    for epoch in (1.0, 2.0):
        for model, each in ((ours, optimizer), (theirs, loaded)):
            each.at(in_epoch(epoch))
            train(model, each, X[3:6])
        assert same(ours, theirs)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deep", "pickle"]
)
@pytest.mark.parametrize("switched", [False, True])
def test_copies_go_on_bit_for_bit_and_apart_from_the_original(copied, switched):
    model = net()
    optimizer = made(model)
    if switched:
        optimizer.at(in_epoch(2.0))
    train(model, optimizer, X[:3])
    other, other_optimizer = copied((model, optimizer))
    before = copy.deepcopy(model)
    for epoch in (1.0, 2.0):
        other_optimizer.at(in_epoch(epoch))
        train(other, other_optimizer, X[3:6])
    assert same(model, before)
    for epoch in (1.0, 2.0):
        optimizer.at(in_epoch(epoch))
        train(model, optimizer, X[3:6])
    assert same(model, other)
    assert isinstance(other_optimizer.active, Adam)
    assert other_optimizer.state is other_optimizer.active.state


def test_a_stage_that_slides_itself_is_told_the_moment():
    optimizer = TwoStage(
        net().parameters(), partial(RMSpropWarmup, lr=0.1), partial(RMSprop, lr=0.1), 20.0
    )
    optimizer.at(in_epoch(15.0))
    assert optimizer.param_groups[0]["sgd_share"] == 1
    optimizer.at(in_epoch(20.0))
    assert isinstance(optimizer.active, RMSprop)


def test_a_closure_reaches_the_active_optimizer():
    ours, theirs = net(), net()
    optimizer, sgd = made(ours), FIRST(theirs.parameters())

    def closure():
        loss = F.mse_loss(ours(X[0]), X[0].sum(1, keepdim=True))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    train(theirs, sgd, X[:1])
    assert loss.item() > 0
    assert same(ours, theirs)


def test_what_is_no_optimizer_and_no_state_of_two_stages_is_refused():
    parameters = list(net().parameters())
    for arguments, message in [
        ((parameters, "sgd", SECOND, 1.0), "'first' must be callable (got 'sgd')"),
        ((parameters, FIRST, None, 1.0), "'second' must be callable (got None)"),
        ((parameters, FIRST, lambda p: 3, 1.0), "'second' must make an optimizer (got 3)"),
        ((parameters, FIRST, SECOND, -1), "'warmup_epochs' must be at least 0 and finite (got -1)"),
    ]:
        with pytest.raises(InvalidField) as caught:
            TwoStage(*arguments)
        assert str(caught.value) == message
    with pytest.raises(
        InvalidField, match="'stage' of the state must be 0 or 1, as a TwoStage saves it .got None."
    ):
        made(net()).load_state_dict(FIRST(net().parameters()).state_dict())
    with pytest.raises(ValueError, match="empty parameter list"):
        TwoStage([], FIRST, SECOND, 1.0)
