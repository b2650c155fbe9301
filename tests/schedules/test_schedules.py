"""Schedules against their closed forms, against torch's own, and on optimizers."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

from flockstep.errors import InvalidField, UnknownName
from flockstep.notation import read, written
from flockstep.optimizers.lamb import LAMB
from flockstep.optimizers.lars import LARS
from flockstep.optimizers.rmsprop_warmup import RMSpropWarmup
from flockstep.optimizers.two_stage import TwoStage
from flockstep.schedules.progress import Progress
from flockstep.schedules.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    FinalCollapse,
    LinearScaling,
    Polynomial,
    Product,
    Schedule,
    SlowStart,
    StepDecay,
    Warmup,
    find_schedule,
)

few = settings(max_examples=60, deadline=None)
T = 40

shares = some.floats(0, 1)
falling = some.one_of(
    some.builds(Polynomial, some.floats(0.1, 5), shares),
    some.builds(Cosine, shares),
    some.builds(FinalCollapse, some.floats(0.05, 0.95), some.floats(1, 5)),
    some.builds(
        lambda marks, gamma: StepDecay(tuple(sorted(marks)), gamma),
        some.sets(some.floats(0.01, 0.99), max_size=4),
        some.floats(0.01, 1),
    ),
)
rising = some.one_of(
    some.builds(Warmup, some.floats(0, 20), shares),
    some.builds(LinearScaling, some.floats(1, 64), some.floats(0, 20)),
)
moments = some.builds(
    lambda step, total, epoch: Progress(step, total, epoch),
    some.integers(0, 1500),
    some.integers(1, 1000),
    some.floats(0, 100),
)


def at(step, total=T):
    return Progress(step, total, epoch=0.0)


def in_epoch(epoch):
    """Where nobody knows how long the training is: schedules that count epochs need not know."""
    return Progress(7, None, epoch)


def factors(schedule, total=T):
    return [schedule.factor(at(step, total)) for step in range(total + 1)]


def module():
    return nn.Linear(3, 2)


@few
@given(schedule=falling, total=some.integers(1, 200))
def test_a_decay_starts_at_the_base_rate_and_never_rises(schedule, total):
    values = factors(schedule, total)
    assert values[0] == 1
    assert all(0 <= after <= before + 1e-12 for before, after in pairwise(values))


@few
@given(schedule=rising, epochs=some.lists(some.floats(0, 40), min_size=2))
def test_a_ramp_never_falls_and_ends_at_its_top(schedule, epochs):
    values = [schedule.factor(in_epoch(epoch)) for epoch in sorted(epochs)]
    top = schedule.scale if isinstance(schedule, LinearScaling) else 1.0
    assert all(before <= after + 1e-12 * top for before, after in pairwise(values))
    assert schedule.factor(in_epoch(20.0)) == top
    assert schedule.factor(in_epoch(1e9)) == top


@few
@given(schedule=falling, total=some.integers(1, 500), beyond=some.integers(0, 500))
def test_after_the_end_a_decay_stays_where_it_is(schedule, total, beyond):
    assert schedule.factor(at(total + beyond, total)) == schedule.factor(at(total, total))


@few
@given(one=falling | rising, two=falling | rising, three=falling | rising, moment=moments)
def test_a_product_multiplies_and_may_be_grouped_in_any_way(one, two, three, moment):
    assert (one * two).factor(moment) == one.factor(moment) * two.factor(moment)
    assert ((one * two) * three).factor(moment) == pytest.approx(
        (one * (two * three)).factor(moment), rel=1e-12
    )
    assert (one * Constant()).factor(moment) == one.factor(moment)


def test_products_are_specs_like_their_parts():
    both = LinearScaling(8, warmup_epochs=5) * StepDecay()
    assert both == Product(LinearScaling(8, warmup_epochs=5), StepDecay())
    assert hash(both) == hash(LinearScaling(8, warmup_epochs=5) * StepDecay())
    assert both.factor(Progress(30, 40, epoch=2.5)) == pytest.approx(4.5 * 0.01)
    with pytest.raises(TypeError):
        StepDecay() * 2


def test_warmup_is_a_line_from_its_start_to_one():
    ramp = Warmup(epochs=4, start=0.2)
    assert [ramp.factor(in_epoch(e)) for e in (0, 1, 2, 4, 5)] == pytest.approx(
        [0.2, 0.4, 0.6, 1.0, 1.0]
    )
    assert Warmup(epochs=4).factor(in_epoch(0)) == 0
    assert Warmup(epochs=0).factor(in_epoch(0)) == 1


def test_linear_scaling_is_a_line_from_the_base_rate_to_scale_times_it():
    ramp = LinearScaling(8)
    assert [ramp.factor(in_epoch(e)) for e in (0, 2.5, 5, 90)] == [1, 4.5, 8, 8]
    assert LinearScaling(8, warmup_epochs=0).factor(in_epoch(0)) == 8


def test_steps_fall_at_the_marks_and_not_before():
    values = factors(StepDecay())
    assert values[:20] == [1.0] * 20
    assert values[20:30] == pytest.approx([0.1] * 10)
    assert values[30:] == pytest.approx([0.01] * 11)
    assert StepDecay(at=()).factor(at(T)) == 1


@few
@given(percent=some.integers(1, 99), total=some.sampled_from([100, 700, 12_300]))
def test_a_mark_that_is_a_whole_step_is_met_at_that_step(percent, total):
    decay, step = StepDecay(at=(percent / 100,), gamma=0.5), percent * total // 100
    assert [decay.factor(at(s, total)) for s in (step - 1, step)] == [1, 0.5]


def test_polynomials_and_half_waves_at_some_points():
    assert factors(Polynomial(), 4) == [1, 0.75, 0.5, 0.25, 0]
    assert factors(Polynomial(power=2, end=0.2), 2) == pytest.approx([1, 0.4, 0.2])
    assert factors(Cosine(end=0.1), 3) == pytest.approx([1, 0.775, 0.325, 0.1])


def test_the_final_collapse_is_a_line_and_then_a_power_of_what_is_left():
    values = factors(FinalCollapse(at=0.8), 10)
    assert values[:9] == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    assert values[9:] == pytest.approx([0.2 * 0.5**2, 0])
    assert factors(FinalCollapse(at=0.8, power=1), 10) == pytest.approx(factors(Polynomial(), 10))


@few
@given(mark=some.floats(0.05, 0.95), power=some.floats(1, 5))
def test_the_final_collapse_makes_no_jump(mark, power):
    collapse, total = FinalCollapse(mark, power), 10**9
    step = round(mark * total)
    near = [collapse.factor(at(s, total)) for s in (step - 2, step + 2)]
    assert near == pytest.approx([1 - mark] * 2, abs=1e-7)


@pytest.mark.parametrize(
    "schedule", [StepDecay(), Polynomial(), Cosine(), FinalCollapse(), Warmup(5) * Cosine()]
)
def test_who_needs_the_length_of_the_training_says_how_to_give_it(schedule):
    with pytest.raises(InvalidField) as caught:
        schedule.factor(Progress(0, None, 0.0))
    assert str(caught.value) == (
        "'total_steps' must be known (got None): take batches from worker.batches, or set "
        "worker.total_steps"
    )


def test_names_lead_to_schedules():
    assert find_schedule("step_decay") is StepDecay
    assert set(SCHEDULES.values()) == {
        Constant,
        Warmup,
        LinearScaling,
        StepDecay,
        SlowStart,
        Polynomial,
        Cosine,
        FinalCollapse,
    }
    assert all(schedule.name == name for name, schedule in SCHEDULES.items())
    with pytest.raises(UnknownName) as caught:
        find_schedule("sine")
    assert str(caught.value) == (
        "unknown schedule 'sine'; did you mean 'cosine'? known: constant, cosine, final_collapse, "
        "linear_scaling, polynomial, slow_start, step_decay, warmup"
    )


@pytest.mark.parametrize(
    ("schedule", "of_torch"),
    [
        (Cosine(), partial(lr_scheduler.CosineAnnealingLR, T_max=T)),
        (Cosine(end=0.1), partial(lr_scheduler.CosineAnnealingLR, T_max=T, eta_min=0.03)),
        (Polynomial(), partial(lr_scheduler.PolynomialLR, total_iters=T)),
        (Polynomial(power=2.5), partial(lr_scheduler.PolynomialLR, total_iters=T, power=2.5)),
        (StepDecay(), partial(lr_scheduler.MultiStepLR, milestones=[T // 2, 3 * T // 4])),
        (
            StepDecay((0.1, 0.2, 0.9), 0.3),
            partial(lr_scheduler.MultiStepLR, milestones=[4, 8, 36], gamma=0.3),
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, tuple(SCHEDULES.values())) else "",
)
def test_a_whole_run_has_the_rates_of_torchs_schedulers(schedule, of_torch):
    ours, theirs = SGD(module().parameters(), lr=0.3), SGD(module().parameters(), lr=0.3)
    scheduler = of_torch(theirs)
    for step in range(T):
        schedule.apply(ours, at(step))
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-9)
        theirs.step()
        scheduler.step()


OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.2),
    "adam": partial(Adam, lr=0.2),
    "lars": partial(LARS, lr=0.2),
    "lamb": partial(LAMB, lr=0.2),
    "rmsprop warm-up": partial(RMSpropWarmup, lr=0.2),
    "two stage": partial(
        TwoStage, first=partial(SGD, lr=0.2), second=partial(Adam, lr=0.01), warmup_epochs=1
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_group_of_any_optimizer_follows_from_its_own_base_rate(make):
    net = module()
    optimizer = make([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.05}])
    for step in (0, 10, 20, 40, 10):
        Polynomial().apply(optimizer, at(step))
        left = 1 - step / T
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [0.2 * left, 0.05 * left]
        )
        assert [group["initial_lr"] for group in optimizer.param_groups] == [0.2, 0.05]
    before = net.weight.detach().clone()
    net(torch.ones(1, 3)).sum().backward()
    Polynomial().apply(optimizer, at(T))
    optimizer.step()
    assert torch.equal(net.weight, before)  # the rate that the step used was 0, too
    Polynomial().apply(optimizer, at(0))
    optimizer.step()
    assert not torch.equal(net.weight, before)


@pytest.mark.parametrize("make", [SGD, LARS, LAMB, RMSpropWarmup], ids=lambda make: make.__name__)
def test_a_rate_that_is_a_tensor_stays_that_tensor(make):
    net, rate = module(), torch.tensor(0.5)
    optimizer = make([{"params": [net.weight]}, {"params": [net.bias]}], lr=rate)
    for step in (10, 10, 30):
        Polynomial().apply(optimizer, at(step))
        assert all(group["lr"] is rate for group in optimizer.param_groups)
        assert float(rate) == pytest.approx(0.5 * (1 - step / T))
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert net.weight.isfinite().all()


def test_a_base_rate_that_torch_noted_is_the_base():
    optimizer = SGD(module().parameters(), lr=0.1)
    optimizer.param_groups[0]["initial_lr"] = torch.tensor(0.5)
    Polynomial().apply(optimizer, at(10))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.375)


def test_a_two_stage_optimizer_goes_on_with_the_second_ones_own_base_rate():
    optimizer = OPTIMIZERS["two stage"](module().parameters())
    Polynomial().apply(optimizer, Progress(10, T, 0.5))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.15)
    optimizer.at(Progress(20, T, 1.0))
    Polynomial().apply(optimizer, Progress(20, T, 1.0))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    assert optimizer.active.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


# ---- Marks in steps and epochs


def at_step(schedule, step, total=None, epoch=0.0):
    return schedule.factor(Progress(step, total, epoch))


def test_the_rate_falls_after_32_000_and_48_000_steps_of_64_064():
    """The thesis' schedule, which fractions of all steps miss by 32 and 48 steps."""
    absolute = StepDecay(("32000 steps", "48000 steps"))
    factors = [at_step(absolute, step, 64_064) for step in (31_999, 32_000, 47_999, 48_000)]
    assert factors == pytest.approx([1, 0.1, 0.1, 0.01])
    by_fractions = StepDecay((0.5, 0.75))
    assert [at_step(by_fractions, step, 64_064) for step in (32_031, 32_032, 48_048)] == (
        pytest.approx([1, 0.1, 0.01])
    )


