"""Every strategy through a codec: against plain NumPy, in the limit of a codec that keeps
everything, and by what codecs must not lose.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from tests.strategies.harness import (
    Vector,
    W,
    assert_same,
    distributed,
    drive,
    in_order,
    sgd,
    train,
)

import flockstep as fs
from flockstep.models import MLP
from flockstep.notation import read
from flockstep.strategies._compressed import PublicCopies

CLOSE = 1e-9
SIZE, STEPS, LR = 12, 7, 0.1
KEPT = 3  # of 12
SPARSE = fs.TopK(KEPT / SIZE)
START = np.random.default_rng(1).standard_normal(SIZE)
GRADIENTS = np.random.default_rng(2).standard_normal((W, STEPS, SIZE))


def top(x):
    """The largest by absolute value, as its paper has it."""
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x))[:KEPT]
    kept[places] = x[places]
    return kept


def trained(strategy, **how):
    """Every worker's numbers after the given gradients, before finish and after."""

    def program(comm):
        gradients = torch.from_numpy(GRADIENTS[comm.rank])
        worker = drive(comm, strategy, torch.from_numpy(START), gradients, lr=LR)
        before = worker.model.x.detach().clone()
        return before.numpy(), worker.finish().x.detach().numpy()

    return fs.launch(program, W, **how)


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert np.allclose(one, other, rtol=1e-12, atol=1e-12)


# --- limits ---------------------------------------------------------------------------------------

WITH_A_CODEC = {
    "best only": lambda codec: fs.BestOnly(3, codec=codec),
    "post-local": lambda codec: fs.PostLocalSGD(4, 3, codec),
    "adaptive": lambda codec: fs.AdaComm(3, 0.03, codec),
    "slow momentum": lambda codec: fs.SlowMo(3, codec=codec),
    "a swarm": lambda codec: fs.NoSync(0.3, codec=codec),
    "a swarm of the best": lambda codec: fs.NoSync(0.3, best=2, staleness=1, codec=codec),
    "a swarm of groups": lambda codec: fs.NoSync(0.3, best=1, groups=2, codec=codec),
    "particles": lambda codec: fs.PSOPS(3, codec=codec),
    "shared parameters": fs.Hogwild,
    "a server": lambda codec: fs.AsyncSGD(codec=codec),
    "its momentum": lambda codec: fs.AsyncSGD(0.5, True, codec=codec),
    "compensation": lambda codec: fs.AsyncSGD(delay_compensation=0.1, codec=codec),
    "a server now and then": lambda codec: fs.Downpour(3, 2, codec),
    "a bound": lambda codec: fs.StaleSync(2, codec),
    "a centre in turns": lambda codec: fs.EASGD(2, codec=codec),
    "a centre at once": lambda codec: fs.EASGD(2, mode="sync", codec=codec),
    "a centre with momentum": lambda codec: fs.EAMSGD(2, codec=codec),
    "a centre without a lock": lambda codec: fs.EAWild(2, codec=codec),
    "a centre of groups": lambda codec: fs.EAWild(2, groups=2, codec=codec),
    "neighbours": lambda codec: fs.DPSGD(codec=codec),
    "neighbours, mixed later": lambda codec: fs.DPSGD("exponential", "after_step", codec=codec),
    "pairs": lambda codec: fs.ADPSGD(codec=codec),
    "gossip": lambda codec: fs.GoSGD(0.5, codec=codec),
    "teachers": lambda codec: fs.Codistillation(2, 2, 3, codec=codec),
    "teachers of all": lambda codec: fs.Codistillation(2, 2, 3, topology="complete", codec=codec),
}


@pytest.mark.parametrize("make", WITH_A_CODEC.values(), ids=WITH_A_CODEC)
def test_a_codec_that_keeps_everything_changes_nothing_and_one_that_drops_most_does(make):
    # No two at the same moment: who comes first is then the same, whether or not there is a lock.
    options = {"compute": fs.Compute(0.1, jitter=0.5), "seed": 2}
    plain, whole, sparse = (
        distributed(make(codec), steps=9, options=options)
        for codec in (None, fs.TopK(1.0), fs.TopK(0.02))
    )
    assert_same(whole, plain, CLOSE)
    assert not torch.allclose(sparse[0][1], plain[0][1])


