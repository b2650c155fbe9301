"""Methods against plain NumPy, written from the printed algorithms: 20 steps of several workers on
quadratics, with a learning rate that falls twice and, where a method allows it, momentum and weight
decay in the workers' own optimizers.

    f_i(x) = (x − c)ᵀ H_i (x − c)/2,  c drawn anew for every worker and step
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.strategies.harness import Vector

import flockstep as fs
from flockstep.randomness import Purpose, torch_stream

STEPS, SIZE, MOST = 20, 5, 8
DRAW = np.random.default_rng(4)
START = DRAW.normal(size=SIZE)
CENTRES = 2 * DRAW.normal(size=(STEPS, MOST, SIZE))
ROOTS = DRAW.normal(size=(MOST, SIZE, SIZE))
HESSIANS = np.eye(SIZE) + ROOTS @ ROOTS.transpose(0, 2, 1) / SIZE

LR, MOMENTUM, DECAY = 0.05, 0.8, 0.3
FALLS = fs.StepDecay(at=(0.5, 0.75), gamma=0.4)


def rate(step):
    """Of the step after `step` of them."""
    return LR * 0.4 ** ((step >= 10) + (step >= 15))


def gradient(rank, step, x):
    return HESSIANS[rank] @ (x - CENTRES[step, rank])


def loss(rank, step, x):
    away = x - CENTRES[step, rank]
    return float(away @ HESSIANS[rank] @ away / 2)


class Optimizer:
    """SGD with momentum and weight decay as torch prints it, for one worker."""

    def __init__(self, momentum=MOMENTUM, decay=DECAY):
        self.momentum, self.decay = momentum, decay
        self.velocity = np.zeros(SIZE)

    def change(self, x, g, lr):
        self.velocity = self.momentum * self.velocity + g + self.decay * x
        return -lr * self.velocity


def trained(strategy, workers, order=None, momentum=MOMENTUM, decay=DECAY, note=lambda w: None):
    """Of each worker its numbers before and after finish, and a note after each of its steps.

    With an order, workers take steps one after the other; otherwise all at once, in a second each.
    """

    def program(comm):
        model, notes = Vector(torch.from_numpy(START)), []
        optimizer = torch.optim.SGD(
            model.parameters(), lr=LR, momentum=momentum, weight_decay=decay
        )
        worker = fs.Worker(comm, model, optimizer, strategy, schedule=FALLS)
        worker.total_steps = STEPS

        def step():
            x = model.x.detach().numpy()
            model.x.grad = torch.from_numpy(gradient(comm.rank, worker.steps, x))
            worker.step(loss(comm.rank, worker.steps, x))
            notes.append(note(worker))

        for rank in [comm.rank] * STEPS if order is None else order:
            if rank == comm.rank:
                step()
            if order is not None:
                comm.barrier()
        before = model.x.detach().clone().numpy()
        return before, worker.finish().x.detach().clone().numpy(), notes

    quick = {"network": fs.Network.preset("ideal"), "compute": fs.Compute(seconds=1.0)}
    return fs.launch(program, workers, **quick)


def assert_found(found, befores, after):
    for rank, (before, finished, *_) in enumerate(found):
        np.testing.assert_allclose(before, befores[rank], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(finished, after, rtol=1e-10, atol=1e-12)


def in_turns(workers):
    """An order of arrival in which each worker takes all its steps."""
    return np.random.default_rng(workers).permutation(np.repeat(range(workers), STEPS)).tolist()


# --- mixing with neighbours -----------------------------------------------------------------------


def ring(workers):
    """Metropolis weights: all have two neighbours, so each counts a third."""
    one = np.eye(workers)
    return (one + np.roll(one, 1, axis=1) + np.roll(one, -1, axis=1)) / 3


@pytest.mark.parametrize("order", ["printed", "after_step"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (MOMENTUM, DECAY)])
def test_d_psgd(order, momentum, decay):
    """Lian et al. 2017, Algorithm 1: x_{k+1,i} = Σ_j W_ij x_{k,j} − γ g(x_{k,i}), all of step k."""
    workers = 5
    w, x = ring(workers), np.tile(START, (workers, 1))
    own = [Optimizer(momentum, decay) for _ in range(workers)]
    for step in range(STEPS):
        changes = np.stack(
            [own[i].change(x[i], gradient(i, step, x[i]), rate(step)) for i in range(workers)]
        )
        x = w @ x + changes if order == "printed" else w @ (x + changes)
    found = trained(fs.DPSGD("ring", order), workers, momentum=momentum, decay=decay)
    assert_found(found, x, x.mean(0))


@pytest.mark.parametrize("order", ["printed", "after_step"])
def test_ad_psgd(order):
    """Lian et al. 2018. A worker computes its gradient at x̂, what it had when it began. The text:
    it changes its model, which others may have averaged meanwhile, then averages with a neighbour.
    Algorithm 1: it averages first.
    """
    workers = 4
    draws = [torch_stream(Purpose.NEIGHBOUR, 0, rank) for rank in range(workers)]
    x, begun, steps = [START] * workers, [START] * workers, [0] * workers
    own, turns = [Optimizer() for _ in range(workers)], in_turns(workers)
    for i in turns:
        lr = rate(steps[i])
        change = own[i].change(begun[i], gradient(i, steps[i], begun[i]), lr)
        steps[i] += 1
        is_active = i % 2 == 0
        if order == "after_step" or not is_active:
            x[i] = x[i] + change
        if is_active:
            j = (1, 3)[int(torch.randint(2, (), generator=draws[i]))]
            x[i] = x[j] = (x[i] + x[j]) / 2
        if order == "printed" and is_active:
            x[i] = x[i] + change
        begun[i] = x[i]
    found = trained(fs.ADPSGD("complete", order), workers, turns)
    assert_found(found, begun, np.mean(x, axis=0))


def test_gosgd():
    """Blot et al. 2016: after a step, with probability p, a_i ← a_i/2 and (x_i, a_i) is sent; who
    receives takes the weighted mean.
    """
    workers, p = 3, 0.5
    draws = [torch_stream(Purpose.GOSSIP, 0, rank) for rank in range(workers)]
    x, a, steps = [START] * workers, [1 / workers] * workers, [0] * workers
    own, turns, inbox = [Optimizer() for _ in range(workers)], in_turns(workers), [[], [], []]

    def receive(i):
        for theirs, weight in inbox[i]:
            x[i] = (a[i] * x[i] + weight * theirs) / (a[i] + weight)
            a[i] += weight
        inbox[i] = []

    sent = 0
    for i in turns:
        x[i] = x[i] + own[i].change(x[i], gradient(i, steps[i], x[i]), rate(steps[i]))
        steps[i] += 1
        receive(i)
        if float(torch.rand((), generator=draws[i])) < p:
            peers = [j for j in range(workers) if j != i]
            j = peers[int(torch.randint(len(peers), (), generator=draws[i]))]
            a[i] /= 2
            inbox[j].append((x[i], a[i]))
            sent += 1
    befores = list(x)
    for i in range(workers):
        receive(i)
    assert sum(a) == pytest.approx(1, rel=1e-12)
    assert 15 < sent < 45
    after = sum(weight * each for weight, each in zip(a, x, strict=True))
    assert_found(trained(fs.GoSGD(p), workers, turns), befores, after)


# --- the parameter server -------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("is_aware", [False, True])
@pytest.mark.parametrize("compensation", [0.0, 0.04])
def test_async_sgd_with_delay_compensation(momentum, is_aware, compensation):
    """Zheng et al. 2017, Algorithm 2, at the server, when worker m sends g:

    w ← w − η (g + λ g ⊙ g ⊙ (w − w_bak(m)));   w_bak(m) ← w  when m pulls it
    """
    workers = 3
    w, backup, velocity = START, [START] * workers, np.zeros(SIZE)
    steps, pulled, turns = [0] * workers, [0] * workers, in_turns(workers)
    for t, m in enumerate(turns):
        g = gradient(m, steps[m], backup[m])
        g = g + compensation * g * g * (w - backup[m])
        staleness = max(1, t - pulled[m]) if is_aware else 1
        velocity = momentum * velocity - rate(steps[m]) / staleness * g
        w = w + velocity
        backup[m], pulled[m], steps[m] = w, t + 1, steps[m] + 1
    strategy = fs.AsyncSGD(momentum, is_aware, compensation)
    assert_found(trained(strategy, workers, turns, momentum=0.0, decay=0.0), backup, w)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (MOMENTUM, DECAY)])
def test_stale_sync_without_staleness(momentum, decay):
    """All read x, and x gains what each of their optimizers makes of it."""
    workers, x, read = 4, START, START
    own = [Optimizer(momentum, decay) for _ in range(workers)]
    for step in range(STEPS):
        read = x
        x = x + sum(own[i].change(x, gradient(i, step, x), rate(step)) for i in range(workers))
    found = trained(fs.StaleSync(0), workers, momentum=momentum, decay=decay)
    assert_found(found, [x] * workers, x)
    assert not np.allclose(read, x)


# --- averaging at intervals -----------------------------------------------------------------------


def test_slowmo_with_a_changing_rate():
    """Wang et al. 2019, Algorithm 1: u ← βu + (x_0 − x̄)/γ_t, x_0 ← x_0 − αγ_t u."""
    workers, period, alpha, beta = 4, 3, 0.8, 0.6
    x, x0, u = np.tile(START, (workers, 1)), START, np.zeros(SIZE)
    own = [Optimizer() for _ in range(workers)]

    def exchange(gamma):
        nonlocal x0, u
        u = beta * u + (x0 - x.mean(0)) / gamma
        x0 = x0 - alpha * gamma * u
        x[:] = x0

    for step in range(STEPS):
        for i in range(workers):
            x[i] += own[i].change(x[i], gradient(i, step, x[i]), rate(step))
        if (step + 1) % period == 0:
            exchange(rate(step))
    befores = x.copy()
    exchange(rate(STEPS - 1))
    assert_found(trained(fs.SlowMo(period, alpha, beta), workers), befores, x0)


def test_adacomm_with_a_falling_rate():
    """Wang and Joshi 2018: τ_j = ⌈√(η_0 F_j / (η_j F_0)) τ_0⌉ every 3 s, and half of the last where
    that does not shrink, unless the rate has changed.
    """
    workers, first, interval = 4, 4, 3.0
    x, own = np.tile(START, (workers, 1)), [Optimizer(0.0, 0.0) for _ in range(workers)]
    tau, since, losses, ends, periods = first, 0, [], interval, []
    f0 = eta0 = last = None
    for step in range(STEPS):
        losses.append(np.mean([loss(i, step, x[i]) for i in range(workers)]))
        for i in range(workers):
            x[i] += own[i].change(x[i], gradient(i, step, x[i]), rate(step))
        since += 1
        if since == tau:
            x[:] = x.mean(0)
            f, eta, now = np.mean(losses), rate(step), step + 1.0  # a second a step
            since, losses = 0, []
            if f0 is None:
                f0, eta0, last = f, eta, eta
            if now >= ends:
                wished = math.ceil(math.sqrt(eta0 * f / (eta * f0)) * first)
                tau = max(1, tau // 2 if eta == last and wished >= tau else wished)
                last = eta
                ends = interval * (now // interval + 1)
        periods.append(tau)
    strategy = fs.AdaComm(first, interval)
    found = trained(
        strategy, workers, momentum=0.0, decay=0.0, note=lambda worker: worker.state.period
    )
    assert_found(found, x, x.mean(0))
    assert [notes for *_, notes in found] == [periods] * workers
    assert any(after > before for before, after in pairwise(periods))
    assert any(after < before for before, after in pairwise(periods))


def groups_of(workers, count):
    return np.split(np.arange(workers), count)


def mean_in(groups, values):
    for members in groups:
        values[members] = values[members].mean(0)


@pytest.mark.parametrize("momentum", ["keep", "reset", "average"])
@pytest.mark.parametrize("household_period", [1, 2])
def test_households_on_three_levels(momentum, household_period):
    """Eight workers, four households, two neighbourhoods: periods of 1 or 2, 4 and 8."""
    workers, houses, streets = 8, groups_of(8, 4), groups_of(8, 2)
    x, v = np.tile(START, (workers, 1)), np.zeros((workers, SIZE))
    for step in range(STEPS):
        g = np.stack([gradient(i, step, x[i]) for i in range(workers)])
        if household_period == 1:
            mean_in(houses, g)
        v = MOMENTUM * v + g + DECAY * x
        x = x - rate(step) * v
        due = None
        if (step + 1) % 8 == 0:
            due = [np.arange(workers)]
        elif (step + 1) % 4 == 0:
            due = streets
        elif household_period > 1 and (step + 1) % household_period == 0:
            due = houses
        if due is not None:
            mean_in(due, x)
            if momentum == "reset":
                v[:] = 0
            elif momentum == "average":
                mean_in(due, v)
    strategy = fs.Households(
        4, 8, household_period, neighbourhoods=2, neighbourhood_period=4, momentum=momentum
    )
    assert_found(trained(strategy, workers), x, x.mean(0))


def test_households_send_changes_through_a_codec_on_every_level():
    """The two largest of five elements travel; what does not is remembered, at each level apart.
    Changes count from where the members of a group were last equal.
    """
    workers, kept = 8, 2
    levels = [(8, groups_of(8, 1)), (4, groups_of(8, 2)), (2, groups_of(8, 4))]
    x = np.tile(START, (workers, 1))
    start, unsent = [x.copy() for _ in levels], [np.zeros_like(x) for _ in levels]
    own = [Optimizer() for _ in range(workers)]

    def average(place):
        change = x - start[place] + unsent[place]
        smaller = np.argsort(np.abs(change), axis=1)[:, :-kept]
        message = change.copy()
        np.put_along_axis(message, smaller, 0.0, axis=1)
        unsent[place] = change - message
        mean_in(levels[place][1], message)
        x[:] = start[place] + message
        for inner in range(place, len(levels)):  # they are equal now as well
            start[inner] = x.copy()

    for step in range(STEPS):
        for i in range(workers):
            x[i] += own[i].change(x[i], gradient(i, step, x[i]), rate(step))
        due = [place for place, (period, _) in enumerate(levels) if (step + 1) % period == 0]
        if due:
            average(due[0])
    befores = x.copy()
    average(0)
    strategy = fs.Households(
        4, 8, 2, neighbourhoods=2, neighbourhood_period=4, codec=fs.TopK(kept / SIZE)
    )
    found = trained(strategy, workers)
    assert_found(found, befores, x[0])
    assert not np.allclose(befores.mean(0), x[0])
