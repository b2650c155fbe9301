"""Complete communication without a server, push-sum, and gossip with one peer at a time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.strategies.harness import Vector, assert_same, distributed, drive, sgd
from tests.strategies.test_printed_peers import (
    START,
    STEPS,
    Optimizer,
    assert_found,
    gradient,
    in_turns,
    rate,
    trained,
)

import flockstep as fs
from flockstep.strategies._compressed import written
from flockstep.strategies._topology import GRAPHS, bipartite_peers, distance_in_turn

few = settings(max_examples=15, deadline=None)
ONE_PEER = "one_peer_exponential"


def changes(x, own, step):
    return np.stack(
        [own[i].change(x[i], gradient(i, step, x[i]), rate(step)) for i in range(len(x))]
    )


# --- every change to every other ------------------------------------------------------------------


@pytest.mark.parametrize("workers", [4, 8])
def test_all_to_all(workers):
    """Viviani et al., Fig. 3, one worker after the other: its change goes to all, who apply it
    after their own next step; the last to end bring what is left together.
    """
    x, inbox, steps = [START] * workers, [np.zeros_like(START)] * workers, [0] * workers
    own, turns = [Optimizer() for _ in range(workers)], in_turns(workers)
    for i in turns:
        change = own[i].change(x[i], gradient(i, steps[i], x[i]), rate(steps[i]))
        steps[i] += 1
        x[i] = x[i] + change + inbox[i]
        inbox = [box if j != i else 0 * box for j, box in enumerate(inbox)]
        inbox = [box + change if j != i else box for j, box in enumerate(inbox)]
    after = [x[i] + inbox[i] for i in range(workers)]
    assert all(np.allclose(each, after[0], rtol=1e-12) for each in after)
    assert_found(trained(fs.AllToAllSGD(), workers, turns), x, after[0])


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.8, 0.3)])
def test_all_to_all_without_staleness_is_synchronous(workers, momentum, decay):
    """All compute at the same x, which gains the sum of their changes."""
    x, own = np.tile(START, (workers, 1)), [Optimizer(momentum, decay) for _ in range(workers)]
    for step in range(STEPS):
        x = x + changes(x, own, step).sum(0)
    found = trained(fs.AllToAllSGD(0), workers, momentum=momentum, decay=decay)
    assert_found(found, x, x[0])


def test_without_staleness_it_is_sync_sgd_at_as_many_times_the_rate_as_there_are_workers():
    options = {"compute": fs.Compute(jitter=0.7)}
    ours = distributed(fs.AllToAllSGD(0), lr=0.02, options=options)
    assert_same(ours, distributed(fs.SyncSGD(), lr=0.08), 1e-9)


CODECS = [None, fs.TopK(0.3), fs.OneBit(), fs.QSGD(4), fs.RandomK(0.5), fs.Int8()]


@few
@given(
    staleness=some.sampled_from([None, 0, 1, 3]),
    codec=some.sampled_from(CODECS),
    workers=some.integers(2, 6),
    jitter=some.floats(0, 2),
    latency=some.sampled_from([0.0, 1e-4, 0.3]),
    loss=some.sampled_from([0.0, 0.3]),
    seed=some.integers(0, 1000),
)
def test_replicas_are_equal_once_all_is_delivered(
    staleness, codec, workers, jitter, latency, loss, seed
):
    """Whatever the speeds, the network and the order; with a codec, too. What the network loses is
    sent again. Each worker's own view, before they meet to agree on the bits.
    """
    steps, lr = 7, 0.1
    draw = torch.Generator().manual_seed(seed)
    gradients = torch.randn(workers, steps, 6, dtype=torch.float64, generator=draw)

    def program(comm):
        strategy = fs.AllToAllSGD(staleness, codec)
        worker = drive(comm, strategy, torch.ones(6, dtype=torch.float64), gradients[comm.rank], lr)
        comm.barrier()
        arrived = worker.state.mailboxes[comm.rank].read()
        unsent = 0.0 if codec is None or not codec.feeds_back else worker.state.memory.error
        delivered = worker.model.x.detach() + arrived
        return delivered, unsent, worker.finish().x.detach().clone()

    found = fs.launch(
        program,
        workers,
        seed=seed,
        network=fs.Network(latency, 1e9, loss=loss),
        compute=fs.Compute(0.1, jitter=jitter, slow={0: 4.0}),
    )
    for delivered, _, finished in found:
        assert torch.allclose(delivered, found[0][0], rtol=1e-12, atol=1e-14)
        assert torch.allclose(finished, delivered, rtol=1e-12, atol=1e-14)
        assert torch.equal(finished, found[0][2])
    if codec is None or codec.feeds_back:
        # The start and all changes, less what codecs still remember: nothing is lost.
        whole = 1 - lr * gradients.sum((0, 1)) - sum(unsent for _, unsent, _ in found)
        assert torch.allclose(found[0][0], whole, rtol=1e-9, atol=1e-12)


def test_one_message_goes_to_all_and_costs_its_own_bytes():
    steps, workers, codec = 6, 4, fs.TopK(0.25)

    def program(comm):
        start = torch.zeros(16, dtype=torch.float64)
        gradients = torch.arange(steps * 16.0, dtype=torch.float64).view(steps, 16)
        worker = drive(comm, fs.AllToAllSGD(codec=codec), start, gradients + comm.rank)
        return comm.meter.bytes_sent, worker.model.x.detach().clone()

    for nbytes, _ in fs.launch(program, workers):
        assert nbytes == steps * (workers - 1) * codec.nbytes(16, 8)


def test_a_message_that_was_written_is_given_again():
    tensor, codec = torch.linspace(-1, 1, 300), fs.QSGD(4)
    memory = codec.memory(tensor)
    again = written(codec, codec.encode(tensor, memory))
    assert torch.equal(again.encode(tensor, memory), again.encode(2 * tensor))
    assert not torch.equal(codec.encode(tensor, memory), codec.encode(tensor, memory))
    assert again == codec
    decoded = codec.decode(again.encode(tensor), tensor)
    assert torch.equal(again.decode(again.encode(tensor), tensor), decoded)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_clock_is_further_ahead_than_the_bound(staleness):
    """As with StaleSync: at any moment some may have finished one more than the bound."""

    def program(comm):
        leads, gaps = [], []
        model = Vector(torch.zeros(2))
        worker = fs.Worker(comm, model, sgd(model), fs.AllToAllSGD(staleness))
        for _ in range(20):
            clocks = worker.state.clocks.read()
            leads.append(worker.steps - int(clocks.min()))
            gaps.append(int(clocks.max() - clocks.min()))
            comm.elapse(9.0 if comm.rank == 1 else 0.1)
            clocks = worker.state.clocks.read()
            gaps.append(int(clocks.max() - clocks.min()))
            worker.step(0.0)
        comm.barrier()
        worker.finish()
        return max(leads), max(gaps)

    compute = fs.Compute(1.0, jitter=0.5)
    leads, gaps = zip(*fs.launch(program, 4, seed=1, compute=compute), strict=True)
    assert max(leads) == staleness
    assert max(gaps) == staleness + 1


def test_without_a_bound_nobody_waits_for_a_slow_worker():
    def program(comm):
        model = Vector(torch.zeros(2))
        worker = fs.Worker(comm, model, sgd(model), fs.AllToAllSGD())
        for _ in range(10):
            worker.step(0.0)
        return comm.now()

    compute = fs.Compute(1.0, slow={0: 10})
    told = fs.launch(program, 3, network=fs.Network.preset("ideal"), compute=compute)
    assert told == [100, 10, 10]


def test_an_update_is_stale_by_the_updates_that_came_during_its_step():
    """Steps of 3 s, and of 1 s: three updates come while the slow one computes. The fast one gets
    one update in its third step, sixth, and so on.
    """

    def program(comm):
        model = Vector(torch.zeros(2))
        worker = fs.Worker(comm, model, sgd(model), fs.AllToAllSGD())
        comm.elapse(0.5 * comm.rank)
        for _ in range(6 if comm.rank else 2):
            worker.step(0.0)
        meter = comm.meter
        return meter.staleness_counts, meter.staleness_count, meter.staleness_max

    compute = fs.Compute(1.0, slow={0: 3})
    slow, fast = fs.launch(program, 2, network=fs.Network.preset("ideal"), compute=compute)
    assert slow == ([0, 0, 1, 1], 2, 3)  # those at 1.5 and 2.5 s, then at 3.5, 4.5 and 5.5 s
    assert fast == ([4, 2], 6, 1)


def test_staleness_is_reported():
    result = fs.run(
        "digits-mlp", fs.AllToAllSGD(), workers=4, epochs=1, measure="staleness", lr=0.02
    )
    assert 2 < result.history[-1].staleness_mean < 4


# --- push-sum -------------------------------------------------------------------------------------


def pushed(workers, distances, peers, drops=frozenset()):
    """Assran et al. 2019, Algorithm 1, all of its numbers after each step: z and w of everybody.
    `drops` are messages (step, sender, receiver) that do not arrive.
    """
    x, w = np.tile(START, (workers, 1)), np.ones(workers)
    own, seen = [Optimizer() for _ in range(workers)], []
    for step in range(STEPS):
        z = x / w[:, None]
        x = x + changes(z, own, step) * w[:, None]  # weights are one unless something is lost
        p = np.eye(workers) / (peers + 1)
        for n in range(peers):
            distance = distances[(step + n) % len(distances)]
            for sender in range(workers):
                receiver = (sender + distance) % workers
                arrives = (step, sender, receiver) not in drops
                p[receiver, sender] += arrives / (peers + 1)
        x, w = p @ x, p @ w
        seen.append(w.copy())
    return x, w, seen


SGP_CASES = [
    (4, "exponential", 1, [1, 2]),
    (8, "exponential", 1, [1, 2, 4]),
    (8, "exponential", 2, [1, 2, 4]),
    (5, "exponential", 3, [1, 2, 4]),
    (4, "ring", 1, [1]),
    (4, "complete", 1, [1, 2, 3]),
    (8, "complete", 7, [1, 2, 3, 4, 5, 6, 7]),
]


@pytest.mark.parametrize(("workers", "graph", "peers", "distances"), SGP_CASES)
def test_sgp(workers, graph, peers, distances):
    x, w, _ = pushed(workers, distances, peers)
    found = trained(fs.SGP(graph, peers), workers, note=lambda worker: worker.state.weight)
    assert_found(found, x / w[:, None], x.sum(0) / w.sum())
    for weights in zip(*(notes for *_, notes in found), strict=True):
        assert sum(weights) == pytest.approx(workers, rel=1e-12)


def lose(worker, is_lost):
    """From now on the network loses messages that may be lost: those of (step, sender, receiver)
    for which `is_lost` says so.
    """
    comm = worker.comm
    recv = comm.recv

    def try_to(tensor, peer, *, may_be_lost=False, **how):
        recv(tensor, peer, may_be_lost=may_be_lost, **how)
        if may_be_lost and is_lost(worker.steps, peer, comm.rank):
            raise fs.MessageLost(f"from rank {peer}")
        return tensor

    comm.recv = try_to


@pytest.mark.parametrize(("workers", "peers", "distances"), [(4, 1, [1, 2]), (8, 2, [1, 2, 4])])
def test_sgp_goes_on_without_messages_that_are_lost(workers, peers, distances):
    """x and w are lost alike: what is left of them is worked out in NumPy."""
    draw = np.random.default_rng(1)
    drops = set()
    for step, sender, n in draw.integers([1, 0, 0], [STEPS, workers, peers], (12, 3)).tolist():
        distance = distances[(step + n) % len(distances)]
        drops.add((step, sender, (sender + distance) % workers))
    x, w, seen = pushed(workers, distances, peers, drops)

    def note(worker):
        if worker.steps == 1:
            lose(worker, lambda *message: message in drops)
        return worker.state.weight

    found = trained(fs.SGP(peers=peers), workers, note=note)
    assert_found(found, x / w[:, None], x.sum(0) / w.sum())
    assert w.sum() < workers - 1
    for step, weights in enumerate(zip(*(notes for *_, notes in found), strict=True)):
        assert list(weights) == pytest.approx(seen[step].tolist(), rel=1e-12)


def test_a_thousand_lost_messages_leave_a_mean_of_what_all_have():
    """Of three messages one arrives. Weights have long left what single precision can hold."""
    workers, steps = 4, 500

    def program(comm):
        model = Vector(torch.zeros(2))
        worker = fs.Worker(comm, model, sgd(model, 0.0), fs.SGP())
        with worker.changing_parameters(), torch.no_grad():
            model.x.copy_(torch.tensor([float(comm.rank), 1.0]))
        lose(worker, lambda step, sender, receiver: (step + receiver) % 3)
        for _ in range(steps):
            worker.step(0.0)
        return model.x.detach().clone(), worker.state.lifts, worker.finish().x.detach().clone()

    found = fs.launch(program, workers, network=fs.Network.preset("ideal"))
    for x, lifts, finished in found:
        assert 0 < x[0] < workers - 1  # all have the same, a weighted mean
        assert x[1] == pytest.approx(1, rel=1e-4)
        assert lifts > 3
        assert torch.allclose(finished, found[0][0], rtol=1e-4)


def test_over_a_network_that_loses_messages_weights_shrink_and_models_stay_means():
    """A tenth of the messages is lost, and half of each one's weight was on its way."""
    workers, steps = 8, 30

    def program(comm):
        model = Vector(torch.zeros(2, dtype=torch.float64))
        worker = fs.Worker(comm, model, sgd(model, 0.0), fs.SGP())
        with worker.changing_parameters(), torch.no_grad():
            model.x.copy_(torch.tensor([comm.rank, 1.0]))
        for _ in range(steps):
            worker.step(0.0)
        return worker.state.weight, model.x.tolist(), worker.finish().x.tolist()

    network = fs.Network(1e-3, 1e9, loss=0.1)
    weights, models, finished = zip(*fs.launch(program, workers, network=network), strict=True)
    assert 0.5 < sum(weights) / (workers * 0.95**steps) < 2
    for (place, one), (place_after, one_after) in zip(models, finished, strict=True):
        assert one == pytest.approx(1, rel=1e-12)
        assert one_after == pytest.approx(1, rel=1e-12)
        assert 2 < place < 5 and 2 < place_after < 5


