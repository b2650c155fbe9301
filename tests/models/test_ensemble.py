"""Several models that answer as one, and where they come from."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flockstep as fs

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def test_probabilities_are_averaged():
    members = [net(seed).eval() for seed in range(3)]
    expected = sum(model(X).softmax(-1) for model in members) / 3
    ensemble = fs.Ensemble(members)
    assert torch.allclose(ensemble(X).exp(), expected)
    assert torch.allclose(ensemble(X).softmax(-1), expected)
    assert torch.allclose(F.cross_entropy(ensemble(X), Y), F.nll_loss(expected.log(), Y))


def test_one_member_says_what_it_says_alone():
    model = net().eval()
    assert torch.allclose(fs.Ensemble([model])(X), model(X).log_softmax(-1))


def test_members_are_models_and_one_at_least():
    with pytest.raises(fs.InvalidField, match=r"'models' must be one at least \(got \[\]\)"):
        fs.Ensemble([])
    with pytest.raises(fs.InvalidField, match=r"'model' must be an nn.Module"):
        fs.Ensemble([net])


def collapsed(comm):
    """A training whose rate collapses three times, and what it has come to each time."""
    model, schedule = net(), fs.FinalCollapse(at=0.4, cycles=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    worker = fs.Worker(comm, model, optimizer, fs.LocalSGD(4), schedule)
    members = []
    for x, y in worker.batches((X, Y), batch_size=4, epochs=10):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        worker.step(loss)
        if worker.steps in {round(end * worker.total_steps) for end in schedule.ends}:
            members.append(worker.snapshot())
    worker.finish()
    return worker.steps, [each.state_dict() for each in members], worker.model.state_dict()


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_members_are_the_same_on_processes(local):
    simulated, real = (fs.launch(collapsed, 2, backend=each)[0][1] for each in ("sim", local))
    assert all(same(*pair) for pair in zip(simulated, real, strict=True))


def test_members_are_collected_where_the_rate_has_collapsed():
    outcomes = fs.launch(collapsed, 2)
    steps, members, final = outcomes[0]
    assert steps == 50
    assert len(members) == 3
    assert same(members[-1], final)
    assert not same(members[0], members[1])
    assert all(same(*pair) for pair in zip(members, outcomes[1][1], strict=True))


def test_a_task_evaluates_an_ensemble_as_any_model():
    task = fs.Task(
        name="halves",
        model=net,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=fs.OptimizerSpec("sgd", lr=0.1),
        train=(X, Y),
        test=(X, Y),
        metric=fs.classification_accuracy,
        batch_size=4,
        epochs=1,
    )
    members = [task.model_of(state) for state in fs.launch(collapsed, 2)[0][1]]
    loss, accuracy = task.evaluate(fs.Ensemble(members))
    losses, _ = zip(*[task.evaluate(each) for each in members], strict=True)
    assert loss <= sum(losses) / 3  # the logarithm is concave
    assert accuracy > 0.8


def test_a_snapshot_costs_nothing_and_changes_nothing():
    def program(comm, with_snapshots):
        model = net()
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.LocalSGD(3))
        for x, y in worker.batches((X, Y), batch_size=4):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            worker.step(loss)
            if with_snapshots:
                worker.snapshot()
        return worker.flat.state.clone(), comm.now(), comm.meter.bytes_sent

    plain, looked = (
        fs.launch(lambda comm, own=own: program(comm, own), 2) for own in (False, True)
    )
    for one, other in zip(plain, looked, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1:] == other[1:]
