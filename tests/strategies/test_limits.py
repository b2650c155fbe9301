"""Limits that tie the methods to each other, in double precision: to the bit, or to 1e-9 where sums
differ in order.

In the simulator: that the other backends agree with it is a property of the table.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.strategies.harness import W, assert_same, distributed, flat, sgd, train

import flockstep as fs

CLOSE = 1e-9


def befores(runs):
    """The replicas before finish, where two methods choose their representative differently."""
    return [(before,) for before, _ in runs]


@pytest.mark.parametrize("period", [1, 3])
def test_a_swarm_with_full_pull_is_local_sgd(period):
    swarm = distributed(fs.NoSync(pull=1, period=period))
    assert_same(befores(swarm), befores(distributed(fs.LocalSGD(period))))
    assert_same(swarm, distributed(fs.LocalSGD(period)), CLOSE)


def test_a_swarm_without_pull_is_independent():
    assert_same(befores(distributed(fs.NoSync(pull=0))), befores(distributed(fs.Independent())))


@pytest.mark.parametrize("period", [1, 4])
def test_a_swarm_that_follows_its_best_is_best_only(period):
    swarm = distributed(fs.NoSync(pull=1, best=1, period=period))
    assert_same(befores(swarm), befores(distributed(fs.BestOnly(period))))


def test_a_swarm_of_the_best_w_is_the_whole_swarm():
    assert_same(distributed(fs.NoSync(0.3, best=W)), distributed(fs.NoSync(0.3)), CLOSE)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_outer_optimizer_that_does_nothing_is_local_sgd(momentum):
    expected = distributed(fs.LocalSGD(3), momentum=momentum)
    for nesterov in (True, False):
        outer = fs.DiLoCo(period=3, outer_lr=1.0, outer_momentum=0.0, nesterov=nesterov)
        assert_same(distributed(outer, momentum=momentum), expected, CLOSE)
    slow = fs.SlowMo(period=3, slow_lr=1.0, slow_momentum=0.0)
    assert_same(distributed(slow, momentum=momentum), expected, CLOSE)


def test_one_household_is_sync_sgd():
    assert_same(
        distributed(fs.Households(count=1, world_period=4)), distributed(fs.SyncSGD()), CLOSE
    )


@pytest.mark.parametrize("period", [1, 3])
def test_households_of_one_worker_are_local_sgd(period):
    alone = fs.Households(count=W, world_period=period)
    assert_same(distributed(alone), distributed(fs.LocalSGD(period)))


@pytest.mark.parametrize("momentum", ["keep", "reset", "average"])
@pytest.mark.parametrize(
    "codec", [None, fs.Int8(), fs.OneBit(), fs.QSGD(4), fs.RandomK(0.2), fs.PowerSGD(1)], ids=repr
)
def test_households_of_one_worker_are_local_sgd_with_any_codec_and_momentum(codec, momentum):
    """Whatever the household's period: one worker has nobody to average with there."""
    expected = distributed(fs.LocalSGD(6, momentum, codec), momentum=0.9)
    for period in (1, 2):
        alone = fs.Households(W, 6, period, momentum=momentum, codec=codec)
        assert_same(distributed(alone, momentum=0.9), expected)


@pytest.mark.parametrize("codec", [fs.OneBit(), fs.QSGD(4), fs.TopK(0.1)], ids=repr)
def test_whoever_averages_through_a_codec_is_equal_afterwards(codec):
    """Households of two workers after even steps, neighbourhoods of four after every fourth, the
    world of eight after every eighth.
    """

    def program(comm):
        seen = {}
        strategy = fs.Households(4, 8, 2, neighbourhoods=2, neighbourhood_period=4, codec=codec)
        train(comm, strategy, after=lambda worker: seen.update({worker.steps: flat(worker.model)}))
        return seen

    told = fs.launch(program, 8)
    for step, size in ((2, 2), (4, 4), (6, 2), (8, 8), (10, 2), (12, 4), (16, 8), (18, 2)):
        for rank, seen in enumerate(told):
            for other in range(8):
                is_near = rank // size == other // size
                assert torch.equal(seen[step], told[other][step]) == is_near


def test_neighbourhoods_that_are_the_world_change_nothing():
    whole = fs.Households(2, 6, 1, neighbourhoods=1, neighbourhood_period=3)
    assert_same(distributed(whole), distributed(fs.Households(2, 3)), CLOSE)


def test_no_staleness_is_sync_sgd_with_the_learning_rate_of_a_sum():
    """The server adds up all workers' changes, where SyncSGD takes their mean: w times the
    learning rate.
    """
    uneven = {"compute": fs.Compute(jitter=0.5, slow={1: 4.0}), "seed": 5}
    stale = distributed(fs.StaleSync(staleness=0), lr=0.1, options=uneven)
    for ours, theirs in zip(stale, distributed(fs.SyncSGD(), lr=0.1 * W), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one - other).abs().max() < 1e-12