@pytest.mark.parametrize("strategy", [fs.SGP(), fs.DPSGD(ONE_PEER)], ids=repr)
def test_it_learns_over_a_network_that_loses_messages(strategy):
    how = {"workers": 4, "epochs": 2, "lr": 0.05}
    lossy = fs.run("digits-mlp", strategy, network=fs.Network(1e-3, 1e8, loss=0.1), **how)
    whole = fs.run("digits-mlp", strategy, network=fs.Network(1e-3, 1e8), **how)
    accuracy = whole.metrics["test_accuracy"]
    assert accuracy > 0.8
    assert lossy.metrics["test_accuracy"] == pytest.approx(accuracy, abs=0.05)


@few
@given(
    workers=some.integers(2, 7),
    graph=some.sampled_from(["exponential", "ring", "complete"]),
    peers=some.integers(1, 3),
    codec=some.sampled_from([None, fs.Float16(), fs.TopK(0.5)]),
    seed=some.integers(0, 1000),
)
def test_pushing_preserves_the_mean_and_brings_replicas_together(
    workers, graph, peers, codec, seed
):
    """On any graph, with any speeds; nobody waits in a circle."""
    peers = min(peers, len(GRAPHS[graph](workers)))

    def program(comm):
        model = Vector(torch.zeros(3, dtype=torch.float64))
        worker = fs.Worker(comm, model, sgd(model, 0.0), fs.SGP(graph, peers, codec=codec))
        draw = torch.Generator().manual_seed(seed + comm.rank)
        with worker.changing_parameters(), torch.no_grad():
            model.x.copy_(torch.randn(3, dtype=torch.float64, generator=draw))
        before = model.x.detach().clone()
        for _ in range(24):
            worker.step(0.0)
        return before, model.x.detach().clone(), worker.finish().x.detach().clone()

    before, x, after = map(
        torch.stack,
        zip(*fs.launch(program, workers, seed=seed, compute=fs.Compute(jitter=0.5)), strict=True),
    )
    assert torch.allclose(after, before.mean(0).expand_as(after), rtol=1e-9, atol=1e-12)
    assert (x - x.mean(0)).abs().max() < 0.5 * (before - before.mean(0)).abs().max()


