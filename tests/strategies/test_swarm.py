"""The swarm, and averaging at intervals that adapt, against their equations written out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tests.strategies.harness import Vector, distributed, net, sgd

import flockstep as fs
from flockstep.randomness import Purpose, torch_stream

W = 4
STEPS = 9
DRAW = torch.Generator().manual_seed(4)
GRADIENTS = torch.randn(STEPS, W, 5, dtype=torch.float64, generator=DRAW)
LOSSES = torch.rand(STEPS, W, dtype=torch.float64, generator=DRAW) + 0.1
ACCURACIES = torch.rand(STEPS, W, dtype=torch.float64, generator=DRAW)
START = torch.randn(5, dtype=torch.float64, generator=DRAW)
LR = 0.1


def swarm(strategy, **options):
    """Workers with prescribed gradients, losses and accuracies: their numbers before and after
    finish.
    """

    def program(comm):
        model = Vector(START)
        worker = fs.Worker(comm, model, sgd(model, LR), strategy)
        worker.total_steps = STEPS
        for step in range(STEPS):
            worker.course.epoch = step // 4
            model.x.grad = GRADIENTS[step, comm.rank].clone()
            worker.step(float(LOSSES[step, comm.rank]), accuracy=float(ACCURACIES[step, comm.rank]))
        before = model.x.detach().clone()
        worker.finish()
        return before, model.x.detach().clone()

    befores, afters = zip(*fs.launch(program, W, **options), strict=True)
    assert all(torch.equal(after, afters[0]) for after in afters)
    return torch.stack(befores), afters[0]


def assert_close(found, expected):
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14), (found - expected).abs().max()


@pytest.mark.parametrize("score", ["loss", "accuracy"])
@pytest.mark.parametrize("best", [1, 3])
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("period", [1, 2])
def test_the_pull_towards_the_best(score, best, staleness, period):
    """x_i ← (1−β) x_i + (β/n) Σ_{k∈N} x_k, with the centre of so many exchanges before."""
    beta, x, centres = 0.3, START.repeat(W, 1), []
    for step in range(STEPS):
        x = x - LR * GRADIENTS[step]
        if (step + 1) % period == 0:
            order = (LOSSES[step] if score == "loss" else -ACCURACIES[step]).argsort()
            centres.append(x[order[:best]].mean(0))
            if len(centres) > staleness:
                x = (1 - beta) * x + beta * centres[-1 - staleness]
    found, after = swarm(fs.NoSync(beta, best, period, staleness, score))
    assert_close(found, x)
    assert_close(after, x.mean(0))


def test_scores_by_accuracy_need_one():
    with pytest.raises(
        fs.FlockstepError, match=r"rank \d: score='accuracy' needs that of every batch: worker.step"
    ):

        def program(comm):
            model = Vector(START)
            fs.Worker(comm, model, sgd(model), fs.NoSync(0.1, best=1, score="accuracy")).step(1.0)

        fs.launch(program, 2)


def test_the_best_are_no_more_than_the_workers():
    with pytest.raises(fs.InvalidField, match=r"'best' must be at most the workers, 4 \(got 5\)"):
        distributed(fs.NoSync(0.1, best=5))


def test_a_stale_centre_travels_while_workers_compute():
    """An exchange of 2 s between steps of 3 s: a fresh centre makes them wait for it, the one
    before does not.
    """
    # A ring of four is six messages.
    network = fs.Network(latency_seconds=2 / 6, bytes_per_second=1e30)

    def seconds(staleness):
        def program(comm):
            model = Vector(START)
            worker = fs.Worker(comm, model, sgd(model), fs.NoSync(0.1, staleness=staleness))
            for _ in range(5):
                worker.step(0.0)
            return comm.now()

        return max(fs.launch(program, W, network=network, compute=fs.Compute(seconds=3.0)))

    assert seconds(0) == pytest.approx(5 * (3 + 2))
    assert seconds(1) == pytest.approx(5 * 3)


def test_the_best_send_less_than_all():
    sent = {}
    for best in (None, 1, 2, 3):

        def program(comm, best=best):
            model = net()
            worker = fs.Worker(comm, model, sgd(model), fs.NoSync(0.1, best=best))
            for _ in range(4):
                worker.step(0.0)
            return comm.meter.bytes_sent

        sent[best] = sum(fs.launch(program, W))
    assert sent[1] < sent[2] < sent[3] < sent[None]


def test_all_follow_the_best():
    x = START.repeat(W, 1)
    for step in range(STEPS):
        x = x - LR * GRADIENTS[step]
        if (step + 1) % 2 == 0:
            x = x[LOSSES[step].argmin()].repeat(W, 1)
    found, after = swarm(fs.BestOnly(period=2))
    assert_close(found, x)
    assert_close(after, x[LOSSES[-1].argmin()])


@pytest.mark.parametrize("decay", ["attraction", "all", "none"])
@pytest.mark.parametrize("random", ["scalar", "vector"])
def test_particle_swarm_steps(decay, random):
    """v ← m·v + (1/λ)[c1·r1·(pBest − x) + c2·r2·(gBest − x)], x ← x + v, in place of every third
    optimizer step.
    """
    seed, c1, c2, period = 3, 0.4, 0.7, 3
    draws = [torch_stream(Purpose.SWARM, seed, rank) for rank in range(W)]

    def r(rank):
        if random == "scalar":
            return torch.rand((), generator=draws[rank]).double()
        return torch.rand(5, dtype=torch.float64, generator=draws[rank])

    x, v = START.repeat(W, 1), torch.zeros(W, 5, dtype=torch.float64)
    best, best_loss = x.clone(), [math.inf] * W
    for step in range(STEPS):
        for rank in range(W):
            if LOSSES[step, rank] < best_loss[rank]:
                best_loss[rank], best[rank] = float(LOSSES[step, rank]), x[rank]
        t, epoch = step + 1, step // 4 + 1
        if t % period:
            x = x - LR * GRADIENTS[step]
            continue
        inertia, leader = 0.8 - t * (0.8 - 0.2) / STEPS, x[LOSSES[step].argmin()].clone()
        for rank in range(W):
            attraction = c1 * r(rank) * (best[rank] - x[rank])
            attraction = attraction + c2 * r(rank) * (leader - x[rank])
            v[rank] = {
                "attraction": inertia * v[rank] + attraction / epoch,
                "all": (inertia * v[rank] + attraction) / epoch,
                "none": inertia * v[rank] + attraction,
            }[decay]
        x = x + v
    found, after = swarm(fs.PSOPS(period, c1, c2, 0.8, 0.2, decay, random), seed=seed)
    assert_close(found, x)
    assert_close(after, x[LOSSES[-1].argmin()])


def test_a_swarm_of_particles_must_know_how_long_it_will_fly():
    def program(comm):
        model = Vector(START)
        fs.Worker(comm, model, sgd(model), fs.PSOPS(period=1)).step(1.0)

    with pytest.raises(fs.InvalidField, match="'total_steps' must be known to PSOPS"):
        fs.launch(program, 2)


@pytest.mark.parametrize("falls_at", [None, 20])
def test_the_period_follows_the_loss(falls_at):
    """τ_j = ⌈√(η_0 F_j / (η_j F_0)) · τ_0⌉ at each interval; while the rate stands, half of the
    last if that is not less; at least 1.
    """
    first, interval, steps = 8, 10.0, 60

    def loss(step):
        return 4.0 if step < 16 else 4.0 * 0.9 ** (step - 15)

    def rate(step):
        return 0.1 if falls_at is None or step < falls_at else 0.02

    def program(comm):
        model = Vector(START)
        optimizer = sgd(model)
        worker = fs.Worker(comm, model, optimizer, fs.AdaComm(first, interval))
        periods = []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate(step)
            # The mean over the workers is what counts.
            worker.step(loss(step) + (comm.rank - 0.5) / 10)
            periods.append(worker.state.period)
        return periods

    instant = fs.Network.preset("ideal")
    found = fs.launch(program, 2, network=instant, compute=fs.Compute(seconds=1.0))
    period, since, total, began, decisions, expected = first, 0, 0.0, None, 0, []
    last_rate = rate(0)
    for step in range(steps):
        since, total = since + 1, total + loss(step)
        if since == period:
            now, mean, since, total = step + 1.0, total / since, 0, 0.0
            began = began or (mean, rate(step))
            if now // interval > decisions:  # an interval has ended since the last decision
                decisions = now // interval
                wished = math.ceil(math.sqrt(began[1] * mean / (rate(step) * began[0])) * first)
                if rate(step) == last_rate and wished >= period:
                    wished = period // 2
                period, last_rate = max(1, wished), rate(step)
        expected.append(period)
    assert found == [expected, expected]
    grows = any(after > before for before, after in pairwise(expected))
    assert grows == (falls_at is not None)
    assert 1 in expected or grows
    assert len(set(expected)) > 2


def test_a_switch_may_be_a_share_of_all_steps():
    whole = distributed(fs.PostLocalSGD(switch_at=5, period=3))
    share = distributed(fs.PostLocalSGD(switch_at=0.25, period=3))  # of 20 steps
    assert all(torch.equal(one[0], other[0]) for one, other in zip(whole, share, strict=True))


def test_a_share_of_an_unknown_number_of_steps_is_refused():
    def program(comm):
        model = Vector(START)
        fs.Worker(comm, model, sgd(model), fs.PostLocalSGD(0.5, 2)).step(1.0)

    with pytest.raises(
        fs.InvalidField,
        match="'switch_at' must be a number of steps where batches do not come from",
    ):
        fs.launch(program, 2)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (fs.Households(3, 4), r"'count' must divide the number of workers, 4 \(got 3\)"),
        (fs.Codistillation(3, 4, 5), r"'groups' must divide the number of workers, 4 \(got 3\)"),
        (fs.EAWild(groups=3), r"'groups' must divide the number of workers, 4 \(got 3\)"),
        (
            fs.SyncSGD("hierarchical:3"),
            r"'all_reduce' must have groups that divide the workers, 4 \(got 'hier",
        ),
        (
            fs.SyncSGD("hybrid:3"),
            r"'all_reduce' must have groups that divide the workers, 4 \(got 'hybrid:3'",
        ),
        (
            fs.SyncSGD("torus:3x2"),
            r"'all_reduce' must have X·Y = 4, the workers \(got 'torus:3x2'\)",
        ),
    ],
    ids=repr,
)
def test_what_must_divide_the_workers_says_so(strategy, message):
    with pytest.raises(fs.InvalidField, match=message):
        distributed(strategy)


@pytest.mark.parametrize(
    ("algorithm", "workers", "messages"),
    [
        ("flat", 6, 2 * 5),
        ("ring", 6, 2 * 5),
        ("tree", 8, 2 * 3),
        ("tree", 5, 2 * 3 - 1),  # the fifth has nobody below it and sends at once
        ("hierarchical:4", 12, 4 * 3 + 2 * 2),
        ("hierarchical", 9, 4 * 2 + 2 * 2),
        ("hybrid:4", 12, 4 * 3 + 2 * 2),  # a small tensor: hierarchical
        ("hybrid:4:8", 12, 2 * 11),  # a large one: ring
        ("torus:4x3", 12, 2 * 3 + 2 * 2),
        ("torus", 16, 2 * 3 + 2 * 3),
    ],
)
def test_all_reduce_algorithms_take_as_many_steps_as_the_papers_say(algorithm, workers, messages):
    """On a network where a message takes a second, whatever its length."""

    def program(comm):
        model = net()
        worker = fs.Worker(comm, model, sgd(model), fs.SyncSGD(algorithm))
        worker.step(0.0)
        return comm.now()

    slow = fs.Network(latency_seconds=1.0, bytes_per_second=1e30)
    assert max(
        fs.launch(program, workers, network=slow, compute=fs.Compute(seconds=0.0))
    ) == pytest.approx(messages)