def test_switching_at_once_is_local_sgd_through_a_codec_and_never_is_sync_sgd():
    codec = fs.OneBit()
    assert_same(distributed(fs.PostLocalSGD(0, 3, codec)), distributed(fs.LocalSGD(3, codec=codec)))
    never = distributed(fs.PostLocalSGD(1.0, 3, codec))
    assert_same(never, distributed(fs.SyncSGD(codec=codec)))


def test_adaptive_averaging_that_never_decides_is_local_sgd_through_a_codec():
    adaptive = distributed(fs.AdaComm(4, 1e9, fs.QSGD(4)))
    assert_same(adaptive, distributed(fs.LocalSGD(4, codec=fs.QSGD(4))))


def test_slow_momentum_that_does_nothing_is_local_sgd_through_a_codec():
    slow = distributed(fs.SlowMo(3, 1.0, 0.0, fs.TopK(0.3)))
    assert_same(slow, distributed(fs.LocalSGD(3, codec=fs.TopK(0.3))), CLOSE)


# --- transcriptions -------------------------------------------------------------------------------


def test_gossip_through_a_codec_is_choco_sgd():
    """Algorithm 2 of Koloskova, Stich and Jaggi, on a ring of four: Metropolis weights of 1/3."""
    x = np.tile(START, (W, 1))
    public, gamma = x.copy(), 0.3
    for step in range(STEPS):
        x -= LR * GRADIENTS[:, step]
        public += [top(own - known) for own, known in zip(x, public, strict=True)]
        around = np.roll(public, 1, axis=0) + np.roll(public, -1, axis=0)
        x += gamma * (around - 2 * public) / 3
    strategy = fs.DPSGD(order="after_step", codec=SPARSE, gossip_rate=gamma)
    ours = trained(strategy)
    assert_close([before for before, _ in ours], x)
    assert_close([after for _, after in ours], [x.mean(0)] * W)


def test_gossip_as_printed_mixes_what_the_step_is_taken_from():
    x = np.tile(START, (W, 1))
    public, gamma = x.copy(), 0.3
    for step in range(STEPS):
        public += [top(own - known) for own, known in zip(x, public, strict=True)]
        around = np.roll(public, 1, axis=0) + np.roll(public, -1, axis=0)
        x += gamma * (around - 2 * public) / 3 - LR * GRADIENTS[:, step]
    assert_close([before for before, _ in trained(fs.DPSGD(codec=SPARSE, gossip_rate=gamma))], x)


@pytest.mark.parametrize("best", [None, 2])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_swarm_is_pulled_by_public_copies(best, staleness):
    """All losses are equal, so that the best are those of the lowest ranks."""
    x, pull, senders = np.tile(START, (W, 1)), 0.2, range(best or W)
    public, centres = x.copy(), []
    for step in range(STEPS):
        x -= LR * GRADIENTS[:, step]
        for k in senders:
            public[k] += top(x[k] - public[k])
        centres.append(public[: len(senders)].mean(0))
        if len(centres) > staleness:
            for i in range(W):
                known = public[i].copy() if i in senders else x[i].copy()
                x[i] += pull * (centres[-1 - staleness] - known)
    ours = trained(fs.NoSync(pull, best, staleness=staleness, codec=SPARSE))
    assert_close([before for before, _ in ours], x)


def test_all_follow_what_the_best_one_sends():
    """All losses are equal: rank 0 is the best, and remembers what it did not send."""
    x, common, unsent = np.tile(START, (W, 1)), START.copy(), np.zeros(SIZE)
    for step in range(6):
        x -= LR * GRADIENTS[:, step]
        if step % 2:
            unsent += x[0] - common
            sent = top(unsent)
            unsent -= sent
            common = common + sent
            x = np.tile(common, (W, 1))
    x -= LR * GRADIENTS[:, 6]
    assert_close([before for before, _ in trained(fs.BestOnly(2, codec=SPARSE))], x)


