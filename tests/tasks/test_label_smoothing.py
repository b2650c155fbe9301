"""Labels that leave some doubt."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flockstep as fs
from flockstep.tasks.label_smoothing import SmoothedLoss

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
