"""Averaging at intervals and the elastic family, against their equations written out by hand."""

from __future__ import annotations

import pytest
import torch
from tests.strategies.harness import (
    B,
    W,
    X,
    Y,
    assert_same,
    distributed,
    flat,
    net,
    sgd,
    single,
    train,
)
from torch import nn
from torch.nn import functional as F

import flockstep as fs


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sync_sgd_is_one_process_with_the_large_batch(momentum):
    expected = single(momentum=momentum)
    for before, after in distributed(fs.SyncSGD(), momentum=momentum):
        assert torch.allclose(before, expected, rtol=1e-6, atol=1e-12)
        assert torch.equal(before, after)


def test_local_sgd_of_period_1_with_plain_sgd_is_sync_sgd():
    for (local, _), (sync, _) in zip(
        distributed(fs.LocalSGD(period=1)), distributed(fs.SyncSGD()), strict=True
    ):
        assert torch.allclose(local, sync, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [fs.SyncSGD(), fs.LocalSGD(period=3), fs.LocalSGD(period=4, momentum="average")],
    ids=repr,
)
def test_simulated_and_local_workers_agree_bit_for_bit(local, strategy):
    assert_same(distributed(strategy, momentum=0.9), distributed(strategy, local, momentum=0.9))


def by_hand(period, momentum, steps, at_average):
    """Local SGD written out: separate models, averaged by hand."""
    models = [net() for _ in range(W)]
    optimizers = [sgd(model, momentum=momentum) for model in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = slice(rank * B, (rank + 1) * B)
            F.cross_entropy(model(X[step][mine]), Y[step][mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % period == 0:
            mean = torch.stack([flat(model) for model in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
            at_average(optimizers)
    return [flat(model) for model in models]


def reset(optimizers):
    for optimizer in optimizers:
        optimizer.state.clear()


def average(optimizers):
    for parameters in zip(
        *(optimizer.param_groups[0]["params"] for optimizer in optimizers), strict=True
    ):
        buffers = [
            o.state[p]["momentum_buffer"] for o, p in zip(optimizers, parameters, strict=True)
        ]
        mean = torch.stack(buffers).mean(0)
        for buffer in buffers:
            buffer.copy_(mean)


@pytest.mark.parametrize(
    ("momentum", "at_average"), [("keep", lambda _: None), ("reset", reset), ("average", average)]
)
def test_local_sgd_is_averaging_by_hand(momentum, at_average):
    expected = by_hand(3, 0.9, 11, at_average)
    results = distributed(fs.LocalSGD(period=3, momentum=momentum), momentum=0.9, steps=11)
    for (before, after), own in zip(results, expected, strict=True):
        assert torch.allclose(before, own, rtol=1e-9, atol=1e-12)
        assert torch.allclose(after, torch.stack(expected).mean(0), rtol=1e-9, atol=1e-12)


def test_what_happens_to_momentum_matters():
    finals = [
        distributed(fs.LocalSGD(3, momentum=m), momentum=0.9)[0][1]
        for m in ("keep", "reset", "average")
    ]
    assert not torch.allclose(finals[0], finals[1])
    assert not torch.allclose(finals[0], finals[2])


def test_one_shot_averaging_averages_only_at_the_end():
    alone = torch.stack([before for before, _ in distributed(fs.Independent())])
    for rank, (before, after) in enumerate(distributed(fs.LocalSGD(period=None))):
        assert torch.equal(before, alone[rank])
        assert torch.allclose(after, alone.mean(0), rtol=1e-12)


def test_independent_is_represented_by_the_lowest_loss():
    def program(comm):
        model = nn.Linear(1, 1)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.0), fs.Independent()
        )
        worker.flat.state.fill_(comm.rank)
        for _ in range(3):
            worker.step([5.0, 2.0, 1.0, 3.0][comm.rank])
        return float(flat(worker.finish())[0])

    assert fs.launch(program, 4) == [2.0] * 4


def elastic(strategy, steps, workers=3):
    """Elastic methods with lr = 0 from prescribed positions: only the pulls move anything."""

    def program(comm):
        model = nn.Linear(1, 1, bias=False).double()
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.0), strategy)
        worker.flat.state.fill_(float(10 * comm.rank))
        for _ in range(steps):
            worker.step(1.0)
        before = float(worker.flat.state)
        worker.finish()
        return before, float(worker.flat.state)

    return fs.launch(program, workers)


def centre_start():
    """Where rank 0's fresh model, and so the centre, starts."""

    def program(comm):
        model = nn.Linear(1, 1, bias=False).double()
        fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.0), fs.Independent())
        return model.weight.item()

    return fs.launch(program, 3)[0]


@pytest.mark.parametrize("alpha", [None, 0.25])
def test_easgd_round_robin_is_the_equation_in_rank_order(alpha):
    rate, centre, x = alpha or 0.9 / 3, centre_start(), [0.0, 10.0, 20.0]
    for _ in range(5):
        for rank in range(3):
            d = rate * (x[rank] - centre)
            x[rank] -= d
            centre += d
    for rank, (before, after) in enumerate(elastic(fs.EASGD(period=1, alpha=alpha), 5)):
        assert before == pytest.approx(x[rank], rel=1e-12)
        assert after == pytest.approx(centre, rel=1e-12)


@pytest.mark.parametrize("alpha", [None, 0.25])
def test_easgd_sync_moves_both_sides_from_the_old_values(alpha):
    rate, centre, x = alpha or 0.9 / 3, centre_start(), [0.0, 10.0, 20.0]
    for _ in range(5):
        mean = sum(x) / 3
        x = [value - rate * (value - centre) for value in x]
        centre = (1 - 3 * rate) * centre + 3 * rate * mean
    for rank, (before, after) in enumerate(
        elastic(fs.EASGD(period=1, alpha=alpha, mode="sync"), 5)
    ):
        assert before == pytest.approx(x[rank], rel=1e-12)
        assert after == pytest.approx(centre, rel=1e-12)


def test_the_elastic_pull_conserves_the_sum():
    """What a worker loses the centre gains."""
    for strategy in (fs.EASGD(period=1), fs.EAWild(alpha=0.2)):
        total = 30.0 + centre_start()
        results = elastic(strategy, 8)
        assert sum(before for before, _ in results) + results[0][1] == pytest.approx(
            total, rel=1e-12
        )
        assert len({after for _, after in results}) == 1


def test_period_counts_optimizer_steps():
    """Models of many parameters average no more often than models of one."""
    for layers in (1, 5):

        def program(comm, layers=layers):
            model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
            worker = fs.Worker(
                comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.LocalSGD(period=4)
            )
            seen = []
            for _ in range(12):
                loss = model(torch.ones(1, 2)).sum()
                loss.backward()
                worker.step(loss)
                seen.append(comm.meter.exchanges)
            return seen

        assert fs.launch(program, 2)[0] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_ea_wild_groups_move_as_one():
    def program(comm):
        worker, _ = train(comm, fs.EAWild(period=2, groups=2, delegate="random"), steps=6)
        return flat(worker.model)

    first, second, third, fourth = fs.launch(program, 4)
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)