@pytest.mark.parametrize("mode", ["round_robin", "sync"])
def test_a_worker_loses_what_the_centre_gains(mode):
    x, centre, alpha = np.tile(START, (W, 1)), START.copy(), 0.2
    for step in range(STEPS):
        old = centre.copy()
        for i in range(W):
            d = top(alpha * (x[i] - (old if mode == "sync" else centre)))
            x[i] -= LR * GRADIENTS[i, step] + d
            centre += d
    ours = trained(fs.EASGD(1, alpha, mode=mode, codec=SPARSE))
    assert_close([before for before, _ in ours], x)
    assert_close([after for _, after in ours], [centre] * W)


ORDER = [0, 1, 1, 0, 2, 1, 0, 0, 2, 1]


def test_the_server_hears_changes_of_their_final_size_and_has_momentum_over_them():
    """One step at a time: u is divided by its staleness, then encoded with what was not sent, then
    joins the server's velocity.
    """
    server, velocity = START.copy(), np.zeros(SIZE)
    unsent, read_at = np.zeros((3, SIZE)), [0, 0, 0]
    for updates, rank in enumerate(ORDER):
        change = -LR * GRADIENTS[0, updates % STEPS] / max(1, updates - read_at[rank])
        unsent[rank] += change
        sent = top(unsent[rank])
        unsent[rank] -= sent
        velocity = 0.5 * velocity + sent
        server = server + velocity
        read_at[rank] = updates + 1
    gradients = [torch.from_numpy(GRADIENTS[0, place % STEPS]) for place in range(len(ORDER))]
    strategy = fs.AsyncSGD(0.5, staleness_aware=True, codec=SPARSE)
    ours = in_order(strategy, ORDER, gradients, torch.from_numpy(START), LR)
    assert_close([after.numpy() for _, after in ours], [server] * 3)


# --- laws -----------------------------------------------------------------------------------------

SERVED = [
    fs.Hogwild(SPARSE),
    fs.AsyncSGD(codec=fs.OneBit()),
    fs.Downpour(3, 2, SPARSE),
    fs.Downpour(2, 3, fs.Threshold(0.05)),
    fs.StaleSync(0, fs.RandomK(0.2)),
    fs.StaleSync(2, SPARSE),
]


@pytest.mark.parametrize("strategy", SERVED, ids=repr)
def test_what_the_server_has_not_heard_is_what_workers_remember(strategy):
    """Whoever came first: the server's parameters and all errors are the start and all changes."""

    def program(comm):
        gradients = torch.from_numpy(GRADIENTS[comm.rank])
        worker = drive(comm, strategy, torch.from_numpy(START), gradients, lr=LR)
        after = worker.finish().x.detach().numpy()
        server = getattr(worker.state, "server", worker.state)
        return after, server.memory.error.numpy()

    told = fs.launch(program, W, seed=3, compute=fs.Compute(jitter=0.7))
    unsent = sum(error for _, error in told)
    assert np.abs(unsent).max() > 1e-3
    for after, _ in told:
        assert np.allclose(after + unsent, START - LR * GRADIENTS.sum((0, 1)), rtol=1e-9)


PRESERVING = [
    fs.DPSGD(codec=SPARSE),
    fs.DPSGD("complete", "after_step", codec=fs.QSGD(2)),
    fs.ADPSGD("complete", codec=SPARSE),
    fs.ADPSGD(codec=fs.QSGD(2)),
    fs.NoSync(0.1, codec=fs.OneBit()),
]


@pytest.mark.parametrize("strategy", PRESERVING, ids=repr)
def test_mixing_through_a_codec_preserves_the_mean_of_all(strategy):
    told = trained(strategy, seed=3, compute=fs.Compute(jitter=0.7))
    expected = START - LR * GRADIENTS.sum(1).mean(0)
    assert_close([after for _, after in told], [expected] * W)


