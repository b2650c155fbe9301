"""What theory says, against what is simulated."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.strategies.harness import Vector

import flockstep as fs

LR, NOISE = 0.1, 2.0


def mean_distance(pull, workers, steps, pairs=20_000):
    """Of two particles of the swarm under noise, simulated."""
    rng = np.random.default_rng(0)
    x = np.zeros((workers, pairs))
    for _ in range(steps):
        x -= LR * rng.normal(scale=NOISE, size=x.shape)
        x += pull * (x.mean(0) - x)
    return np.abs(x[0] - x[1]).mean()


def test_the_printed_distance_is_that_of_many_workers_after_so_many_steps():
    for steps in (1, 3, 20):
        measured = mean_distance(0.2, 50, steps)
        assert fs.printed_distance(0.2, LR, NOISE, 50, steps) == pytest.approx(measured, rel=0.02)


def test_the_printed_distance_lies_above_the_exact_one_of_few_workers():
    """ω counts β²/w of the noise twice: in the particle, and in the mean, which cancels."""
    exact = fs.settled_distance(0.5, LR, NOISE)
    assert mean_distance(0.5, 2, 60) == pytest.approx(exact, rel=0.02)
    printed = [fs.printed_distance(0.5, LR, NOISE, workers, 500) for workers in (2, 4, 100, 10**6)]
    assert printed == sorted(printed, reverse=True)
    assert printed[0] > 1.1 * exact
    assert printed[-1] == pytest.approx(exact, rel=1e-5)


def test_limits_of_the_printed_distance():
    assert fs.printed_distance(0.0, LR, NOISE, 8, 30) == fs.growing_distance(LR, NOISE, 30)
    assert fs.printed_distance(0.3, LR, NOISE, 8, 0) == 0
    small = fs.small_pull_distance(1e-4, LR, NOISE)
    assert small == pytest.approx(math.sqrt(2) * LR * NOISE / math.sqrt(math.pi * 1e-4), rel=1e-12)
    assert fs.settled_distance(1e-4, LR, NOISE) == pytest.approx(small, rel=1e-3)
    assert fs.printed_distance(1e-4, LR, NOISE, 10**6, 10**6) == pytest.approx(small, rel=1e-3)


# A ring of components: e joins each with the next, f = (1/|E|) Σ_e ½‖x_e − t_e‖².
COMPONENTS = 10
EDGES = [(v, (v + 1) % COMPONENTS) for v in range(COMPONENTS)]
RNG = np.random.default_rng(3)
TARGETS = {e: RNG.choice([-1.0, 1.0], size=2) for e in EDGES}
SHARE = len(EDGES[0]) / COMPONENTS  # of the gradients of f: each component is in two of ten e
OPTIMUM = np.array(
    [(TARGETS[EDGES[v]][0] + TARGETS[EDGES[v - 1]][1]) / 2 for v in range(COMPONENTS)]
)
START = np.full(COMPONENTS, 2.0)
PROBLEM = {
    "strong_convexity": SHARE,
    "lipschitz": SHARE,
    # ‖x_e − t_e‖: components stay between −1 and 2, as steps are short and lead towards targets.
    "gradient_bound": math.sqrt(2) * 3,
    "start_distance": float(((START - OPTIMUM) ** 2).sum()),
    "edge_size": 2,
    "variable_share": 2 / COMPONENTS,
    "edge_share": 3 / COMPONENTS,
}


def excess(x):
    """f(x) − f*: f is quadratic with curvature SHARE."""
    return 0.5 * SHARE * ((x - OPTIMUM) ** 2).sum(-1)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_lock_free_updates_keep_the_bound(lag, error=1.5, runs=50):
    """Hogwild!'s own algorithm, with gradients up to `lag` updates old."""
    bound = fs.lock_free_bound(error, lag=lag, **PROBLEM)
    rng = np.random.default_rng(lag)
    all_runs = np.arange(runs)
    targets = np.array([TARGETS[e] for e in EDGES])
    x = np.tile(START, (runs, 1))
    assert excess(x).mean() > error  # or there would be nothing to show
    past = [x.copy()] * (lag + 1)
    for update in range(bound.updates):
        e, place = rng.integers(len(EDGES), size=runs), rng.integers(2, size=runs)
        v = (e + place) % COMPONENTS
        old = past[(update - int(rng.integers(lag + 1))) % (lag + 1)]
        x[all_runs, v] -= bound.step_size * 2 * (old[all_runs, v] - targets[e, place])
        past[(update + 1) % (lag + 1)] = x.copy()
    assert excess(x).mean() <= error
    assert np.abs(x).max() <= 2.0  # the gradients were bounded as was said


def test_hogwild_itself_keeps_the_bound(error=3.0, lag=1):
    """The strategy in the simulator: its staleness is the lag."""
    bound = fs.lock_free_bound(error, lag=lag, **PROBLEM)

    def program(comm):
        rng = np.random.default_rng(comm.rank)
        model = Vector(torch.tensor(START))
        optimizer = torch.optim.SGD(model.parameters(), lr=bound.step_size)
        worker = fs.Worker(comm, model, optimizer, fs.Hogwild())
        for _ in range(-(-bound.updates // 2)):
            e, place = int(rng.integers(len(EDGES))), int(rng.integers(2))
            v = EDGES[e][place]
            gradient = torch.zeros(COMPONENTS, dtype=torch.float64)
            gradient[v] = 2 * (model.x[v].item() - TARGETS[EDGES[e]][place])
            model.x.grad = gradient
            worker.step(0.0)
        stale = comm.meter.staleness_max
        return worker.finish().x.detach().numpy(), stale

    found = fs.launch(program, 2, fs.Simulator(compute=fs.Compute(slow={1: 1.0001})))
    assert max(stale for _, stale in found) == lag
    assert excess(START) > error
    assert excess(found[0][0]) <= error


def test_the_terms_of_the_bound():
    """By hand: γ = ϑεc / (2LM²Ω(1 + 6ρτ + 4τ²Ω√Δ)), k with 6 in place of 4."""
    known = {
        "strong_convexity": 1.0,
        "lipschitz": 2.0,
        "gradient_bound": 3.0,
        "start_distance": 8.0,
        "lag": 2,
        "edge_size": 4,
        "variable_share": 0.25,
        "edge_share": 0.5,
        "safety": 0.5,
    }
    bound = fs.lock_free_bound(0.1, **known)
    assert bound.step_size == pytest.approx(0.05 / (2 * 2 * 9 * 4 * (1 + 6 + 32)), rel=1e-12)
    exact = 2 * 2 * 9 * 4 * (1 + 6 + 48) * math.log(160) / 0.05
    assert bound.updates == math.ceil(exact)

    printed = fs.lock_free_bound(0.1, **known, form="printed")
    assert printed.step_size == pytest.approx(4 * bound.step_size, rel=1e-12)
    assert printed.updates == math.ceil(exact / 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("error", 0),
        ("lipschitz", 0.1),
        ("lag", -1),
        ("edge_size", 0),
        ("variable_share", 1.5),
        ("edge_share", 0),
        ("safety", 1.0),
        ("form", "wild"),
        ("error", 1e9),  # γc would be above 1
    ],
)
def test_assumptions_of_the_bound_are_checked(field, value):
    known = {"error": 0.1, "lag": 1, **PROBLEM} | {field: value}
    with pytest.raises(fs.InvalidField, match=rf"'{field}' must .* \(got {value!r}\)"):
        fs.lock_free_bound(**known)