@pytest.mark.parametrize(("workers", "distances"), [(4, [1, 2]), (8, [1, 2, 4])])
def test_sgp_through_a_codec(workers, distances):
    """Taheri et al. 2020, with one copy for each distance: the two largest of five differences are
    told, and x gains half of what the copies differ by.
    """
    z = np.tile(START, (workers, 1))
    copies = {distance: z.copy() for distance in distances}
    own = [Optimizer() for _ in range(workers)]
    for step in range(STEPS):
        z = z + changes(z, own, step)
        distance = distances[step % len(distances)]
        difference = z - copies[distance]
        smaller = np.argsort(np.abs(difference), axis=1)[:, :-2]
        np.put_along_axis(difference, smaller, 0.0, axis=1)
        copies[distance] = copies[distance] + difference
        z = z + (np.roll(copies[distance], distance, axis=0) - copies[distance]) / 2
    found = trained(fs.SGP(codec=fs.TopK(0.4)), workers)
    assert_found(found, z, z.mean(0))


def test_more_peers_than_distances_are_refused():
    def program(comm):
        model = Vector(torch.zeros(2))
        fs.Worker(comm, model, sgd(model), fs.SGP("ring", peers=2))

    with pytest.raises(fs.InvalidField, match=r"'peers' must be at most 1, with 'ring' and 4 work"):
        fs.launch(program, 4)