@pytest.mark.parametrize(
    "codec",
    [fs.Float16(), fs.Int8(), fs.OneBit(), fs.QSGD(1), fs.TopK(0.1), fs.RandomK(0.2)],
    ids=repr,
)
def test_a_public_copy_comes_closer_with_every_few_messages(codec):
    """Also where a codec is right on average only, and would send the copy away."""

    def program(comm):
        model = Vector(torch.zeros(400, dtype=torch.float64))
        worker = fs.Worker(comm, model, sgd(model), fs.Independent())
        public = PublicCopies.of(worker, codec, [0])
        x = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        distances = []
        for _ in range(60):
            public.hear(public.message(x, 0), 0)
            distances.append(float((x - public[0]).norm()))
        return distances

    (distances,) = fs.launch(program, 1)
    assert distances[0] < 20  # where it began
    assert distances[-1] < 0.5 * distances[0] or distances[-1] < 1e-6
    for earlier, later in zip(distances[:-20], distances[20:], strict=True):
        assert later < 1.05 * earlier + 1e-9


def test_both_ends_of_a_pair_know_the_same_and_weights_sum_to_one():
    def program(comm):
        worker, _ = train(comm, fs.GoSGD(0.7, codec=fs.TopK(0.1)), steps=9)
        comm.barrier()
        copies = worker.state.copies
        held = {i: known.read() for i, known in copies.known[comm.rank].items()}
        weight = worker.state.weight + float(copies.weights[comm.rank].read().sum())
        comm.barrier()
        return copies.told, held, weight

    told = fs.launch(program, W, seed=2, compute=fs.Compute(jitter=0.5))
    assert sum(weight for *_, weight in told) == pytest.approx(1)
    for i, (sent, *_) in enumerate(told):
        for j, copy in sent.items():
            assert torch.equal(copy, told[j][1][i])


def test_particles_share_one_copy_of_the_best():
    def program(comm):
        worker, _ = train(comm, fs.PSOPS(2, codec=fs.TopK(0.1)), steps=9)
        return worker.state.public[0]

    first, *others = fs.launch(program, W)
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, torch.zeros_like(first))


def test_codecs_of_strategies_are_read_from_text():
    text = "nosync(pull=0.1, codec=top_k(ratio=0.1))"
    assert read(fs.Strategy, text) == fs.NoSync(0.1, None, 1, 0, "loss", None, fs.TopK(0.1))


def test_a_method_through_which_nothing_travels_says_that_it_has_no_codec():
    with pytest.raises(fs.FlockstepError, match=r"'codec' must be None: workers send"):
        read(fs.Strategy, "independent(codec=one_bit)")


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "lr"), [(fs.AsyncSGD, 0.01), (fs.EAWild, 0.05)])
def test_sparse_and_asynchronous_trains_about_as_well(make, lr):
    """A twentieth of the elements: what is sent is less than a tenth."""
    how = {"workers": 4, "epochs": 3, "seed": 1, "lr": lr}
    dense, sparse = (
        fs.run("digits-mlp", make(codec=codec), **how).metrics for codec in (None, fs.TopK(0.05))
    )
    assert sparse["test_accuracy"] > dense["test_accuracy"] - 0.03
    assert dense["test_accuracy"] > 0.85
    assert sparse["bytes_sent"] < 0.6 * dense["bytes_sent"]


@pytest.mark.parametrize("make", [fs.AsyncSGD, lambda codec: fs.LocalSGD(4, codec=codec)])
def test_momentum_correction_is_refused_where_changes_are_sent(make):
    with pytest.raises(ValueError, match=r"'codec' must be one for changes: .*got TopK"):
        make(codec=fs.TopK(0.1, momentum_correction=0.9))


# --- reads of a server ----------------------------------------------------------------------------

SERVERS = {
    "shared parameters": (fs.Hogwild, 13, 0),
    "a server": (lambda codec: fs.AsyncSGD(codec=codec), 12, 0),
    "a server now and then": (lambda codec: fs.Downpour(3, 2, codec), 6, 0),
    "a bound": (lambda codec: fs.StaleSync(2, codec), 13, 2 * 12 + 2),
    "a centre": (lambda codec: fs.EAWild(3, codec=codec), 4, 0),
    "a centre in turns": (lambda codec: fs.EASGD(3, codec=codec), 4, 0),
}


