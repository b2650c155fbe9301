"""Asynchronous gradients and gossip: workers take steps in a prescribed order, and the equations
are written out.
"""

from __future__ import annotations

import time

import pytest
import torch
from tests.strategies.harness import Vector, in_order, net_with_statistics, sgd, train

import flockstep as fs
from flockstep.randomness import Purpose, torch_stream
from flockstep.strategies._topology import bipartite_neighbours

ORDER = [0, 1, 1, 2, 0, 2, 2, 2, 1, 0, 0, 1, 2, 0]
DRAW = torch.Generator().manual_seed(6)
GRADIENTS = torch.randn(len(ORDER), 3, dtype=torch.float64, generator=DRAW)
START = torch.randn(3, dtype=torch.float64, generator=DRAW)
LR = 0.1


def assert_outcome(strategy, befores, after, order=ORDER, gradients=GRADIENTS):
    for rank, (found, finished) in enumerate(in_order(strategy, order, gradients, START, LR)):
        assert torch.allclose(found, befores[rank], rtol=1e-12, atol=1e-14), rank
        assert torch.allclose(finished, after, rtol=1e-12, atol=1e-14), rank


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("is_aware", [False, True])
@pytest.mark.parametrize("compensation", [0.0, 0.4])
def test_the_parameter_server(momentum, is_aware, compensation):
    x, v, read, read_at = START, 0.0, [START] * 3, [0] * 3
    for updates, (rank, gradient) in enumerate(zip(ORDER, GRADIENTS, strict=True)):
        gradient = gradient + compensation * gradient * gradient * (x - read[rank])
        change = -LR * gradient / (max(1, updates - read_at[rank]) if is_aware else 1)
        v = momentum * v + change
        x = x + v
        read[rank], read_at[rank] = x, updates + 1
    assert_outcome(fs.AsyncSGD(momentum, is_aware, compensation), read, x)


def trained_once(strategy, make_optimizer, workers=2):
    def program(comm):
        model = Vector(START)
        worker = fs.Worker(comm, model, make_optimizer(model.parameters()), strategy)
        model.x.grad = START.clone()
        worker.step(0.0)
        worker.finish()
        return comm.meter.bytes_sent

    return fs.launch(program, workers)


