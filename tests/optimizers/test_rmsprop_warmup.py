"""The slide from RMSprop to momentum SGD: both ends are torch's optimizers, and the way between
is smooth.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.nn import functional as F

from flockstep.optimizers.rmsprop_warmup import RMSpropWarmup, sgd_share
from flockstep.schedules.progress import Progress
from flockstep.schedules.schedules import Polynomial

X = torch.randn(12, 16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
few = settings(max_examples=100, deadline=None)


def in_epoch(epoch, step=0, total=None):
    return Progress(step, total, epoch)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def train(model, optimizer, batches=X):
    for x in batches:
        F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_long_before_the_slide_it_is_rmsprop_with_momentum():
    ours, theirs = net(), copy.deepcopy(net())
    far = RMSpropWarmup(
        ours.parameters(), lr=0.5, rmsprop_lr=0.003, momentum=0.8, weight_decay=0.01, center=1e6
    )
    far.at(in_epoch(0.0))
    rmsprop = torch.optim.RMSprop(
        theirs.parameters(), lr=0.003, alpha=0.99, momentum=0.8, weight_decay=0.01
    )
    for a, b in zip(train(ours, far), train(theirs, rmsprop), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_after_the_slide_it_is_sgd_with_momentum_bit_for_bit(momentum):
    ours, theirs = net(), net()
    late = RMSpropWarmup(ours.parameters(), lr=0.05, momentum=momentum, weight_decay=0.01)
    late.at(in_epoch(12.5))
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=momentum, weight_decay=0.01)
    for a, b in zip(train(ours, late), train(theirs, sgd), strict=True):
        assert torch.equal(a, b)


def test_a_run_across_the_whole_slide_goes_on_as_sgd_with_the_momentum_it_has():
    model = net()
    optimizer = RMSpropWarmup(model.parameters(), lr=0.05, center=2.0, period=2.0)
    for epoch, x in enumerate(X[:4]):
        optimizer.at(in_epoch(epoch))
        train(model, optimizer, [x])
    other = copy.deepcopy(model)
    sgd = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        kept = optimizer.state[ours]
        # After the slide nothing else is averaged, sent or saved.
        assert set(kept) == {"momentum_buffer"}
        sgd.state[theirs]["momentum_buffer"] = kept["momentum_buffer"].clone()
    for a, b in zip(train(model, optimizer, X[4:]), train(other, sgd, X[4:]), strict=True):
        assert torch.equal(a, b)


def test_two_steps_in_the_slide_by_hand():
    x, velocity, square = 2.0, 0.0, 0.0
    parameter = nn.Parameter(torch.tensor([x], dtype=torch.float64))
    optimizer = RMSpropWarmup(
        [parameter], lr=0.5, momentum=0.8, rmsprop_lr=0.01, smoothing=0.9, eps=0.1
    )
    for epoch, gradient in ((8.0, 0.3), (11.0, -0.4)):
        share = 0.5 * math.exp(-0.8) if epoch == 8.0 else 0.7
        square = 0.9 * square + 0.1 * gradient**2
        velocity = (
            0.8 * velocity
            - (share + (1 - share) * (0.01 / 0.5) / (math.sqrt(square) + 0.1)) * gradient
        )
        x += 0.5 * velocity
        optimizer.at(in_epoch(epoch))
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        assert parameter.item() == pytest.approx(x, rel=1e-12)


def test_the_slide_at_some_epochs():
    shares = [sgd_share(epoch, 10, 5) for epoch in (0, 5, 10, 11.25, 12.5, 90)]
    assert shares == pytest.approx([math.exp(-4) / 2, math.exp(-2) / 2, 0.5, 0.75, 1, 1])
    assert shares[-2:] == [1, 1]


@few
@given(epoch=some.floats(0, 100), center=some.floats(0, 50), period=some.floats(0.1, 50))
def test_the_slide_makes_no_jump_and_never_turns_back(epoch, center, period):
    before, after = sgd_share(epoch, center, period), sgd_share(epoch + 1e-6, center, period)
    assert 0 <= before <= after <= 1
    assert after - before <= 1.01e-6 / period + 1e-12


def test_groups_slide_by_their_own_centres_and_start_where_epoch_0_is():
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "center": 0.0}]
    optimizer = RMSpropWarmup(groups, lr=0.1)
    assert [g["sgd_share"] for g in optimizer.param_groups] == [math.exp(-4) / 2, 0.5]
    optimizer.at(in_epoch(5.0))
    assert [g["sgd_share"] for g in optimizer.param_groups] == [math.exp(-2) / 2, 1]


def test_a_schedule_scales_both_parts_alike():
    ours, theirs = net(), net()
    far = RMSpropWarmup(ours.parameters(), lr=0.5, rmsprop_lr=0.003, center=1e6)
    rmsprop = torch.optim.RMSprop(theirs.parameters(), lr=0.003, momentum=0.9)
    for step, x in enumerate(X):
        for optimizer in (far, rmsprop):
            # The last step has rate 0.
            Polynomial().apply(optimizer, in_epoch(0.0, step, len(X) - 1))
        far.at(in_epoch(0.0))
        for a, b in zip(train(ours, far, [x]), train(theirs, rmsprop, [x]), strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_base_rate_of_zero_moves_nothing():
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    after = train(model, RMSpropWarmup(model.parameters(), lr=0.0))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
