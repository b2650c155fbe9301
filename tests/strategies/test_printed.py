"""Methods against plain NumPy transcriptions of the printed algorithms: several workers, 20 steps,
momentum, and a learning rate that changes.

Each worker's loss on its batch t is ½(x − c)ᵀA(x − c) with an A and a c of its own, so that both
sides can compute it at any point.
"""

from __future__ import annotations

import dataclasses
import threading
from functools import partial

import numpy as np
import pytest
import torch
from tests.strategies.harness import Vector

import flockstep as fs
from flockstep.randomness import Purpose, numpy_stream, torch_stream

W, STEPS, SIZE = 4, 20, 5
RNG = np.random.default_rng(7)
START = RNG.normal(size=SIZE)
ROOTS = RNG.normal(size=(W, STEPS, SIZE, SIZE)) / 2
A = ROOTS @ ROOTS.transpose(0, 1, 3, 2) + 0.1 * np.eye(SIZE)
C = RNG.normal(size=(W, STEPS, SIZE))


def loss_of(rank, step, x):
    away = x - C[rank, step]
    return 0.5 * away @ A[rank, step] @ away


def gradient(rank, step, x):
    return A[rank, step] @ (x - C[rank, step])


def rate(step):
    """Warm-up, then a fall."""
    return 0.02 * (step + 1) if step < 5 else 0.1 if step < 12 else 0.03


class Momentum:
    """SGD with momentum as torch has it: m ← μm + g;  x ← x − ηm."""

    def __init__(self, momentum):
        self.momentum = momentum
        self.buffer = np.zeros(SIZE)

    def change(self, step, g):
        self.buffer = self.momentum * self.buffer + g
        return -rate(step) * self.buffer


IDEAL = fs.Simulator(network=fs.Network.preset("ideal"))


