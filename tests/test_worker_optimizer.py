"""A worker as an optimizer, and its part of a data set, in loops as anybody may write them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import flockstep as fs

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(22, 4, generator=GENERATOR)
Y = torch.randint(2, (22,), generator=GENERATOR)
DATA = TensorDataset(X, Y)


class WithLoss(nn.Module):
    """A model whose forward pass returns the loss, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, y, num_items_in_batch=None):
        if num_items_in_batch is None:
            return SimpleNamespace(loss=F.cross_entropy(self.layer(x), y))
        loss = F.cross_entropy(self.layer(x), y, reduction="sum") / num_items_in_batch
        return SimpleNamespace(loss=loss)


def make(comm, strategy=None):
    torch.manual_seed(0)
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = fs.Worker(comm, model, optimizer, strategy or fs.SyncSGD())
    return worker, model, fs.WorkerOptimizer(worker)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def alone(program):
    """What `program` returns as the only worker."""
    (result,) = fs.launch(program, 1)
    return result


@pytest.mark.parametrize("strategy", [fs.SyncSGD(), fs.LocalSGD(3), fs.EAWild(2)], ids=str)
def test_a_step_is_a_step_of_the_worker(strategy):
    def as_optimizer(comm):
        worker, model, optimizer = make(comm, strategy)
        scheduler = ExponentialLR(optimizer, 0.9)
        for x, y in DataLoader(worker.share(DATA), 3):
            optimizer.zero_grad()
            model(x, y).loss.backward()
            optimizer.step()
            scheduler.step()
        return weights(worker.finish()), worker.loss

    def by_hand(comm):
        worker, model, _ = make(comm, strategy)
        for step, (x, y) in enumerate(DataLoader(worker.share(DATA), 3)):
            worker.optimizer.param_groups[0]["lr"] = 0.1 * 0.9**step
            loss = model(x, y).loss
            loss.backward()
            worker.step(loss)
        return weights(worker.finish()), worker.loss

    for ours, theirs in zip(fs.launch(as_optimizer, 2), fs.launch(by_hand, 2), strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)
        assert ours[1] == pytest.approx(theirs[1])


def test_several_passes_make_one_step_with_their_mean_loss_or_their_sum():
    def program(comm, told):
        worker, model, optimizer = make(comm)
        items = len(X) if told else None
        for x, y in zip(X.split(11), Y.split(11), strict=True):
            loss = model(x, y, num_items_in_batch=items).loss
            (loss if told else loss / 2).backward()
        with torch.no_grad():
            model(X, -Y + 1)  # an evaluation, which is not part of the step
        optimizer.step()
        return worker.loss, weights(model)

    (mean, one), (total, other) = (
        alone(lambda comm, told=told: program(comm, told)) for told in (False, True)
    )
    whole = alone(lambda comm: make(comm)[1](X, Y).loss.item())
    assert mean == pytest.approx(whole)
    assert total == pytest.approx(whole)
    torch.testing.assert_close(one, other)


def test_a_closure_tells_the_loss_and_computes_it_with_gradients():
    def program(comm):
        worker, model, optimizer = make(comm)

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model.layer(X), Y)
            loss.backward()
            return loss

        with torch.no_grad():
            returned = optimizer.step(closure)
        optimizer.step(lambda: 0.25)
        return returned.item(), worker.loss, worker.steps

    returned, loss, steps = alone(program)
    assert returned == pytest.approx(alone(lambda comm: make(comm)[1](X, Y).loss.item()))
    assert (loss, steps) == (0.25, 2)


def test_groups_state_and_hooks_are_those_of_an_optimizer():
    def program(comm):
        worker, model, optimizer = make(comm)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        model(X, Y).loss.backward()
        optimizer.step()
        assert calls == ["before", "after"]
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is worker.optimizer.param_groups
        assert optimizer.state is worker.optimizer.state
        assert optimizer.defaults is worker.optimizer.defaults

        saved = optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(saved)
        assert worker.optimizer.param_groups[0]["lr"] == 0.5
        optimizer.param_groups[0]["lr"] = 0.25
        assert worker.optimizer.param_groups[0]["lr"] == 0.25

    alone(program)