# --- one peer at a time ---------------------------------------------------------------------------


def test_the_peers_of_turns_are_powers_of_two_away():
    assert [distance_in_turn(turn, 8) for turn in range(7)] == [1, 2, 4, 1, 2, 4, 1]
    assert [distance_in_turn(turn, 9) for turn in range(5)] == [1, 2, 4, 8, 1]
    assert [distance_in_turn(turn, 2) for turn in range(2)] == [1, 1]


@pytest.mark.parametrize("workers", [2, 4, 6, 10, 16])
def test_among_an_even_number_active_workers_have_different_peers_at_each_turn(workers):
    peers = [bipartite_peers(rank, workers) for rank in range(0, workers, 2)]
    for turn in zip(*peers, strict=True):
        assert sorted(turn) == list(range(1, workers, 2))


@pytest.mark.parametrize("workers", [3, 5, 9, 13])
def test_among_an_odd_number_everybody_has_a_peer_of_the_other_kind(workers):
    for rank in range(0, workers, 2):
        peers = bipartite_peers(rank, workers)
        assert peers and all(peer % 2 for peer in peers)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("strategy", [fs.DPSGD(ONE_PEER), fs.SGP()], ids=repr)
def test_a_power_of_two_has_the_exact_mean_after_log2_steps_without_gradients(strategy, workers):
    """Ying et al. 2021, Lemma 1."""

    def program(comm):
        model = Vector(torch.zeros(1, dtype=torch.float64))
        worker = fs.Worker(comm, model, sgd(model, 0.0), strategy)
        with worker.changing_parameters(), torch.no_grad():
            model.x.fill_(comm.rank**2)
        for _ in range(workers.bit_length() - 1):
            before = model.x.item()
            worker.step(0.0)
        return before, model.x.item()

    mean = sum(rank**2 for rank in range(workers)) / workers
    befores, afters = zip(*fs.launch(program, workers, compute=fs.Compute(jitter=0.5)), strict=True)
    assert set(befores) != {mean}
    assert set(afters) == {mean}


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("order", ["printed", "after_step"])
def test_d_psgd_with_one_peer(workers, order):
    """Ying et al. 2021: x_i ← (x_i + x_j)/2, j = i + 2^(t mod τ)."""
    x, own = np.tile(START, (workers, 1)), [Optimizer() for _ in range(workers)]
    for step in range(STEPS):
        ahead = [1, 2, 4][step % (workers.bit_length() - 1)]

        def mixed(values, ahead=ahead):
            return (values + np.roll(values, -ahead, axis=0)) / 2

        step_changes = changes(x, own, step)
        x = mixed(x) + step_changes if order == "printed" else mixed(x + step_changes)
    assert_found(trained(fs.DPSGD(ONE_PEER, order), workers), x, x.mean(0))


