"""Batches that grow, and labels that leave some doubt."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.nn import functional as F

import flockstep as fs
from flockstep.data.batch_growth import BatchGrowth
from flockstep.schedules.progress import Progress
from flockstep.schedules.schedules import StepDecay
from flockstep.tasks.label_smoothing import SmoothedLoss

few = settings(max_examples=60, deadline=None)


def test_batches_grow_at_the_marks_and_not_before():
    growth = BatchGrowth(32)
    assert [growth.size_at(f) for f in (0, 0.4999, 0.5, 0.7499, 0.75, 1)] == [
        32,
        32,
        320,
        320,
        3200,
        3200,
    ]


def test_a_maximum_is_not_exceeded_and_factors_may_be_fractions():
    assert [BatchGrowth(32, maximum=1000).size_at(f) for f in (0, 0.5, 0.75)] == [32, 320, 1000]
    assert [
        BatchGrowth(10, at=(0.2, 0.4, 0.6), factor=1.5).size_at(f) for f in (0, 0.2, 0.4, 0.6)
    ] == [10, 15, 22, 34]
    assert BatchGrowth(32, at=()).size_at(1.0) == 32


@few
@given(
    growth=some.builds(
        lambda initial, marks, factor, room: BatchGrowth(
            initial, tuple(sorted(marks)), factor, None if room is None else initial + room
        ),
        some.integers(1, 512),
        some.sets(some.floats(0.01, 0.99), max_size=4),
        some.floats(1.1, 12),
        some.none() | some.integers(0, 4000),
    ),
    fractions=some.lists(some.floats(0, 1), min_size=2),
)
def test_batches_start_at_the_initial_size_never_shrink_and_stay_whole(growth, fractions):
    sizes = [growth.size_at(fraction) for fraction in [0.0, *sorted(fractions)]]
    assert sizes[0] == growth.initial
    assert sizes == sorted(sizes)
    assert all(isinstance(size, int) for size in sizes)
    assert growth.maximum is None or sizes[-1] <= growth.maximum


@few
@given(step=some.integers(0, 100))
def test_growth_by_n_mirrors_a_decay_by_n(step):
    decayed = StepDecay(gamma=0.1).factor(Progress(step, 100, 0.0))
    assert BatchGrowth(8).size_at(step / 100) * decayed == pytest.approx(8)


INPUTS = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)).double()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_a_smoothed_loss_is_its_formula_written_out(smoothing):
    model = net()
    logs = torch.log_softmax(model(INPUTS), dim=1)
    wanted = (1 - smoothing) * F.one_hot(LABELS, 3).double() + smoothing / 3
    loss = SmoothedLoss(smoothing)(model, (INPUTS, LABELS))
    assert loss.item() == pytest.approx(-(wanted * logs).sum(1).mean().item(), rel=1e-12)
    loss.backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_in_evaluation_the_loss_is_plain():
    model, smoothed = net(), SmoothedLoss(0.3)
    plain = fs.classification_loss(model, (INPUTS, LABELS)).item()
    assert smoothed(model, (INPUTS, LABELS)).item() != pytest.approx(plain)
    assert smoothed(model.eval(), (INPUTS, LABELS)).item() == plain


def test_a_smoothed_loss_is_the_loss_of_a_task():
    task = fs.Task(
        "mine",
        model=lambda: net().float(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        loss=SmoothedLoss(),
        train=(INPUTS.float(), INPUTS[:, :3].argmax(1)),
        test=(INPUTS.float(), INPUTS[:, :3].argmax(1)),
        metric=fs.classification_accuracy,
        batch_size=3,
        epochs=20,
    )
    result = fs.run(task, fs.SyncSGD(), workers=2, progress=False)
    assert result.metrics["test_accuracy"] > 0.8