def test_marks_in_epochs_go_by_epochs():
    schedule = StepDecay(("2 epochs", "3 epochs"), gamma=0.5)
    assert [at_step(schedule, 99, None, epoch) for epoch in (0, 1.99, 2.0, 2.5, 3)] == [
        1,
        1,
        0.5,
        0.5,
        0.25,
    ]


def test_a_number_alone_is_one_of_steps_as_in_intervals():
    assert StepDecay((32_000, 48_000)) == StepDecay(("32000 steps", "48000 steps"))
    assert StepDecay(("1 epochs",)) == StepDecay((" 1  epoch",))
    assert StepDecay((1,)) != StepDecay(("1 epoch",))


@pytest.mark.parametrize(
    ("at", "needs"),
    [((0.5,), True), ((32_000,), False), (("145 epochs",), False), ((0.5, 0.75), True)],
)
def test_only_fractions_need_the_length_of_the_training(at, needs):
    assert StepDecay(at).needs_length is needs
    assert (StepDecay(at) * Constant()).needs_length is needs


@pytest.mark.parametrize(
    "at",
    [
        (0.5, "3 steps"),
        ("3 steps", "4 epochs"),
        (4, 3),
        ("4 epochs", "4 epochs"),
        ("5 min",),
        (1.5,),
        (0,),
        (True,),
        ("soon",),
        5,
        "145 epochs",
    ],
)
def test_marks_are_of_one_kind_and_increase(at):
    with pytest.raises(InvalidField, match=r"^'at' must be a tuple of increasing fractions above"):
        StepDecay(at)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (StepDecay((32_000, 48_000)), "step_decay(at=('32000 steps', '48000 steps'))"),
        (StepDecay(("145 epochs",)), "step_decay(at=('145 epochs',))"),
    ],
)
def test_marks_are_written_with_their_units(schedule, text):
    assert written(schedule) == text
    assert read(Schedule, text) == schedule
    assert read(Schedule, "step_decay(at=[32000, 48000])") == StepDecay((32_000, 48_000))


# ---- Slow start


def test_slow_start_is_that_of_the_paper():
    factors = [at_step(SlowStart(), 0, None, epoch) for epoch in (0, 39.9, 40, 69.9, 70, 85, 90)]
    assert factors == [0.5, 0.5, 0.075, 0.075, 0.01, 0.001, 0.001]
    assert sum(SlowStart().epochs) == 90
    assert not SlowStart().needs_length


# ---- Repeated collapses


def test_one_cycle_is_the_final_collapse():
    for step in range(101):
        left = 1 - step / 100
        expected = left if left >= 1 - 0.7 else (1 - 0.7) * (left / (1 - 0.7)) ** 2
        assert at_step(FinalCollapse(0.7), step, 100) == expected


def test_every_cycle_collapses_from_where_the_line_has_come_to():
    schedule = FinalCollapse(at=0.5, power=2, cycles=2)
    factors = [at_step(schedule, step, 80) for step in (0, 40, 50, 59, 60, 70, 80)]
    assert factors == pytest.approx([1, 0.5, 0.125, 0.5 / 400, 0.5, 0.125, 0])
    assert schedule.ends == (0.75, 1.0)
    assert FinalCollapse().ends == (1.0,)
