"""Evaluating leaves no trace in a training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import flockstep as fs
from flockstep.modes import evaluating

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 6, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)


class Frozen(nn.Sequential):
    """With a layer that stays in evaluation mode while the others train."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self[1].eval()


class Noisy(torch.utils.data.Dataset):
    """Samples that are drawn when they are asked for."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + 0.1 * torch.randn(6), Y[index]


def trained(strategy, look_every, data, **fields):
    task = fs.Task(
        "own",
        Frozen,
        partial(torch.optim.SGD, lr=0.1),
        train=data,
        test=(X, Y),
        loss=fs.classification_loss,
        metric=fs.classification_accuracy,
        batch_size=8,
    )
    result = fs.run(task, strategy, workers=2, steps=8, look_every=look_every, **fields)
    return torch.cat([each.flatten() for each in result.model.state_dict().values()])


@pytest.mark.parametrize("strategy", [fs.PSOPS(3), fs.LocalSGD(3), fs.BestOnly(3, "accuracy")])
@pytest.mark.parametrize("data", [(X, Y), Noisy()], ids=["tensors", "drawn"])
def test_looks_wake_no_layer_that_was_frozen_and_draw_nothing_of_the_run(strategy, data):
    often = trained(strategy, "2 steps", data, recalibrate=32)
    assert torch.equal(often, trained(strategy, "99 steps", data, recalibrate=32))


def test_modules_are_in_their_own_modes_again_whatever_happens():
    model = Frozen()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert [module.training for module in model] == [True, False, True, True]


def test_a_layer_that_was_frozen_stays_so_when_a_loss_is_computed_again():
    def program(comm):
        model = Frozen()
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.PSOPS(2))
        worker.total_steps = 1
        loss = nn.functional.cross_entropy(model(X[:8]), Y[:8])
        loss.backward()
        worker.step(loss, again=lambda: nn.functional.cross_entropy(model(X[:8]), Y[:8]))
        drawn = torch.get_rng_state()
        assert worker.loss_after_step != worker.loss
        assert torch.equal(torch.get_rng_state(), drawn)
        return [module.training for module in model]

    assert fs.launch(program, 2) == [[True, False, True, True]] * 2