@pytest.mark.parametrize(
    ("workers", "order", "pull"),
    [(4, "printed", 0.2), (4, "after_step", 0.5), (8, "after_step", 0.2)],
)
def test_ad_psgd_with_one_peer_and_an_elastic_pull(workers, order, pull):
    """Active workers take 1, 3, 5 ranks ahead in turn; d = β(x_i − x_j) goes from one to the
    other.
    """
    hops = {4: [1, 3], 8: [1, 3, 5]}[workers]
    x, begun, steps = [START] * workers, [START] * workers, [0] * workers
    own = [Optimizer() for _ in range(workers)]
    for i in (turns := in_turns(workers)):
        change = own[i].change(begun[i], gradient(i, steps[i], begun[i]), rate(steps[i]))
        j = (i + hops[steps[i] % len(hops)]) % workers
        steps[i] += 1
        is_active = i % 2 == 0
        if order == "after_step" or not is_active:
            x[i] = x[i] + change
        if is_active:
            d = pull * (x[i] - x[j])
            x[i], x[j] = x[i] - d, x[j] + d
        if order == "printed" and is_active:
            x[i] = x[i] + change
        begun[i] = x[i]
    found = trained(fs.ADPSGD(ONE_PEER, order, pull=pull), workers, turns)
    assert_found(found, begun, np.mean(x, axis=0))