def test_dropped_gradients_are_in_no_step():
    def program(comm, extra):
        _, model, optimizer = make(comm)
        if extra:
            (100 * model(X, 1 - Y).loss).backward()
            optimizer.zero_grad()
        model(X, Y).loss.backward()
        optimizer.step()
        return weights(model)

    dropped, never = (alone(lambda comm, extra=extra: program(comm, extra)) for extra in (1, 0))
    assert torch.equal(dropped, never)


def test_a_step_whose_loss_nobody_knows_is_one_line():
    def program(comm):
        _, model, optimizer = make(comm)
        F.cross_entropy(model.layer(X), Y).backward()
        optimizer.step()

    line = r"does not know the loss of step 1: call optimizer.step\(lambda: loss\)"
    with pytest.raises(fs.FlockstepError, match=line):
        fs.launch(program, 2)


def test_a_scaled_loss_is_one_line():
    def program(comm):
        _, model, optimizer = make(comm)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(X, Y).loss).backward()
        scaler.step(optimizer)

    with pytest.raises(fs.FlockstepError, match="cannot step with a scaled loss"):
        fs.launch(program, 2)


def test_what_is_no_worker_is_one_line():
    with pytest.raises(fs.InvalidField, match="'worker' must be an fs.Worker"):
        fs.WorkerOptimizer(nn.Linear(1, 1))


# --- shares of the data ---------------------------------------------------------------------------


def shares(samples, workers, assignment=None):
    data = TensorDataset(torch.arange(samples))

    def program(comm):
        worker, _, _ = make(comm)
        return [sample.item() for (sample,) in worker.share(data, assignment)]

    return fs.launch(program, workers)


def test_a_worker_of_another_framework_is_one_line():
    def program(comm):
        worker = fs.numpy.Worker(comm, {"x": np.zeros(2)}, strategy=fs.SyncSGD(), lr=0.1)
        fs.WorkerOptimizer(worker)

    with pytest.raises(fs.InvalidField) as raised:
        fs.launch(program, 2)
    assert str(raised.value) == (
        "'worker' must be one of a torch module: loops of others call "
        "worker.step(loss, gradients) (got 'one of a NumpyNode')"
    )


def test_shares_are_the_assignment_in_order_and_equally_many():
    whole = fs.Disjoint().assign(11, 3, seed=0)
    parts = shares(11, 3)
    for part, assigned in zip(parts, whole, strict=True):
        own = sorted(assigned.tolist())
        assert part == (own + own[:1])[:4]
    assert {sample for part in parts for sample in part} == set(range(11))


def test_the_share_of_one_worker_is_the_data_set():
    assert shares(7, 1) == [list(range(7))]


def test_a_share_may_overlap_with_others():
    assert shares(7, 3, fs.FullOverlap()) == [list(range(7))] * 3


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize("dataset", [(X, Y), {"x": X}, X, Stream(), 3, "digits"], ids=type)
def test_what_has_no_samples_to_point_at_is_one_line(dataset):
    with pytest.raises(fs.InvalidField, match="'dataset' must be a torch Dataset"):
        alone(lambda comm: make(comm)[0].share(dataset))


def test_what_is_no_assignment_is_one_line():
    with pytest.raises(fs.InvalidField, match="'assignment' must be an assignment such as"):
        alone(lambda comm: make(comm)[0].share(DATA, "disjoint"))


def test_a_model_with_such_an_optimizer_can_be_copied_and_pickled():
    def program(comm):
        model = nn.Linear(2, 1)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), 0.1), fs.LocalSGD(2))
        optimizer = fs.WorkerOptimizer(worker)
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step(lambda: loss)
        copies = [worker.snapshot(), pickle.loads(pickle.dumps(worker.finish()))]
        return [torch.equal(each.weight, model.weight) for each in copies]

    assert fs.launch(program, 2) == [[True, True]] * 2