@pytest.mark.parametrize(("make", "reads", "clocks"), SERVERS.values(), ids=SERVERS)
def test_a_server_sends_what_has_changed_since_a_worker_read(make, reads, clocks, monkeypatch):
    """Every byte: whole parameters in the first read and at the end, in between the elements that
    differ, messages of the codec, and clocks.
    """
    codec, seen = fs.TopK(0.02), []
    plain = fs.comm.SharedTensor.read_changes

    def spy(self, out=None):
        before = None if self._last_read is None else self._last_read.clone()
        value = plain(self, out)
        if not self.meter.paused:
            changed = 0 if before is None else int((value != before).sum())
            seen.append((self.comm.rank, changed))
        return value

    monkeypatch.setattr(fs.comm.SharedTensor, "read_changes", spy)

    def program(comm):
        worker, _ = train(comm, make(codec), steps=12)
        worker.finish()
        return comm.meter.bytes_sent, worker.flat.parameters.numel()

    told = fs.launch(program, W, compute=fs.Compute(0.1, jitter=0.5), seed=3)
    n = told[0][1]
    for rank, (nbytes, _) in enumerate(told):
        _, *changed = [count for reader, count in seen if reader == rank]
        assert len(changed) == reads - 1
        assert 0 < max(changed) < n
        reading = sum(min(8 + min(4 * k, -(-n // 8)) + 8 * k, 8 * n) for k in changed)
        pushing = (12 if reads > 11 else 4) * codec.nbytes(n, 8)
        assert nbytes == 8 * n + reading + pushing + 8 * n + clocks * 8 * W


# --- statistics of batch normalisation ------------------------------------------------------------

KEEPS_STATISTICS = {
    "local": lambda codec: fs.LocalSGD(2, codec=codec),
    "post-local": lambda codec: fs.PostLocalSGD(0, 2, codec),
    "adaptive": lambda codec: fs.AdaComm(2, 1e9, codec),
    "slow momentum": lambda codec: fs.SlowMo(2, codec=codec),
    "outer momentum": lambda codec: fs.DiLoCo(2, codec=codec),
    "households": lambda codec: fs.Households(2, 4, 2, codec=codec),
    "best only": lambda codec: fs.BestOnly(2, codec=codec),
}


@pytest.mark.parametrize("make", KEEPS_STATISTICS.values(), ids=KEEPS_STATISTICS)
def test_statistics_travel_beside_the_message_as_they_are(make):
    """At a rate of nothing parameters stay, so that statistics depend on the data alone."""

    def statistics(codec):
        def program(comm):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
            worker = fs.Worker(comm, model, sgd(model, 0.0), make(codec))
            data = torch.Generator().manual_seed(comm.rank)
            for _ in range(4):
                loss = model(torch.randn(8, 3, dtype=torch.float64, generator=data)).square().mean()
                loss.backward()
                worker.step(loss)
            worker.finish()
            return worker.flat.buffers.clone()

        return fs.launch(program, W)

    plain, coded = statistics(None), statistics(fs.OneBit())
    assert all(torch.allclose(*both, rtol=1e-12, atol=0) for both in zip(plain, coded, strict=True))
    assert not torch.allclose(plain[0], torch.tensor([0.0] * 4 + [1.0] * 4, dtype=torch.float64))


def test_one_bit_trains_a_net_with_statistics():
    """Where statistics went through the codec, too, this ended at the accuracy of a guess, and
    other runs in a loss that is not a number.
    """
    net = functools.partial(MLP, 64, 256, 10, batch_norm=True, initialisation="he")
    task = dataclasses.replace(fs.task("digits-mlp"), model=net)
    strategy = fs.LocalSGD(8, codec=fs.OneBit())
    run = fs.run(task, strategy, workers=4, epochs=6, lr=0.3, optimizer="sgd(momentum=0.9)")
    assert run.metrics["test_accuracy"] > 0.9
