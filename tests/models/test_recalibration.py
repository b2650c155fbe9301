"""Statistics of batch normalisation, computed anew for the model that represents a run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flockstep as fs


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4, momentum=None)
    )


DATA = torch.randn(50, 3, generator=torch.Generator().manual_seed(1)) * 3 + 5


def test_the_mean_is_that_of_all_samples_however_they_are_cut():
    """A smaller last batch counts less."""
    model = fs.recalibrate(network(), (DATA, DATA), batch_size=7)
    assert torch.allclose(model[0].running_mean, DATA.mean(0), atol=1e-5)
    whole = fs.recalibrate(network(), DATA, batch_size=50)
    assert torch.allclose(whole[0].running_var, DATA.var(0), rtol=1e-5)
    assert torch.allclose(whole[0].running_mean, model[0].running_mean, atol=1e-5)


def test_the_variance_is_the_mean_of_the_batches_weighted_by_their_samples():
    model = fs.recalibrate(network(), DATA, batch_size=30)
    assert torch.allclose(
        model[0].running_var, (DATA[:25].var(0) + DATA[25:].var(0)) / 2, rtol=1e-5
    )


def test_dropout_does_not_disturb_and_nothing_else_changes():
    """The layer behind dropout sees what it sees when the model is used."""
    model = network()
    model[2].train()
    model[0].eval()
    before = copy.deepcopy(model)
    fs.recalibrate(model, DATA, batch_size=50)
    normed = (DATA - DATA.mean(0)) / (DATA.var(0, unbiased=False) + 1e-5).sqrt()
    assert torch.allclose(model[3].running_mean, model[1](normed).mean(0), atol=1e-5)
    assert [module.training for module in model.modules()] == [
        module.training for module in before.modules()
    ]
    assert (model[0].momentum, model[3].momentum) == (0.1, None)
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), before.parameters(), strict=True)
    )


def test_a_model_without_statistics_is_left_alone():
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.BatchNorm1d(3, track_running_stats=False))
    assert fs.recalibrate(model, DATA) is model


def test_batches_may_be_keyword_arguments():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, values):
            return self.norm(values)

    model = fs.recalibrate(Named(), {"values": DATA})
    assert torch.allclose(model.norm.running_mean, DATA.mean(0), atol=1e-5)


def test_a_failure_leaves_the_models_modes_and_momenta_as_they_were():
    model = network().train()
    with pytest.raises(RuntimeError):
        fs.recalibrate(model, torch.randn(10, 2))
    assert all(module.training for module in model.modules())
    assert model[0].momentum == 0.1
    with pytest.raises(fs.InvalidField, match=r"'batch_size' must be at least 1 \(got 0\)"):
        fs.recalibrate(model, DATA, batch_size=0)