def test_downpour_at_every_step_is_async_sgd():
    assert_same(distributed(fs.Downpour(1, 1)), distributed(fs.AsyncSGD()))


def test_elastic_averaging_without_momentum_is_easgd():
    elastic = distributed(fs.EAMSGD(period=2, alpha=0.2, momentum=0.0))
    assert_same(elastic, distributed(fs.EASGD(period=2, alpha=0.2)), CLOSE)


@pytest.mark.parametrize(
    "algorithm",
    [
        "ring",
        "tree",
        "hierarchical",
        "hierarchical:4",
        "torus",
        "torus:4x1",
        "hybrid",
        "hybrid:2:0",
    ],
)
def test_every_all_reduce_algorithm_is_the_flat_one(algorithm):
    assert_same(distributed(fs.SyncSGD(algorithm)), distributed(fs.SyncSGD()), CLOSE)


def test_switching_at_once_is_local_sgd_and_never_is_sync_sgd():
    assert_same(distributed(fs.PostLocalSGD(0, period=3)), distributed(fs.LocalSGD(3)))
    assert_same(
        befores(distributed(fs.PostLocalSGD(1.0, period=3))), befores(distributed(fs.SyncSGD()))
    )


def test_adaptive_averaging_that_never_decides_is_local_sgd():
    assert_same(
        distributed(fs.AdaComm(initial_period=4, interval_seconds=1e9)), distributed(fs.LocalSGD(4))
    )


def test_a_codec_that_keeps_everything_changes_nothing():
    everything = fs.TopK(ratio=1.0)
    assert_same(distributed(fs.SyncSGD(codec=everything)), distributed(fs.SyncSGD()), CLOSE)
    assert_same(distributed(fs.LocalSGD(3, codec=everything)), distributed(fs.LocalSGD(3)), CLOSE)
    assert_same(distributed(fs.DiLoCo(3, codec=everything)), distributed(fs.DiLoCo(3)), CLOSE)
    levels = {"neighbourhoods": 2, "neighbourhood_period": 4}
    for period in (1, 2):
        assert_same(
            distributed(fs.Households(4, 8, period, **levels, codec=everything), workers=8),
            distributed(fs.Households(4, 8, period, **levels), workers=8),
            CLOSE,
        )


@pytest.mark.parametrize("period", [1, 2, 5])
def test_synchronous_elastic_averaging_on_quadratics_follows_its_closed_form(period):
    """f_i(x) = (x − a_i)²/2 and wα = 1: the centre c becomes the mean of all.

    Between exchanges x_i − a_i shrinks by r = (1−η)^k, so an exchange maps z = (x_1 … x_w, c) to Mz
    + b:

        x_i ← (1−α)(a_i + r(x_i − a_i)) + α c        c ← (1/w) Σ_i (a_i + r(x_i − a_i))

    and n of them are z_n = Mⁿ z_0 + (1 − M)⁻¹ (1 − Mⁿ) b.
    """
    eta, alpha, exchanges, start = 0.1, 1 / W, 6, 2.0
    a = torch.tensor([-1.0, 0.5, 3.0, 4.0], dtype=torch.float64)

    def program(comm):
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, start)
        strategy = fs.EASGD(period, alpha, mode="sync", order="after_step")
        worker = fs.Worker(comm, model, sgd(model, eta), strategy)
        for _ in range(period * exchanges):
            loss = (model.weight - a[comm.rank]).square().sum() / 2
            loss.backward()
            worker.step(loss)
        before = model.weight.item()
        return before, worker.finish().weight.item()

    r = (1 - eta) ** period
    step, shift = (
        torch.zeros(W + 1, W + 1, dtype=torch.float64),
        torch.zeros(W + 1, dtype=torch.float64),
    )
    step[:W, :W], step[:W, W], step[W, :W] = (
        (1 - alpha) * r * torch.eye(W, dtype=torch.float64),
        alpha,
        r / W,
    )
    shift[:W], shift[W] = (1 - alpha) * (1 - r) * a, (1 - r) * a.mean()
    power, one = torch.linalg.matrix_power(step, exchanges), torch.eye(W + 1, dtype=torch.float64)
    *positions, centre = (
        power.sum(1) * start + torch.linalg.solve(one - step, (one - power) @ shift)
    ).tolist()
    for (before, after), expected in zip(fs.launch(program, W), positions, strict=True):
        assert math.isclose(before, expected, rel_tol=CLOSE)
        assert math.isclose(after, centre, rel_tol=CLOSE)


def test_the_problem_is_one_on_which_workers_differ():
    """All of the above would hold for workers that see the same data."""
    replicas = [before for before, _ in distributed(fs.Independent())]
    assert not torch.allclose(replicas[0], replicas[1], rtol=1e-3)