def trained(strategy, momentum=0.0, workers=W, backend=IDEAL, steps=STEPS, **launch):
    """Each worker's x before finish and after, and its losses."""

    def program(comm):
        model = Vector(torch.tensor(START))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
        worker = fs.Worker(comm, model, optimizer, strategy)
        indices, losses = torch.arange(workers * 5), []
        batches = worker.batches(indices, batch_size=1, epochs=-(-steps // 5), steps=steps)
        for step, _ in enumerate(batches):
            optimizer.param_groups[0]["lr"] = rate(step)

            def loss(step=step):
                return float(loss_of(comm.rank, step, model.x.detach().numpy()))

            losses.append(loss())
            x = model.x.detach().numpy()
            model.x.grad = torch.tensor(gradient(comm.rank, step, x))
            worker.step(losses[-1], accuracy=-losses[-1], again=loss)
        before = model.x.detach().clone().numpy()
        worker.finish()
        return before, model.x.detach().numpy(), losses

    return fs.launch(program, workers, backend, **launch)


def assert_as_printed(found, x, finish):
    for rank, (before, after, _) in enumerate(found):
        assert before == pytest.approx(x[rank], rel=1e-10, abs=1e-12)
        assert after == pytest.approx(finish, rel=1e-10, abs=1e-12)


# --- The elastic family ---------------------------------------------------------------------------


def test_the_pull_is_that_of_the_parameters_at_which_the_gradient_was_taken():
    """x = x̃ = 1, g = 1, η = 0.1, α = 0.5 gives 0.90, and 0.95 if the step is taken first."""

    def program(comm, strategy):
        model = Vector(torch.ones(1, dtype=torch.float64))
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        model.x.grad = torch.ones(1, dtype=torch.float64)
        worker.step(0.0)
        return model.x.item()

    for make in (
        partial(fs.EASGD, 1),
        partial(fs.EASGD, 1, mode="first_come"),
        partial(fs.EASGD, 1, mode="sync"),
        partial(fs.EAMSGD, 1, momentum=0.0),
        fs.EAWild,
        partial(fs.EAWild, groups=1),
        partial(fs.EAWild, groups=1, grouping="random"),
    ):
        printed = fs.launch(partial(program, strategy=make(alpha=0.5)), 2)
        after = fs.launch(partial(program, strategy=make(alpha=0.5, order="after_step")), 2)
        assert printed[0] == pytest.approx(0.90, rel=1e-12)
        assert after[0] == pytest.approx(0.95, rel=1e-12)


def alpha_of(step, alpha, rho):
    if rho is not None:
        return rho * rate(step)
    return 0.9 / W if alpha is None else alpha


def elastic_in_rank_order(period, momentum, alpha=None, rho=None):
    """Zhang et al., Algorithm 1 (Wongpanich et al., eq. 2 and 3), workers one after the other."""
    centre, x = START.copy(), [START.copy() for _ in range(W)]
    optimizers = [Momentum(momentum) for _ in range(W)]
    for t in range(STEPS):
        for i in range(W):
            g, d = gradient(i, t, x[i]), 0.0
            if t % period == 0:
                d = alpha_of(t, alpha, rho) * (x[i] - centre)
                centre = centre + d
            x[i] = x[i] + optimizers[i].change(t, g) - d
    return x, centre


STRENGTHS = [{}, {"alpha": 0.3}, {"rho": 2.5}]


@pytest.mark.parametrize("strength", STRENGTHS, ids=repr)
@pytest.mark.parametrize(("period", "momentum"), [(1, 0.0), (3, 0.9)])
def test_easgd_in_turns_is_the_printed_algorithm(period, momentum, strength):
    x, centre = elastic_in_rank_order(period, momentum, **strength)
    assert_as_printed(trained(fs.EASGD(period, **strength), momentum), x, centre)


@pytest.mark.parametrize("strength", STRENGTHS, ids=repr)
@pytest.mark.parametrize("make", [partial(fs.EASGD, mode="first_come"), fs.EAWild], ids=repr)
def test_who_comes_first_is_served_first_on_a_network_without_delay(make, strength):
    """Workers of equal speed come in rank order."""
    x, centre = elastic_in_rank_order(3, 0.9, **strength)
    assert_as_printed(trained(make(3, **strength), 0.9), x, centre)


@pytest.mark.parametrize("strength", STRENGTHS, ids=repr)
def test_easgd_in_sync_is_the_printed_algorithm(strength):
    """Zhang et al., eq. 3 and 4: all workers and the centre from the old values."""
    centre, x = START.copy(), [START.copy() for _ in range(W)]
    optimizers = [Momentum(0.9) for _ in range(W)]
    for t in range(STEPS):
        changes = [optimizers[i].change(t, gradient(i, t, x[i])) for i in range(W)]
        alpha = alpha_of(t, **{"alpha": None, "rho": None} | strength) if t % 2 == 0 else 0.0
        mean = sum(x) / W
        x = [x[i] + changes[i] - alpha * (x[i] - centre) for i in range(W)]
        centre = (1 - W * alpha) * centre + W * alpha * mean
    assert_as_printed(trained(fs.EASGD(2, mode="sync", **strength), 0.9), x, centre)


@pytest.mark.parametrize("mode", ["first_come", "round_robin", "sync"])
def test_eamsgd_is_the_printed_algorithm(mode):
    """Zhang et al., Algorithm 2: the gradient is that of the point ahead, the pull that of x."""
    delta, rho, period = 0.7, 2.0, 3
    centre, x = START.copy(), [START.copy() for _ in range(W)]
    v = [np.zeros(SIZE) for _ in range(W)]
    for t in range(STEPS):
        old_centre, total = centre, 0.0
        for i in range(W):
            d = 0.0
            if t % period == 0:
                d = rho * rate(t) * (x[i] - (old_centre if mode == "sync" else centre))
                total = total + d
                centre = old_centre + total
            v[i] = delta * v[i] - rate(t) * gradient(i, t, x[i] + delta * v[i])
            x[i] = x[i] + v[i] - d
    ahead = [x[i] + delta * v[i] for i in range(W)]  # where the model stands between two steps
    strategy = fs.EAMSGD(period, rho=rho, momentum=delta, mode=mode)
    assert_as_printed(trained(strategy), ahead, centre)


def test_asynchronous_momentum_is_the_default_of_eamsgd():
    assert fs.EAMSGD(2).mode == "first_come"
    assert not fs.EAMSGD(2).waits


@pytest.mark.parametrize(
    "schedule", [fs.Cosine(), fs.Polynomial() * fs.StepDecay((0.5,))], ids=repr
)
def test_rho_follows_any_schedule(schedule):
    """With no gradient a worker moves by its pull alone: α_t = η_t·ρ."""

    def program(comm):
        model = Vector(torch.tensor([float(comm.rank)], dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        strategy = fs.EASGD(1, rho=1.5, mode="sync")
        worker = fs.Worker(comm, model, optimizer, strategy, schedule)
        worker.state.alike.fill_(0.0)
        with worker.changing_parameters(), torch.no_grad():
            model.x.fill_(1.0 if comm.rank else -1.0)
        worker.total_steps, seen = 8, []
        for _ in range(8):
            before = model.x.item()
            model.x.grad = torch.zeros(1, dtype=torch.float64)
            worker.step(0.0)
            # The centre stays at 0, half-way between the two.
            seen.append((1 - model.x.item() / before, optimizer.param_groups[0]["lr"]))
        return seen

    pulls = fs.launch(program, 2)[0]
    assert len({lr for _, lr in pulls}) > 1
    for pull, lr in pulls:
        assert pull == pytest.approx(1.5 * lr, rel=1e-9, abs=1e-12)


def centre_of_two(strategy, network):
    """Two workers at 10 and 20, the centre at 0, all pulling at once: where all three get to."""

    def program(comm):
        model = Vector(torch.zeros(1, dtype=torch.float64))
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=1.0), strategy)
        for gradient_now in (-10.0 * (comm.rank + 1), 0.0):
            model.x.grad = torch.full((1,), gradient_now, dtype=torch.float64)
            worker.step(0.0)
        before = model.x.item()
        worker.finish()
        return before, model.x.item()

    compute = fs.Compute(0.001)
    one, two = fs.launch(program, 2, fs.Simulator(network=network, compute=compute))
    assert one[1] == two[1]
    return one[0], two[0], one[1]


def test_pulls_that_overlap_in_virtual_time_both_read_the_old_centre():
    slow = fs.Network(latency_seconds=1.0, bytes_per_second=1e6)
    conflict = centre_of_two(fs.EAWild(alpha=0.25), slow)
    assert conflict == pytest.approx((7.5, 15.0, 7.5))  # 0 + α·10 + α·20

    serial = centre_of_two(fs.EASGD(1, alpha=0.25, mode="first_come"), slow)
    assert serial == pytest.approx((7.5, 20 - 4.375, 6.875))  # the second sees 2.5

    # Where nothing takes time nothing overlaps.
    assert centre_of_two(fs.EAWild(alpha=0.25), fs.Network.preset("ideal")) == pytest.approx(serial)


def test_a_change_lands_when_it_arrives():
    """It takes 2 s to the home; who reads at 1 s sees the old value, who reads at 3 s the new."""

    def program(comm):
        shared = comm.shared("x", torch.zeros(1))
        if comm.rank == 0:
            shared.add(torch.ones(1))
            return None
        comm.elapse(1.0)
        early = float(shared.read())  # comes back at 4 s: the link carries one at a time
        return early, float(shared.read())

    network = fs.Network(latency_seconds=2.0, bytes_per_second=float("inf"))
    assert fs.launch(program, 2, fs.Simulator(network=network))[1] == (0.0, 1.0)


def random_divisions(groups, seed=0):
    division = 0
    while True:
        draw = numpy_stream(Purpose.GROUPING, seed, division)
        yield draw.permutation(W).reshape(groups, -1).tolist()
        division += 1


@pytest.mark.parametrize("delegate", ["first", "random"])
def test_random_groups_take_parameters_and_momentum_from_their_delegate(delegate):
    """Worker 3 is a little slow, so that its group comes last to each exchange."""
    period, alpha, groups, slow = 4, 0.3, 2, 3
    divisions = random_divisions(groups)
    division = next(divisions)
    centre, x = START.copy(), [START.copy() for _ in range(W)]
    optimizers = [Momentum(0.9) for _ in range(W)]
    for t in range(STEPS):
        g = [gradient(i, t, x[i]) for i in range(W)]
        mean = {i: sum(g[k] for k in group) / len(group) for group in division for i in group}
        old = x
        x = [x[i] + optimizers[i].change(t, mean[i]) for i in range(W)]
        if t % period == 0:
            averaged, division = division, next(divisions)
            leaders = [min(group) if delegate == "first" else group[0] for group in division]
            delayed = {i for group in averaged for i in group if slow in group}
            for i in sorted(sorted(leaders), key=delayed.__contains__):  # as they come
                d = alpha * (old[i] - centre)
                centre = centre + d
                x[i] = x[i] - d
            for leader, group in zip(leaders, division, strict=True):
                for i in group:
                    x[i] = x[leader].copy()
                    optimizers[i].buffer = optimizers[leader].buffer.copy()
    strategy = fs.EAWild(period, alpha, groups=groups, grouping="random", delegate=delegate)
    uneven = fs.Simulator(network=fs.Network.preset("ideal"), compute=fs.Compute(slow={3: 1.01}))
    assert_as_printed(trained(strategy, 0.9, backend=uneven), x, centre)


def test_the_old_name_of_the_delegate_still_works():
    assert fs.EAWild(groups=2, representative="random") == fs.EAWild(groups=2, delegate="random")
    assert fs.EAWild(groups=2, representative="first") == fs.EAWild(groups=2)


@pytest.mark.parametrize("which", ["mean", "best", "any"])
@pytest.mark.parametrize(
    "make",
    [
        partial(fs.EASGD, 2),
        partial(fs.EASGD, 2, mode="sync"),
        partial(fs.EAWild, 2),
        partial(fs.NoSync, 0.2),
        fs.Independent,
    ],
    ids=repr,
)
def test_another_model_may_stand_for_the_run(make, which):
    found = trained(make(representative=which), 0.9)
    replicas = [before for before, _, _ in found]
    finished = [after for _, after, _ in found]
    assert all(np.array_equal(finished[0], each) for each in finished)
    if which == "mean":
        assert finished[0] == pytest.approx(sum(replicas) / W, rel=1e-12)
        return
    smooth = []
    for _, _, losses in found:
        mean = losses[0]
        for loss in losses[1:]:
            mean = 0.9 * mean + 0.1 * loss
        smooth.append(mean)
    matches = [rank for rank, each in enumerate(replicas) if np.array_equal(each, finished[0])]
    assert matches == [int(np.argmin(smooth))] if which == "best" else len(matches) == 1


# --- The swarm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["loss", "accuracy"])
@pytest.mark.parametrize(("best", "period", "staleness"), [(None, 1, 0), (2, 3, 0), (3, 2, 1)])
def test_nosync_is_the_printed_algorithm(best, period, staleness, score):
    """x_i ← (1−β)x_i + (β/n) Σ_{k∈N} x_k, after the own step."""
    beta, n = 0.2, best or W
    x, centres = [START.copy() for _ in range(W)], []
    optimizers = [Momentum(0.9) for _ in range(W)]
    for t in range(STEPS):
        losses = [loss_of(i, t, x[i]) for i in range(W)]
        x = [x[i] + optimizers[i].change(t, gradient(i, t, x[i])) for i in range(W)]
        if (t + 1) % period == 0:
            best_first = np.argsort(losses)[:n]
            centres.append(sum(x[k] for k in best_first) / n)
            if len(centres) > staleness:
                x = [(1 - beta) * each + beta * centres[-1 - staleness] for each in x]
    strategy = fs.NoSync(beta, best, period, staleness, score)
    assert_as_printed(trained(strategy, 0.9), x, sum(x) / W)


@pytest.mark.parametrize("best", [None, 1])
def test_a_particle_of_nosync_may_be_a_group(best):
    groups, beta, members = 2, 0.3, [(0, 1), (2, 3)]
    x = [START.copy() for _ in range(groups)]
    optimizers = [Momentum(0.9) for _ in range(groups)]
    for t in range(STEPS):
        scores = [np.mean([loss_of(i, t, x[p]) for i in members[p]]) for p in range(groups)]
        for p in range(groups):
            mean = sum(gradient(i, t, x[p]) for i in members[p]) / 2
            x[p] = x[p] + optimizers[p].change(t, mean)
        chosen = np.argsort(scores)[: best or groups]
        centre = sum(x[p] for p in chosen) / len(chosen)
        x = [(1 - beta) * each + beta * centre for each in x]
    expected = [x[0], x[0], x[1], x[1]]
    found = trained(fs.NoSync(beta, best, groups=groups), 0.9)
    assert_as_printed(found, expected, sum(expected) / W)


def test_the_centre_of_all_by_a_reduction_tree_is_the_same():
    flat, tree = (trained(fs.NoSync(0.2, all_reduce=how), 0.9) for how in ("flat", "tree"))
    for (one, _, _), (other, _, _) in zip(flat, tree, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_a_look_at_nosync_shows_the_centre():
    """Not a particle: on its own each of them is somewhere else."""

    def program(comm):
        model = Vector(torch.tensor(START))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = fs.Worker(comm, model, optimizer, fs.NoSync(0.1))
        for step in range(5):
            model.x.grad = torch.tensor(gradient(comm.rank, step, model.x.detach().numpy()))
            worker.step(0.0)
        return model.x.detach().clone(), worker.preview()

    found = fs.launch(program, W)
    mean = sum(own for own, _ in found) / W
    for own, shown in found:
        assert torch.allclose(shown, mean, rtol=1e-12)
        assert not torch.allclose(own, mean)


@pytest.mark.parametrize("score", ["loss", "accuracy"])
def test_best_only_ranks_by_either_score(score):
    x = [START.copy() for _ in range(W)]
    for t in range(STEPS):
        losses = [loss_of(i, t, x[i]) for i in range(W)]
        x = [x[i] - rate(t) * gradient(i, t, x[i]) for i in range(W)]
        if (t + 1) % 4 == 0:
            x = [x[int(np.argmin(losses))]] * W
    assert_as_printed(trained(fs.BestOnly(4, score)), x, x[0])
    assert fs.BestOnly(4, score).needs_accuracy == (score == "accuracy")


def swarm(period, decay, personal_best):
    """PSO-PS, Algorithm 1, with plain SGD between the steps of the swarm."""
    c1, c2, m_max, m_min, per_epoch = 0.2, 0.9, 0.9, 0.3, 5
    draws = [torch_stream(Purpose.SWARM, 0, rank) for rank in range(W)]
    x = [START.copy() for _ in range(W)]
    v = [np.zeros(SIZE) for _ in range(W)]
    best, best_loss = [START.copy() for _ in range(W)], [np.inf] * W
    for t in range(1, STEPS + 1):
        losses = [loss_of(i, t - 1, x[i]) for i in range(W)]
        is_of_swarm = t % period == 0
        for i in range(W):
            looks = is_of_swarm or personal_best == "every_step"
            if looks and losses[i] < best_loss[i]:
                best_loss[i], best[i] = losses[i], x[i].copy()
        swarm_best = x[int(np.argmin(losses))].copy()
        m = m_max - t * (m_max - m_min) / STEPS
        lam = 1 + (t - 1) // per_epoch
        for i in range(W):
            if not is_of_swarm:
                x[i] = x[i] - rate(t - 1) * gradient(i, t - 1, x[i])
                continue
            r1, r2 = (float(torch.rand((), generator=draws[i])) for _ in range(2))
            pulled = c1 * r1 * (best[i] - x[i]) + c2 * r2 * (swarm_best - x[i])
            if decay == "all":
                v[i] = (m * v[i] + pulled) / lam
            else:
                v[i] = m * v[i] + pulled / (lam if decay == "attraction" else 1)
            x[i] = x[i] + v[i] / (lam if decay == "position" else 1)
    last = [loss_of(i, STEPS - 1, x[i]) for i in range(W)]
    return x, x[int(np.argmin(last))]


@pytest.mark.parametrize("personal_best", ["every_step", "swarm_steps"])
@pytest.mark.parametrize("decay", ["attraction", "all", "position", "none"])
@pytest.mark.parametrize("period", [1, 3])
def test_pso_ps_is_the_printed_algorithm(period, decay, personal_best):
    x, swarm_best = swarm(period, decay, personal_best)
    strategy = fs.PSOPS(period, decay=decay, personal_best=personal_best)
    assert_as_printed(trained(strategy), x, swarm_best)


def test_the_variants_of_pso_ps_differ():
    kinds = [
        swarm(3, decay, personal_best)[0][0].tobytes()
        for decay in ("attraction", "all", "position", "none")
        for personal_best in ("every_step", "swarm_steps")
    ]
    assert len(set(kinds)) == 8


def test_the_best_particle_is_that_of_the_parameters_which_are_returned():
    """Rank 0 was better before the last step, rank 1 is better after it."""

    def program(comm, knows_how):
        model = Vector(torch.tensor([1.0 + comm.rank], dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker = fs.Worker(comm, model, optimizer, fs.PSOPS(5))
        worker.total_steps = 1
        with worker.changing_parameters(), torch.no_grad():
            model.x.fill_(1.0 + comm.rank)
        loss = model.x.item() ** 2
        model.x.grad = torch.tensor([2.0 * comm.rank], dtype=torch.float64)  # 1 → 1, 2 → 0
        worker.step(loss, again=(lambda: model.x**2) if knows_how else None)
        return worker.finish().x.item()

    assert fs.launch(partial(program, knows_how=True), 2) == [0.0, 0.0]
    assert fs.launch(partial(program, knows_how=False), 2) == [1.0, 1.0]  # the loss before decides


def test_a_run_ranks_particles_by_the_loss_after_the_last_step():
    seen: dict[str, list[tuple[bool, float]]] = {}

    def loss(model, batch):
        value = fs.classification_loss(model, batch)
        rank = threading.current_thread().name.removeprefix("flockstep-")
        seen.setdefault(rank, []).append((model.training, value.item()))
        return value

    task = dataclasses.replace(fs.task("digits-mlp"), loss=loss)
    result = fs.run(
        task, fs.PSOPS(7), workers=6, steps=20, seed=1, batch_size=8, look_every="99 steps"
    )
    before = [[value for training, value in seen[str(rank)] if training][-1] for rank in range(6)]
    after = [
        [value for training, value in seen[str(rank)] if not training][-1] for rank in range(6)
    ]
    own = torch.cat([p.detach().flatten() for p in result.model.parameters()])
    chosen = [rank for rank, each in enumerate(result.replicas) if torch.equal(each, own)]
    assert chosen == [int(np.argmin(after))]
    assert chosen != [int(np.argmin(before))]  # or this test would say nothing


# --- what surrounds the equations -----------------------------------------------------------------


def test_random_groups_add_half_precision_in_float32():
    def program(comm):
        model = Vector(torch.zeros(3, dtype=torch.float16))
        strategy = fs.EAWild(4, groups=1, grouping="random")
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=2**-10), strategy)
        model.x.grad = torch.full((3,), 30_000.0, dtype=torch.float16)
        worker.step(0.0)
        return model.x.detach().clone()

    for moved in fs.launch(program, 4):  # 120,000 is no number of half precision
        assert torch.allclose(moved, torch.full((3,), -29.3, dtype=torch.float16), rtol=1e-3)


def test_the_best_replica_of_eamsgd_is_one_of_those_that_are_scored():
    """The model in the loop is ahead of x, the replica."""
    strategy = fs.EAMSGD(4, representative="best")
    fields = {"measure": ("replicas", "spread"), "look_every": "5 steps", "steps": 20}
    result = fs.run("digits-mlp", strategy, workers=3, **fields)
    assert result.metrics["test_accuracy"] in result.metrics["test_replicas"]
    own = torch.cat([each.detach().flatten() for each in result.model.parameters()])
    assert sum(torch.equal(own, each) for each in result.replicas) == 1
    centre = torch.stack(result.replicas).double().mean(0)
    squares = [(each.double() - centre).square().sum() for each in result.replicas]
    spread = float(torch.stack(squares).mean().sqrt())
    assert result.history[-1].spread == pytest.approx(spread, rel=1e-9)


def test_delay_compensation_can_be_looked_at():
    strategy = fs.AsyncSGD(delay_compensation=0.1)
    fields = {"optimizer": "sgd(lr=0.05)", "steps": 6, "look_every": "2 steps"}
    assert len(fs.run("digits-mlp", strategy, workers=2, **fields).history) == 3


def test_delay_compensation_refuses_momentum_before_workers_start():
    fields = {"steps": 2}
    with pytest.raises(fs.InvalidField, match="^'optimizer' must be SGD without momentum"):
        fs.run("digits-mlp", fs.AsyncSGD(delay_compensation=0.1), workers=2, **fields)
    fs.run("digits-mlp", fs.AsyncSGD(delay_compensation=0.1), workers=1, **fields)