@pytest.mark.parametrize(
    ("make_optimizer", "name"),
    [
        (lambda p: torch.optim.Adam(p), "Adam()"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), "SGD(momentum=0.9)"),
        (lambda p: torch.optim.SGD(p, weight_decay=0.01), "SGD(weight_decay=0.01)"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop()"),
        (lambda p: fs.LARS(p, lr=0.1, momentum=0.0, weight_decay=0.0), "LARS()"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_delays_are_compensated_with_plain_sgd_alone(make_optimizer, name):
    with pytest.raises(fs.InvalidField) as raised:
        trained_once(fs.AsyncSGD(delay_compensation=0.1), make_optimizer)
    assert (
        "'optimizer' must be SGD without momentum and weight decay for 'delay_compensation' "
        f"(got '{name}')"
    ) in str(raised.value)
    trained_once(fs.AsyncSGD(), make_optimizer)
    trained_once(fs.AsyncSGD(delay_compensation=0.1), make_optimizer, workers=1)


def test_delay_compensation_costs_one_more_read():
    """An add, a read, and one read at the end, of three numbers of eight bytes."""
    for strategy, moves in ((fs.AsyncSGD(), 3), (fs.AsyncSGD(delay_compensation=0.1), 4)):
        assert trained_once(strategy, torch.optim.SGD) == [moves * 24] * 2


@pytest.mark.parametrize(("push", "fetch"), [(1, 1), (2, 3), (3, 2), (1, 4), (4, 1)])
def test_downpour_pushes_sums_and_fetches(push, fetch):
    x, own, pending, steps = START, [START] * 3, [torch.zeros_like(START)] * 3, [0] * 3
    for rank, gradient in zip(ORDER, GRADIENTS, strict=True):
        own[rank] = own[rank] - LR * gradient
        pending[rank] = pending[rank] - LR * gradient
        steps[rank] += 1
        if steps[rank] % push == 0:
            x = x + pending[rank]
            pending[rank] = torch.zeros_like(START)
        if steps[rank] % fetch == 0:
            own[rank] = x
    assert_outcome(fs.Downpour(push, fetch), own, x + sum(pending))


def test_the_last_push_of_downpour_waits_for_the_lock():
    """Rank 1 holds the lock until the tenth second; rank 0, which has a change left, finishes in
    the second one.
    """

    def program(comm):
        model = Vector(torch.zeros(2))
        worker = fs.Worker(comm, model, sgd(model, 1.0), fs.Downpour(push_period=2, fetch_period=2))
        server, seen = worker.state.value, []
        if comm.rank == 0:
            model.x.grad = torch.full((2,), -3.0)
            worker.step(0.0)
        else:
            with server.lock():
                comm.elapse(10.0)
                seen = server.read().tolist()
        return seen, worker.finish().x.tolist()

    quick = {"network": fs.Network.preset("ideal"), "compute": fs.Compute(1.0)}
    assert fs.launch(program, 2, **quick) == [([], [3.0, 3.0]), ([0.0, 0.0], [3.0, 3.0])]


def test_hogwild_reads_and_adds():
    """In the simulator a step reads when it begins: right after the worker's last one here."""
    x, read = START, [START] * 3
    for rank, gradient in zip(ORDER, GRADIENTS, strict=True):
        x = x - LR * gradient
        read[rank] = x
    assert_outcome(fs.Hogwild(), read, x)


def test_gossip_halves_weights_and_takes_weighted_means():
    """With probability one: every step empties the mailbox, then sends."""
    seed = 0
    draws = [torch_stream(Purpose.GOSSIP, seed, rank) for rank in range(3)]
    x, a, boxes = [START] * 3, [1 / 3] * 3, [[], [], []]

    def take(rank):
        for theirs, weight in boxes[rank]:
            x[rank] = (a[rank] * x[rank] + weight * theirs) / (a[rank] + weight)
            a[rank] += weight
        boxes[rank] = []

    for rank, gradient in zip(ORDER, GRADIENTS, strict=True):
        x[rank] = x[rank] - LR * gradient
        take(rank)
        torch.rand((), generator=draws[rank])
        peers = [other for other in range(3) if other != rank]
        peer = peers[int(torch.randint(2, (), generator=draws[rank]))]
        a[rank] /= 2
        boxes[peer].append((x[rank], a[rank]))
    befores = list(x)
    for rank in range(3):
        take(rank)
    assert sum(a) == pytest.approx(1)
    after = sum(weight * own for weight, own in zip(a, x, strict=True))
    for rank, (found, finished) in enumerate(in_order(fs.GoSGD(1.0), ORDER, GRADIENTS, START, LR)):
        assert torch.allclose(found, befores[rank], rtol=1e-12)
        assert torch.allclose(finished, after, rtol=1e-12)


def test_gossip_with_no_chance_is_training_alone_and_averaging_at_the_end():
    alone = [
        START - LR * sum(g for r, g in zip(ORDER, GRADIENTS, strict=True) if r == rank)
        for rank in range(3)
    ]
    assert_outcome(fs.GoSGD(0.0), alone, sum(alone) / 3)


def test_active_workers_average_with_passive_ones():
    """Even ranks are active. A passive worker computes on what it last read and adds its change
    to what it became.
    """
    order = [0, 1, 2, 3, 0, 3, 1, 2, 2, 0, 1, 3]
    draws = [torch_stream(Purpose.NEIGHBOUR, 0, rank) for rank in range(4)]
    x, read = [START] * 4, [START] * 4
    for rank, gradient in zip(order, GRADIENTS[:12], strict=True):
        x[rank] = x[rank] - LR * gradient
        if rank % 2:
            read[rank] = x[rank]
        else:
            neighbours = bipartite_neighbours("complete", rank, 4)
            peer = neighbours[int(torch.randint(len(neighbours), (), generator=draws[rank]))]
            x[rank] = x[peer] = (x[rank] + x[peer]) / 2
            read[rank] = x[rank]
    assert_outcome(fs.ADPSGD("complete"), read, sum(x) / 4, order, GRADIENTS[:12])


@pytest.mark.parametrize(
    ("graph", "neighbours"), [("ring", [1, 4]), ("exponential", [1, 2, 3, 4]), ("complete", None)]
)
def test_synchronous_mixing(graph, neighbours):
    """x ← W x − η g on five workers; all degrees are equal, so every weight is 1/(1 + degree)."""
    workers = 5
    away = neighbours or [1, 2, 3, 4]
    weights = torch.eye(workers, dtype=torch.float64)
    for distance in away:
        weights += torch.eye(workers, dtype=torch.float64).roll(distance, dims=1)
    weights /= 1 + len(away)
    gradients = torch.randn(
        6, workers, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    x = START.repeat(workers, 1)
    for gradient in gradients:
        x = weights @ x - LR * gradient

    def program(comm):
        model = Vector(START)
        worker = fs.Worker(comm, model, sgd(model, LR), fs.DPSGD(graph))
        for gradient in gradients:
            model.x.grad = gradient[comm.rank].clone()
            worker.step(0.0)
        return model.x.detach().clone(), worker.finish().x.detach().clone()

    for rank, (before, after) in enumerate(fs.launch(program, workers)):
        assert torch.allclose(before, x[rank], rtol=1e-12)
        assert torch.allclose(after, x.mean(0), rtol=1e-12)


def test_nesterov_momentum_between_elastic_pulls():
    """v ← δv − η g(x + δv), x ← x + v, on f(x) = |x|²/2 (g(y) = y); both workers pull in turn
    every second step.
    """
    delta, alpha = 0.6, 0.3
    x, v, centre = [START] * 2, [torch.zeros_like(START)] * 2, START
    for step in range(8):
        for rank in range(2):
            v[rank] = delta * v[rank] - LR * (x[rank] + delta * v[rank])
            x[rank] = x[rank] + v[rank]
            if step % 2:
                pull = alpha * (x[rank] - centre)
                x[rank], centre = x[rank] - pull, centre + pull

    def program(comm):
        model = Vector(START)
        strategy = fs.EAMSGD(2, alpha, momentum=delta, mode="round_robin", order="after_step")
        worker = fs.Worker(comm, model, sgd(model, LR), strategy)
        for _ in range(8):
            loss = model.x.square().sum() / 2
            loss.backward()
            worker.step(loss)
        ahead = model.x.detach().clone()
        return ahead, worker.finish().x.detach().clone()

    for rank, (ahead, after) in enumerate(fs.launch(program, 2)):
        # Where the next gradient is taken.
        assert torch.allclose(ahead, x[rank] + delta * v[rank], rtol=1e-12)
        assert torch.allclose(after, centre, rtol=1e-12)


def test_on_local_processes_a_model_sees_what_another_does_to_it_with_no_call(local):
    """Hogwild's parameters are the shared pages: rank 1 does nothing but look at its own model."""

    def program(comm):
        model = Vector(torch.zeros(4))
        worker = fs.Worker(comm, model, sgd(model, 1.0), fs.Hogwild())
        if comm.rank == 0:
            model.x.grad = torch.full((4,), -3.0)
            worker.step(0.0)
            seen = model.x.tolist()
        else:
            until = time.monotonic() + 60
            while model.x[3].item() == 0 and time.monotonic() < until:
                pass
            seen = model.x.tolist()
        comm.barrier()
        worker.finish()
        return seen, model.x.tolist()

    for seen, after in fs.launch(program, 2, local):
        assert seen == [3.0] * 4
        assert after == [3.0] * 4


def test_on_local_processes_no_update_of_a_server_is_lost(local):
    """Two workers at a time, hundreds of updates: the sum is exact where updates are applied one
    at a time.
    """
    steps, elements = 150, 20_000

    def program(comm):
        model = Vector(torch.zeros(elements, dtype=torch.float64))
        worker = fs.Worker(comm, model, sgd(model, 1.0), strategy)
        for _ in range(steps):
            model.x.grad = torch.full((elements,), -1.0, dtype=torch.float64)
            worker.step(0.0)
        worker.finish()
        return model.x.min().item(), model.x.max().item()

    # Of 150 steps the last two are not pushed before the end.
    for strategy in (fs.AsyncSGD(), fs.Downpour(4, 3), fs.StaleSync(2)):
        assert fs.launch(program, 3, local) == [(3.0 * steps, 3.0 * steps)] * 3, strategy


def test_a_model_with_statistics_reads_and_adds_on_local_processes_too(local):
    def program(comm):
        worker, _ = train(comm, fs.Hogwild(), make_model=net_with_statistics)
        assert not worker.state.is_direct
        model = worker.finish()
        return [tensor.clone() for tensor in model.state_dict().values()]

    for one, other in zip(*fs.launch(program, 2, local), strict=True):
        assert torch.equal(one, other)