def test_gossip_in_turn_goes_to_powers_of_two_ahead():
    sent, workers = Counter(), 8

    def program(comm):
        model = Vector(torch.zeros(2))
        worker = fs.Worker(comm, model, sgd(model), fs.GoSGD(1.0, peers="exponential"))
        for place, box in enumerate(worker.state.mailboxes):
            add = box.add
            box.add = lambda *what, add=add, place=place, **how: (
                sent.update([(place - comm.rank) % workers]) or add(*what, **how)
            )
        for _ in range(6):
            worker.step(0.0)
        worker.finish()

    fs.launch(program, workers)
    assert sent == {1: 2 * workers, 2: 2 * workers, 4: 2 * workers}


# --- on every backend -----------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize(
    "strategy",
    [fs.AllToAllSGD(), fs.AllToAllSGD(1, fs.TopK(0.3)), fs.SGP(), fs.SGP(codec=fs.TopK(0.5))],
    ids=repr,
)
def test_nothing_is_lost_wherever_workers_run(strategy, launch):
    """All changes are in the outcome: their sum, or their mean over the workers; with error memory,
    but for what that still holds.
    """
    steps, workers, lr = 9, 3, 0.1
    draw = torch.Generator().manual_seed(5)
    gradients = torch.randn(workers, steps, 6, dtype=torch.float64, generator=draw)

    def program(comm):
        worker = drive(comm, strategy, torch.ones(6, dtype=torch.float64), gradients[comm.rank], lr)
        memory = getattr(worker.state, "memory", None)
        unsent = torch.zeros(6) if memory is None else memory.error
        return worker.finish().x.detach().clone(), unsent

    told = launch(program, workers)
    change = -lr * gradients.sum((0, 1)) - sum(unsent for _, unsent in told)
    if isinstance(strategy, fs.SGP):
        change /= workers
    for after, _ in told:
        assert torch.allclose(after, 1 + change, rtol=1e-9, atol=1e-12)
        assert torch.equal(after, told[0][0])
