"""Laws that methods obey whatever the numbers, as property tests."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.strategies.harness import Vector, distributed, drive, sgd

import flockstep as fs
from flockstep.strategies._topology import (
    GRAPHS,
    bipartite_neighbours,
    edges_of,
    metropolis_weights,
    neighbours_of,
)

few = settings(max_examples=25, deadline=None)


@few
@given(
    workers=some.integers(2, 6),
    probability=some.floats(0, 1),
    steps=some.integers(1, 12),
    jitter=some.floats(0, 1),
    seed=some.integers(0, 1000),
)
def test_the_weights_of_gossip_sum_to_one_messages_in_flight_included(
    workers, probability, steps, jitter, seed
):
    def program(comm):
        start = torch.tensor([float(seed % 7), 1.0], dtype=torch.float64)
        model = Vector(start)
        worker = fs.Worker(comm, model, sgd(model, 0.0), fs.GoSGD(probability))
        with worker.changing_parameters(), torch.no_grad():
            model.x[0] = comm.rank
        told = []
        for _ in range(steps):
            worker.step(0.0)
            # A moment at which nothing moves: what workers hold, and what lies in mailboxes.
            comm.barrier()
            box = worker.state.mailboxes[comm.rank].read()
            told.append(
                [
                    worker.state.weight + float(box[-1]),
                    *(model.x.detach() * worker.state.weight + box[:-1]),
                ]
            )
            comm.barrier()
        return torch.tensor(told, dtype=torch.float64)

    totals = sum(fs.launch(program, workers, seed=seed, compute=fs.Compute(jitter=jitter)))
    assert torch.allclose(totals[:, 0], torch.ones(steps, dtype=torch.float64), rtol=1e-12)
    # So the weighted sum of all parameters stays where it was: gradients are zero here.
    assert torch.allclose(totals[:, 1], totals.new_full((steps,), (workers - 1) / 2), rtol=1e-12)


@few
@given(graph=some.sampled_from(sorted(GRAPHS)), workers=some.integers(2, 20))
def test_graphs_are_connected_and_their_weights_are_doubly_stochastic(graph, workers):
    edges = edges_of(graph, workers)
    assert len(set(edges)) == len(edges)
    weights = torch.zeros(workers, workers, dtype=torch.float64)
    for rank in range(workers):
        for other, weight in metropolis_weights(rank, edges).items():
            weights[rank, other] = weight
    assert torch.equal(weights, weights.T)
    assert (weights.sum(1) <= 1 + 1e-12).all()
    reached = {0}
    for _ in range(workers):
        reached |= {other for rank in reached for other in neighbours_of(rank, edges)}
    assert len(reached) == workers


@pytest.mark.parametrize("workers", range(2, 18))
@pytest.mark.parametrize("graph", sorted(GRAPHS))
def test_active_and_passive_workers_meet_over_even_and_odd_ranks_alone(graph, workers):
    """Every pair at one of the graph's distances, either way around the circle, if one of them is
    even and the other odd: 1; 1 and 1 + 2^k; or all.
    """
    distances = {
        "ring": {1},
        "exponential": {1, 3, 5, 9, 17},
        "complete": set(range(1, workers)),
    }[graph]
    expected = {
        (one, other)
        for one in range(workers)
        for other in range(workers)
        if (one - other) % 2 and distances & {(one - other) % workers, (other - one) % workers}
    }
    edges = {
        (rank, other)
        for rank in range(workers)
        for other in bipartite_neighbours(graph, rank, workers)
    }
    assert edges == expected
    assert all({one % 2, other % 2} == {0, 1} for one, other in edges)

    reached = {0}
    for _ in range(workers):
        reached |= {other for rank, other in edges if rank in reached}
    assert len(reached) == workers


@few
@given(
    strategy=some.sampled_from(
        [
            make(graph, order)
            for make in (fs.DPSGD, fs.ADPSGD)
            for graph in GRAPHS
            for order in ("printed", "after_step")
        ]
    ),
    workers=some.integers(2, 9),
    seed=some.integers(0, 1000),
)
def test_mixing_preserves_the_mean(strategy, workers, seed):
    def program(comm):
        model = Vector(torch.zeros(3, dtype=torch.float64))
        worker = fs.Worker(comm, model, sgd(model, 0.0), strategy)
        draw = torch.Generator().manual_seed(seed + comm.rank)
        with worker.changing_parameters(), torch.no_grad():
            model.x.copy_(torch.randn(3, dtype=torch.float64, generator=draw))
        before = model.x.detach().clone()
        for _ in range(5):
            model.x.grad = None
            worker.step(0.0)
        return before, worker.finish().x.detach().clone(), model.x.detach().clone()

    told = fs.launch(program, workers, seed=seed, compute=fs.Compute(jitter=0.5))
    mean = torch.stack([before for before, *_ in told]).mean(0)
    for _, after, _ in told:
        assert torch.allclose(after, mean, rtol=1e-12, atol=1e-12)


SERVED = [
    fs.Hogwild(),
    fs.AsyncSGD(),
    fs.AsyncSGD(momentum=0.5),
    fs.Downpour(3, 2),
    fs.Downpour(1, 4),
    fs.StaleSync(0),
    fs.StaleSync(2),
]


@few
@given(strategy=some.sampled_from(SERVED), workers=some.integers(2, 5), seed=some.integers(0, 1000))
def test_complete_communication_ends_in_equal_replicas(strategy, workers, seed):
    """All changes are delivered: every replica is the start plus the sum of them, whatever the
    order.
    """
    steps = 7
    draw = torch.Generator().manual_seed(seed)
    gradients = torch.randn(workers, steps, 4, dtype=torch.float64, generator=draw)

    def program(comm):
        worker = drive(
            comm, strategy, torch.zeros(4, dtype=torch.float64), gradients[comm.rank], lr=0.1
        )
        return worker.finish().x.detach().clone()

    replicas = fs.launch(program, workers, seed=seed, compute=fs.Compute(jitter=0.7))
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)
    if not getattr(strategy, "momentum", 0):
        assert torch.allclose(replicas[0], -0.1 * gradients.sum((0, 1)), rtol=1e-9, atol=1e-12)


@few
@given(
    staleness=some.integers(0, 4),
    workers=some.integers(2, 6),
    jitter=some.floats(0, 2),
    slow=some.floats(1, 8),
    seed=some.integers(0, 1000),
)
def test_the_bound_of_staleness_is_never_broken(staleness, workers, jitter, slow, seed):
    """The clocks as all workers record them when they start a step."""

    def program(comm):
        starts = []
        model = Vector(torch.zeros(2))
        worker = fs.Worker(comm, model, sgd(model), fs.StaleSync(staleness))
        for _ in range(12):
            starts.append(comm.now())
            worker.step(0.0)
        worker.finish()
        return starts

    compute = fs.Compute(jitter=jitter, slow={0: slow})
    starts = fs.launch(program, workers, seed=seed, compute=compute)
    for step in range(12 - staleness - 1):
        # Nobody starts step k+s+1 before everybody has ended step k, that is, has come to start
        # step k+1.
        assert min(times[step + staleness + 1] for times in starts) >= max(
            times[step] for times in starts
        )


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_clock_is_ever_further_ahead_than_the_bound(staleness):
    """A worker may begin a step when it has finished at most `staleness` more than the slowest: so
    at any moment some may have finished one more than that.
    """

    def program(comm):
        leads, gaps = [], []
        model = Vector(torch.zeros(2))
        worker = fs.Worker(comm, model, sgd(model), fs.StaleSync(staleness))
        for _ in range(20):
            clocks = worker.state.clocks.read()  # as it begins its step
            leads.append(worker.steps - int(clocks.min()))
            gaps.append(int(clocks.max() - clocks.min()))
            comm.elapse(9.0 if comm.rank == 1 else 0.1)
            clocks = worker.state.clocks.read()  # while it computes
            gaps.append(int(clocks.max() - clocks.min()))
            worker.step(0.0)
        comm.barrier()  # nobody waits for who has finished: its clock goes far ahead
        worker.finish()
        return max(leads), max(gaps)

    compute = fs.Compute(1.0, jitter=0.5)
    leads, gaps = zip(*fs.launch(program, 4, seed=1, compute=compute), strict=True)
    assert max(leads) == staleness
    assert max(gaps) == staleness + 1


def test_a_bound_is_used_where_workers_differ():
    """Steps of 1 s, and of 10 s: after its third step the fast worker waits for each of the slow
    one's, and takes one more.
    """

    def program(comm):
        ends = []
        model = Vector(torch.zeros(2))
        worker = fs.Worker(comm, model, sgd(model), fs.StaleSync(3))
        for _ in range(7):
            comm.elapse(0.0)
            worker.step(0.0)
            ends.append(comm.now())
        worker.finish()
        return ends

    compute = fs.Compute(1.0, slow={0: 10})
    _, fast = fs.launch(program, 2, network=fs.Network.preset("ideal"), compute=compute)
    assert fast == [1, 2, 3, 10, 20, 30, 40]


@pytest.mark.parametrize("workers", [2, 8, 64])
@pytest.mark.parametrize("pull", [0.1, 0.5])
def test_a_swarm_settles_at_the_distance_that_theory_says(workers, pull):
    """Within 3 %: the mean over many coordinates, each a particle of its own."""
    lr, noise, coordinates, settle, measured = 0.1, 2.0, 3000, 40, 12

    def program(comm):
        draw = torch.Generator().manual_seed(comm.rank)
        model = Vector(torch.zeros(coordinates, dtype=torch.float64))
        worker = fs.Worker(comm, model, sgd(model, lr), fs.NoSync(pull))
        kept = []
        for step in range(settle + measured):
            model.x.grad = noise * torch.randn(coordinates, dtype=torch.float64, generator=draw)
            worker.step(0.0)
            if step >= settle and step % 4 == 0:
                kept.append(model.x.detach().clone())
        return torch.stack(kept)

    x = torch.stack(
        fs.launch(program, workers, network=fs.Network.preset("ideal"))[: min(workers, 8)]
    )
    distances = [(x[i] - x[j]).abs().mean() for i in range(len(x)) for j in range(i)]
    assert torch.stack(distances).mean().item() == pytest.approx(
        fs.settled_distance(pull, lr, noise), rel=0.03
    )


def test_a_swarm_that_nothing_pulls_spreads_as_theory_says():
    gradients = torch.randn(
        2, 25, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )

    def program(comm):
        start = torch.zeros(20_000, dtype=torch.float64)
        return (
            drive(comm, fs.NoSync(0), start, gradients[comm.rank], lr=0.5).model.x.detach().clone()
        )

    one, other = fs.launch(program, 2)
    assert (one - other).abs().mean().item() == pytest.approx(
        fs.growing_distance(0.5, 1.0, 25), rel=0.03
    )


@given(some.floats(0.01, 1.0))
def test_the_pull_for_a_distance_is_the_inverse_of_the_distance_for_a_pull(pull):
    assert fs.pull_within(fs.settled_distance(pull, lr=1.0, noise=1.0)) == pytest.approx(
        pull, abs=1e-9
    )


def test_the_batches_of_households_are_those_of_the_paper():
    assert fs.local_batch(128, workers=16, households=8, world_period=128) == pytest.approx(
        60.68, abs=0.01
    )
    for households, period in ((1, 7), (4, 2), (8, 128)):
        batch = fs.local_batch(128, 16, households, period)
        assert math.isclose(fs.effective_batch(batch, 16, households, period), 128)


def test_households_see_less_of_each_other_than_neighbours():
    """The spread between households grows between world averages, the one inside stays zero."""
    befores = [before for before, _ in distributed(fs.Households(2, world_period=100))]
    assert torch.equal(befores[0], befores[1])
    assert torch.equal(befores[2], befores[3])
    assert not torch.allclose(befores[0], befores[2])
