"""What every optimizer of the recipes does: learn, skip, save, and train with others under a
strategy.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

import flockstep as fs
from flockstep.errors import InvalidField
from flockstep.optimizers import change_state
from flockstep.optimizers.lamb import LAMB
from flockstep.optimizers.lars import LARS
from flockstep.optimizers.rmsprop_warmup import RMSpropWarmup
from flockstep.optimizers.two_stage import TwoStage
from flockstep.schedules.progress import Progress
from flockstep.schedules.schedules import Cosine, LinearScaling

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(64, 6, generator=GENERATOR)
Y = X @ torch.randn(6, 2, generator=GENERATOR) + 0.5
EPOCHS = 4.0  # how long the warm-ups here are

OPTIMIZERS = {
    "lars": partial(LARS, lr=1.0, trust=0.02, weight_decay=1e-4),
    "lamb": partial(LAMB, lr=0.02, weight_decay=1e-4),
    "rmsprop warm-up": partial(
        RMSpropWarmup, lr=0.02, rmsprop_lr=0.01, center=EPOCHS / 2, period=EPOCHS
    ),
    "two stage": partial(
        TwoStage,
        first=partial(SGD, lr=0.02, momentum=0.5),
        second=partial(Adam, lr=0.02),
        warmup_epochs=EPOCHS / 2,
    ),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def net(dtype=torch.float32):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)


def go_to(optimizer, epoch):
    if hasattr(optimizer, "at"):
        optimizer.at(Progress(0, None, epoch))


def loss_of(model, x=X, y=Y):
    dtype = next(model.parameters()).dtype
    return F.mse_loss(model(x.to(dtype)), y.to(dtype))


def train(model, optimizer, steps, start=0, length=40):
    """Steps on all the data; `length` of them go over all warm-ups and slides."""
    for step in range(start, start + steps):
        go_to(optimizer, EPOCHS * step / length)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@every_optimizer
def test_it_learns(make):
    model = net()
    before = loss_of(model).item()
    train(model, make(model.parameters()), 200)
    assert loss_of(model).item() < 0.05 * before


@every_optimizer
@pytest.mark.parametrize("done", [3, 15, 35], ids="after {} steps".format)
def test_a_saved_state_goes_on_bit_for_bit(make, done):
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer, done)
    other, saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    loaded = (
        make(other.parameters(), lr=9.0) if make.func is not TwoStage else make(other.parameters())
    )
    loaded.load_state_dict(saved)
    train(model, optimizer, 6, start=done)
    train(other, loaded, 6, start=done)
    assert same(model, other)
    assert not same(model, net())


@every_optimizer
def test_deep_copies_go_on_bit_for_bit(make):
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer, 10)
    other, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, 30, start=10)
    train(other, copied, 30, start=10)
    assert same(model, other)


@every_optimizer
def test_double_and_half_precision_take_the_same_way(make):
    finals = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = net(dtype)
        optimizer = make(model.parameters())
        train(model, optimizer, 5)
        assert all(p.dtype is dtype for p in model.parameters())
        for parameter, kept in optimizer.state.items():
            assert all(
                value.dtype is parameter.dtype for name, value in kept.items() if name != "step"
            )
        finals[dtype] = nn.utils.parameters_to_vector(model.parameters()).double()
    start = nn.utils.parameters_to_vector(net().parameters()).double()
    way = (finals[torch.float64] - start).norm()
    assert (finals[torch.float32] - finals[torch.float64]).norm() < 1e-4 * way
    assert (finals[torch.bfloat16] - finals[torch.float64]).norm() < 0.3 * way


@every_optimizer
def test_parameters_without_a_gradient_stay_and_have_no_state(make):
    model = net()
    model[0].requires_grad_(False)
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    assert torch.equal(model[0].weight, net()[0].weight)
    assert not torch.equal(model[3].weight, net()[3].weight)
    assert set(optimizer.state) == {*model[1].parameters(), *model[3].parameters()}


@every_optimizer
def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(make):
    model, other = net(), net()
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with torch.no_grad():
        returned = optimizer.step(closure)
    assert returned.item() == loss_of(other).item()
    train(other, make(other.parameters()), 1)
    assert same(model, other)
    assert optimizer.step() is None


@pytest.mark.parametrize("make", [LARS, LAMB, RMSpropWarmup])
def test_sparse_gradients_are_refused(make):
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = make(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        InvalidField,
        match="'params' must have dense gradients .got one of layout torch.sparse_coo.",
    ):
        optimizer.step()


def with_others(comm, make, strategy, steps=8, mine=True):
    """A worker's losses, its parameters and its optimizer's state after the last step, and the
    final parameters.
    """
    model = net()
    optimizer = make(model.parameters())
    worker = fs.Worker(comm, model, optimizer, strategy)
    schedule = LinearScaling(2, warmup_epochs=1) * Cosine(end=0.5)
    rows = slice(comm.rank, None, comm.size) if mine else slice(None)
    for step in range(steps):
        progress = Progress(step, steps, EPOCHS * step / steps)
        if hasattr(optimizer, "at"):
            optimizer.at(progress)
        schedule.apply(optimizer, progress)
        loss = loss_of(model, X[rows], Y[rows])
        loss.backward()
        worker.step(loss, accuracy=0.0)
    kept = [
        value.clone() for p in model.parameters() for _, value in sorted(optimizer.state[p].items())
    ]
    before = [p.detach().clone() for p in model.parameters()]
    return worker.loss, before, kept, [p.detach().clone() for p in worker.finish().parameters()]


STRATEGIES = [
    fs.SyncSGD(),
    fs.SyncSGD(codec=fs.TopK(0.5)),
    fs.LocalSGD(period=2),
    fs.LocalSGD(period=2, momentum="average"),
    fs.LocalSGD(period=2, momentum="reset"),
    fs.SlowMo(period=2),
    fs.EASGD(period=2),
    fs.GoSGD(),
]


@every_optimizer
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_it_trains_under_any_strategy_and_the_workers_end_equal(make, strategy):
    start = loss_of(net()).item()
    one, two = fs.launch(partial(with_others, make=make, strategy=strategy), workers=2)
    assert max(one[0], two[0]) < 0.95 * start
    assert all(torch.equal(a, b) for a, b in zip(one[3], two[3], strict=True))


@every_optimizer
def test_averaged_momentum_is_equal_on_all_workers_after_an_average(make):
    """Eight steps, four averages; the two stages switch at the same step everywhere."""
    strategy = fs.LocalSGD(period=2, momentum="average")
    one, two = fs.launch(partial(with_others, make=make, strategy=strategy), workers=2)
    assert len(one[2]) == len(two[2]) > 0
    assert all(torch.equal(a, b) for a, b in zip(one[2], two[2], strict=True))
    own, others = (
        kept
        for _, _, kept, _ in fs.launch(partial(with_others, make=make, strategy=fs.LocalSGD(2)), 2)
    )
    assert not all(torch.equal(a, b) for a, b in zip(own, others, strict=True))


@every_optimizer
def test_workers_that_see_the_same_data_step_like_one(make):
    program = partial(with_others, make=make, strategy=fs.SyncSGD(), mine=False)
    (alone,) = fs.launch(program, workers=1)
    for _, _, _, final in fs.launch(program, workers=2):
        for a, b in zip(final, alone[3], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_state_on_several_devices_is_changed_one_device_at_a_time():
    """As Adam's, whose counts of steps stay on the CPU."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"step": torch.zeros(1), "mean": torch.zeros(3, device="meta")}
    seen = []
    change_state(optimizer, lambda flat: seen.append((flat.device.type, flat.numel())))
    assert sorted(seen) == [("cpu", 1), ("meta", 3)]
