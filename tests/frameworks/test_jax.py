"""Workers of JAX parameters and optax optimizers: as with PyTorch, and what is the worker's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import flax.linen
import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax import numpy as jnp
from tests.frameworks.harness import NAMES, START, assert_alike, trained

import flockstep as fs

STRATEGIES = [
    fs.LocalSGD(3),
    fs.SyncSGD(),
    fs.EAWild(2),
    fs.NoSync(0.3),
    fs.DiLoCo(3),
    fs.SyncSGD(codec=fs.TopK(0.1)),
]
MORE = [
    fs.LocalSGD(3, momentum="average"),
    fs.LocalSGD(3, momentum="reset"),
    fs.EAWild(2, groups=2, grouping="random"),  # the delegate brings its optimizer's state
    fs.EASGD(2, rho=0.5),
    fs.EAMSGD(2, mode="round_robin"),  # looks ahead
    fs.DPSGD(),
    fs.SlowMo(3),
    fs.AsyncSGD(),
    fs.Hogwild(),
]


@pytest.mark.parametrize("strategies", [STRATEGIES, MORE], ids=["usual", "more"])
def test_strategies_are_what_they_are_with_torch(strategies):
    assert_alike(trained(strategies, "jax"), trained(strategies, "torch"), 1e-6)


def test_real_processes_give_what_the_simulator_gives_and_forked_none_with_jax(local):
    """EAWild's outcome depends on who comes first."""
    strategies = [each for each in STRATEGIES if not isinstance(each, fs.EAWild)]
    assert_alike(
        trained(strategies, "jax", local, 2), trained(strategies, "torch", workers=2), 1e-6
    )
    (maps,) = fs.launch(lambda comm: Path(f"/proc/{os.getppid()}/maps").read_text(), 1, local)
    assert "libtorch" in maps
    assert "jaxlib" not in maps


SGD = optax.sgd(0.1)
OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(1e-2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "looks at parameters": optax.lamb(1e-2),
}
X = np.random.default_rng(0).normal(size=(24, 10)).astype(np.float32)
Y = np.arange(24) % 3
SMALL = {"w": np.full((10, 3), 0.1, np.float32), "b": np.zeros(3, np.float32)}


def small_loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y).mean()


small_gradients = jax.jit(jax.value_and_grad(small_loss))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_plain_training_to_the_bit(name):
    optimizer = OPTIMIZERS[name]

    def program(comm):
        worker = fs.jax.Worker(comm, SMALL, optimizer, strategy=fs.LocalSGD(2))
        batches = []
        for x, y in worker.batches((X, Y), batch_size=8, epochs=2):
            batches.append((x, y))
            worker.step(*small_gradients(worker.params, x, y))
        return worker.finish(), batches

    ((ours, batches),) = fs.launch(program, 1)
    params = jax.tree.map(jnp.asarray, SMALL)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for x, y in batches:
        _, grads = small_gradients(params, x, y)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert (ours["w"] == params["w"]).all()
    assert (ours["b"] == params["b"]).all()


def keeping_gradients() -> optax.GradientTransformation:
    """An optimizer that hands on what it was given, and keeps it: nothing is computed."""
    return optax.GradientTransformation(
        lambda params: (params, params), lambda updates, state, params: (updates, (updates, params))
    )


@pytest.mark.parametrize("size", [1, 16, 4096])
def test_no_array_lies_in_memory_that_strategies_change(size):
    """Not even one leaf that is the whole flat tensor, which could be passed on as it is."""
    optimizer = keeping_gradients()

    def program(comm):
        start = {"x": np.zeros(size, np.float32)}
        worker = fs.jax.Worker(comm, start, optimizer, strategy=fs.SyncSGD())
        seen = [worker.params["x"]]
        for step in range(3):
            worker.step(0.0, {"x": jnp.full(size, 10.0**step)})
            seen += [worker.params["x"], *jax.tree.leaves(worker.optimizer_state)]
        final = worker.finish()["x"]
        worker.flat.state.fill_(-1)
        worker.flat.gradients.fill_(-1)
        return [float(array[-1]) for array in (*seen, final)]

    expected = [0, 1, 1, 0, 11, 10, 1, 111, 100, 11, 111]
    assert fs.launch(program, 2) == [expected] * 2


def test_gradients_that_are_still_being_computed_are_waited_for():
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 2000, lambda _, value: jnp.sin(value) + x, x)

    def program(comm):
        start = {"x": jnp.ones(1000)}
        worker = fs.jax.Worker(comm, start, SGD, strategy=fs.SyncSGD())
        grads = {"x": slow(worker.params["x"])}
        worker.step(0.0, grads)
        return np.abs(np.asarray(worker.params["x"]) - (1 - 0.1 * np.asarray(grads["x"]))).max()

    assert max(fs.launch(program, 2)) < 1e-6


def trained_tree(params, loss_of, strategy, optimizer, workers=2, **how):
    """What workers of one program end with, and the loss of its first step and its last."""
    gradients = jax.jit(jax.value_and_grad(loss_of))

    def program(comm):
        worker = fs.jax.Worker(comm, params, optimizer, strategy=strategy, **how)
        losses = []
        for x, y in worker.batches((X, Y), batch_size=6, epochs=6):
            loss, grads = gradients(worker.params, x, y)
            worker.step(loss, grads)
            losses.append(float(loss))
        return worker.finish(), losses[0], losses[-1], worker.flat.state.clone()

    return fs.launch(program, workers)


def loss_of_outputs(outputs, y):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def test_lists_and_tuples_are_trees_whose_order_is_their_own():
    def loss(params, x, y):
        (w, b), (scale,) = params
        return loss_of_outputs((x @ w + b) * scale, y)

    params = [(SMALL["w"], SMALL["b"]), (np.ones(3, np.float32),)]
    (tree, first, last, flat), (other, *_) = trained_tree(
        params, loss, fs.LocalSGD(4), optax.adam(1e-2)
    )
    assert last < first
    assert jax.tree.structure(tree) == jax.tree.structure(params)
    assert (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) == flat.numpy()
    ).all()
    assert all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(other)))


def test_a_flax_module_with_statistics_of_batch_normalisation():
    class Net(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x, train):
            x = flax.linen.Dense(4)(x)
            x = flax.linen.BatchNorm(use_running_average=not train, momentum=0.5)(x)
            return flax.linen.Dense(3)(x)

    net = Net()
    variables = jax.jit(lambda: net.init(jax.random.key(0), X, train=False))()

    @jax.jit
    def gradients(params, stats, x, y):
        def loss(params):
            both = {"params": params, "batch_stats": stats}
            outputs, new = net.apply(both, x, train=True, mutable=["batch_stats"])
            return loss_of_outputs(outputs, y), new["batch_stats"]

        return jax.value_and_grad(loss, has_aux=True)(params)

    def program(comm):
        worker = fs.jax.Worker(
            comm,
            variables["params"],
            adam,
            strategy=fs.LocalSGD(2),
            buffers=variables["batch_stats"],
        )
        own = []
        for x, y in worker.batches((X, Y), batch_size=6, epochs=1):
            (loss, stats), grads = gradients(worker.params, worker.buffers, x, y)
            own.append(stats["BatchNorm_0"]["mean"])
            worker.step(loss, grads, buffers=stats)
        params, stats = worker.finish()
        outputs = evaluated({"params": params, "batch_stats": stats})
        return np.asarray(own[1]), np.asarray(stats["BatchNorm_0"]["mean"]), np.asarray(outputs)

    adam = optax.adam(1e-2)
    evaluated = jax.jit(lambda variables: net.apply(variables, X, train=False))
    (own, mean, outputs), (theirs, mean_there, outputs_there) = fs.launch(program, 2)
    assert not np.allclose(own, theirs)
    np.testing.assert_allclose(mean, (own + theirs) / 2, atol=1e-6)
    assert (mean == mean_there).all()
    assert (outputs == outputs_there).all()


def test_an_nnx_module_by_its_state():
    graph, state = nnx.split(nnx.Linear(10, 3, rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params, x, y):
        return loss_of_outputs(nnx.merge(graph, params)(x), y)

    (tree, first, last, _), *_ = trained_tree(state, loss, fs.SyncSGD(), optax.sgd(0.5))
    assert last < first
    assert nnx.merge(graph, tree)(X).shape == (24, 3)


def test_an_equinox_module_whose_arrays_are_partitioned_off():
    class Net(eqx.Module):
        weight: jax.Array
        activation: Callable

        def __call__(self, x):
            return self.activation(x @ self.weight)

    net = Net(jnp.asarray(SMALL["w"]), jnp.tanh)
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params, x, y):
        return loss_of_outputs(jax.vmap(eqx.combine(params, static))(x), y)

    (tree, first, last, _), *_ = trained_tree(params, loss, fs.EASGD(2), optax.sgd(0.5))
    assert last < first
    assert eqx.combine(tree, static)(X).shape == (24, 3)

    with pytest.raises(fs.InvalidField, match="must be an array of .* at 'activation'"):
        fs.jax.JaxNode(net, optax.sgd(0.1))


def test_half_precision_is_trained_in_half_precision():
    params = {"w": jnp.zeros((10, 3), jnp.bfloat16), "b": jnp.zeros(3, jnp.bfloat16)}
    (tree, first, last, flat), _ = trained_tree(params, small_loss, fs.SyncSGD(), optax.sgd(0.5))
    assert tree["w"].dtype == jnp.bfloat16
    assert flat.dtype == torch.bfloat16
    assert last < first


def drive(optimizer, steps=4, strategy=None, **how):
    """What gradients of ones make of zeros, after every step; and the learning rates."""
    if strategy is None:
        strategy = fs.SyncSGD()

    def program(comm):
        start = {"x": np.zeros(1, np.float32)}
        worker = fs.jax.Worker(comm, start, optimizer, strategy=strategy, **how)
        worker.total_steps = steps
        told = []
        for _ in range(steps):
            worker.step(0.0, {"x": jnp.ones(1)})
            told.append((worker.flat.state.item(), worker.optimizer.param_groups[0].get("lr")))
        return told

    return fs.launch(program, 2)[0]


def by_torch(steps=4, **how):
    def program(comm):
        net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.5)
        worker = fs.Worker(comm, net, optimizer, fs.SyncSGD(), **how)
        worker.total_steps = steps
        told = []
        for _ in range(steps):
            net.weight.grad = torch.ones(1, 1)
            worker.step(0.0)
            told.append((net.weight.item(), optimizer.param_groups[0]["lr"]))
        return told

    return fs.launch(program, 2)[0]


@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        (optax.sgd(0.5, momentum=0.5), {"lr": 0.5}),
        (optax.inject_hyperparams(optax.sgd)(learning_rate=0.5, momentum=0.5), {}),
    ],
    ids=["scaled", "injected"],
)
def test_a_schedule_sets_the_rate_as_it_does_with_torch(optimizer, how):
    ours, theirs = drive(optimizer, schedule=fs.Cosine(), **how), by_torch(schedule=fs.Cosine())
    assert ours == [(pytest.approx(x, rel=1e-6), pytest.approx(lr)) for x, lr in theirs]


def test_a_schedule_of_optax_itself_is_seen_by_strategies():
    rate = optax.linear_schedule(0.4, 0.1, 3)
    told = drive(optax.inject_hyperparams(optax.sgd)(learning_rate=rate), strategy=fs.SlowMo(2))
    assert [lr for _, lr in told] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_what_is_meant_may_change_between_steps():
    def program(comm):
        worker = fs.jax.Worker(comm, SMALL, optax.sgd(0.1), strategy=fs.LocalSGD(1))
        with pytest.raises(fs.FlockstepError, match="worker.params is set by worker.step"):
            worker.params = SMALL
        with worker.changing_parameters():
            worker.params = jax.tree.map(lambda leaf: leaf + comm.rank, worker.params)
        before = float(worker.params["b"][0])
        worker.step(0.0, jax.tree.map(jnp.zeros_like, worker.params))
        return before, float(worker.params["b"][0]), float(worker.snapshot()["b"][0])

    assert fs.launch(program, 2) == [(0.0, 0.5, 0.5), (1.0, 0.5, 0.5)]


def test_the_loss_computed_again_is_that_of_the_new_parameters():
    def program(comm):
        worker = fs.jax.Worker(comm, SMALL, optax.sgd(0.1), strategy=fs.LocalSGD(1))
        loss, grads = small_gradients(worker.params, X, Y)
        worker.step(loss, grads, again=lambda: small_gradients(worker.params, X, Y)[0])
        now, _ = small_gradients(worker.params, X, Y)
        return worker.loss, worker.loss_after_step, float(now)

    for before, again, now in fs.launch(program, 2):
        assert again == now < before


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.add_noise(0.1, 0.5, 1), optax.adam(1e-2)),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
    ],
    ids=["random", "injected"],
)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(optimizer, tmp_path):
    has_rate = "lr" in fs.jax.JaxNode(SMALL, optimizer).settings
    schedule = fs.Cosine() if has_rate else None

    def program(comm, is_resumed):
        worker = fs.jax.Worker(comm, SMALL, optimizer, strategy=fs.LocalSGD(2), schedule=schedule)
        if is_resumed:
            worker.resume(tmp_path)
        for x, y in worker.batches((X, Y), batch_size=4, epochs=2):
            worker.step(*small_gradients(worker.params, x, y))
            if worker.steps == 3 and not is_resumed:
                worker.checkpoint(tmp_path)
        worker.finish()
        return worker.flat.state.clone()

    whole = fs.launch(lambda comm: program(comm, False), 2)
    again = fs.launch(lambda comm: program(comm, True), 2)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    def program(comm):
        worker = fs.jax.Worker(comm, SMALL, SGD, strategy=fs.LocalSGD(2))
        worker.step(*small_gradients(worker.params, X, Y))
        worker.checkpoint(tmp_path)
        worker.finish()

    def another(comm):
        worker = fs.jax.Worker(comm, SMALL, optax.adam(0.1), strategy=fs.LocalSGD(2))
        with pytest.raises(fs.CheckpointError, match="of another optimizer than this one of optax"):
            worker.resume(tmp_path)

    fs.launch(program, 2)
    fs.launch(another, 2)


def in_double(size):
    with jax.enable_x64(True):
        return jnp.zeros(size, jnp.float64)


def giving(change) -> optax.GradientTransformation:
    return optax.GradientTransformation(
        lambda params: (), lambda updates, state, params: (change(updates), state)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"params": {}}, "'params' must have an array"),
        (
            {"params": {"a": {"n": jnp.arange(3)}}},
            "'params' must be an array of float16, bfloat16, float32, float64 at 'a.n' (got int32)",
        ),
        ({"params": {"f": 0.5}}, "at 'f' (got a float)"),
        (
            {"params": {"x": jnp.zeros(2), "y": jnp.zeros(2, jnp.bfloat16)}},
            "parameters and buffers must share one dtype: 'y' is torch.bfloat16, "
            "the first parameter torch.float32",
        ),
        ({"buffers": {"m": jnp.zeros(1, jnp.float16)}}, "must share one dtype: 'm' is"),
        (
            {"optimizer": 0.1},
            "'optimizer' must be one of optax's, such as optax.sgd(0.1) (got 0.1)",
        ),
        ({"order": ["w"]}, "'order' must list all of b, w once (got ['w'])"),
        ({"order": "wb"}, "'order' must list all of b, w once (got 'wb')"),
        ({"order": ["w", 0]}, "'order' must list all of b, w once (got ['w', 0])"),
        (
            {"params": {"a": {"b": jnp.zeros(2)}, "a.b": jnp.zeros(2)}},
            "'params' must have leaves of different names (got two 'a.b')",
        ),
        (
            {"params": {"x": np.zeros(2)}},
            "'params' must be float32 at 'x', unless the program itself calls "
            "jax.config.update('jax_enable_x64', True) (got float64)",
        ),
        ({"params": {"x": in_double(2)}}, "'params' must be float32 at 'x', unless"),
        (
            {"optimizer": optax.lbfgs()},
            "'optimizer' must be one that needs gradients, state, parameters and 'value', the "
            "loss, only (got scale_by_zoom_linesearch",
        ),
        (
            {"optimizer": giving(lambda updates: {"w": updates["w"]})},
            "'optimizer' must give updates of shape (3,) at 'b' (got None)",
        ),
        (
            {"optimizer": giving(lambda updates: {**updates, "w": jnp.ones((1, 1))})},
            "'optimizer' must give updates of shape (10, 3) at 'w' (got (1, 1))",
        ),
        ({"schedule": fs.Cosine()}, "'lr' must be known: give lr=, the rate that the optimizer"),
        ({"strategy": fs.SlowMo(2)}, "'lr' must be known"),
        ({"strategy": fs.AdaComm(2, 1.0)}, "'lr' must be known"),
        ({"strategy": fs.EASGD(2, rho=0.5)}, "'lr' must be known"),
        (
            {"optimizer": OPTIMIZERS["injected"], "lr": 0.1},
            "'lr' must be left out with optax.inject_hyperparams, which tells it (got 0.1)",
        ),
        (
            {
                "optimizer": optax.inject_hyperparams(optax.sgd)(
                    learning_rate=optax.constant_schedule(0.1)
                ),
                "schedule": fs.Cosine(),
            },
            "'schedule' must be left out where optax has a schedule of its own for 'lr'",
        ),
        (
            {"weight_decay_schedule": fs.Cosine()},
            "'weight_decay_schedule' must be left out with an optimizer that has no weight decay",
        ),
        ({"strategy": fs.Codistillation(2, 2, 0)}, "'strategy' must be one without 'on_loss'"),
        (
            {"strategy": fs.AsyncSGD(delay_compensation=0.1), "lr": 0.1},
            "'optimizer' must be known to be plain SGD for 'delay_compensation'",
        ),
    ],
)
def test_what_cannot_work_is_said_in_one_line_when_the_worker_is_made(given, message):
    arguments = {"params": SMALL, "optimizer": SGD, "strategy": fs.SyncSGD(), **given}

    def program(comm):
        try:
            fs.jax.Worker(comm, **arguments)
        except fs.FlockstepError as error:
            return str(error)

    for said in fs.launch(program, 2):
        assert message in said
        assert "\n" not in said


ZEROS = jax.tree.map(jnp.zeros_like, SMALL)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gradients": {"w": ZEROS["w"]}}, "made (got \"none named 'b'\")"),
        ({"gradients": {**ZEROS, "c": ZEROS["b"]}}, "made (got \"a new one, 'c'\")"),
        ({"gradients": [ZEROS["b"], ZEROS["w"]]}, "'gradients' must have the leaves"),
        (
            {"gradients": {**ZEROS, "b": jnp.zeros(2)}},
            "rank 0, step 1: 'gradients' must be torch.float32 of (3,) at 'b' "
            "(got torch.float32 of (2,))",
        ),
        (
            {"gradients": {**ZEROS, "w": ZEROS["w"].astype(jnp.bfloat16)}},
            "must be torch.float32 of (10, 3) at 'w' (got torch.bfloat16 of (10, 3))",
        ),
        ({"gradients": ZEROS, "buffers": ZEROS}, "'buffers' must have the leaves that they had"),
        ({"gradients": {**ZEROS, "b": "low"}}, "'gradients' must be an array at 'b' (got a str)"),
        ({"gradients": ZEROS, "loss": jnp.zeros(2)}, "'loss' must be one number"),
        ({"gradients": ZEROS, "loss": jnp.nan}, "the loss is nan at step 1"),
    ],
)
def test_a_step_that_is_given_something_else_says_so_in_one_line(how, message):
    def program(comm):
        worker = fs.jax.Worker(comm, SMALL, SGD, strategy=fs.SyncSGD())
        with pytest.raises(fs.FlockstepError) as raised:
            worker.step(**{"loss": jnp.zeros(()), **how})
        return str(raised.value)

    (said,) = fs.launch(program, 1)
    assert message in said
    assert "\n" not in said


def test_a_strategy_that_asks_for_a_module_is_told_that_there_is_none():
    class Asks(fs.Strategy):
        def init(self, worker):
            worker.model.register_forward_hook(print)

    def program(comm):
        fs.jax.Worker(comm, SMALL, SGD, strategy=Asks())

    with pytest.raises(
        fs.FlockstepError, match="Asks asks for worker.model, a torch module, which"
    ):
        fs.launch(program, 2)


def test_data_may_be_arrays_of_jax():
    def program(comm):
        worker = fs.jax.Worker(comm, SMALL, SGD, strategy=fs.SyncSGD())
        return [
            (x.tolist(), y.tolist())
            for data in ((X, Y), (jnp.asarray(X), jnp.asarray(Y)))
            for x, y in worker.batches(data, batch_size=12, epochs=1)
        ]

    for ours, theirs in fs.launch(program, 2):
        assert sorted(ours[1]) == sorted(theirs[1])  # another epoch, so another order
        assert sorted(ours[0]) == sorted(theirs[0])


def test_the_names_of_leaves_are_in_the_order_of_the_flat_tensor():
    def program(comm):
        with jax.enable_x64(True):
            worker = fs.jax.Worker(comm, START, SGD, strategy=fs.SyncSGD(), order=NAMES)
            plain = fs.jax.Worker(comm, START, SGD, strategy=fs.SyncSGD())
        return worker.names, plain.names, worker.flat.state

    ((names, plain, flat),) = fs.launch(program, 1)
    assert names == NAMES
    assert plain == tuple(sorted(NAMES))
    expected = np.concatenate([START[name].ravel() for name in NAMES])
    assert (flat.numpy() == expected).all()


def test_without_its_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.delitem(sys.modules, "flockstep.jax", raising=False)
    monkeypatch.delattr(fs, "jax", raising=False)
    with pytest.raises(fs.FlockstepError) as raised:
        fs.jax
    assert str(raised.value) == "fs.jax needs JAX and optax: pip install 'flockstep[jax]'"


def test_a_schedule_of_optax_goes_on_where_momentum_is_reset():
    def program(comm):
        optimizer = optax.sgd(optax.linear_schedule(1.0, 0.0, 10), momentum=0.5)
        worker = fs.jax.Worker(
            comm, {"w": jnp.zeros(1)}, optimizer, strategy=fs.LocalSGD(2, momentum="reset")
        )
        seen = [0.0]
        for _ in range(4):
            worker.step(1.0, {"w": jnp.ones(1)})
            seen.append(float(worker.params["w"][0]))
        return np.diff(seen).tolist()

    # Rates 1, 0.9, 0.8, 0.7; the momentum begins anew after two steps.
    assert fs.launch(program, 2)[0] == pytest.approx([-1.0, -1.35, -0.8, -1.05], rel=1e-6)


@pytest.mark.parametrize("traced", ["gradients", "loss"])
def test_a_step_inside_of_jit_is_refused_in_one_line(traced):
    def program(comm):
        worker = fs.jax.Worker(comm, SMALL, SGD, strategy=fs.SyncSGD())

        @jax.jit
        def step(value):
            worker.step(**{"loss": 0.0, "gradients": ZEROS, traced: value})

        with pytest.raises(fs.InvalidField) as raised:
            step(ZEROS if traced == "gradients" else 0.0)
        return str(raised.value)

    for said in fs.launch(program, 2):
        assert f"{traced!r} must be" in said
        assert "known by now" in said
        assert "call worker.step outside of jax.jit" in said
        assert "\n" not in said


def test_an_optimizer_whose_updates_change_later_is_refused_in_one_line():
    """Its state tells it apart, so that it is traced anew."""
    optimizer = optax.GradientTransformation(
        lambda params: (),
        lambda updates, state, params: ({"x": jnp.ones(1)} if state else updates, (jnp.ones(1),)),
    )

    def program(comm):
        worker = fs.jax.Worker(comm, {"x": jnp.zeros(3)}, optimizer, strategy=fs.SyncSGD())
        for _ in range(2):
            worker.step(0.0, {"x": jnp.zeros(3)})

    with pytest.raises(fs.InvalidField) as raised:
        fs.launch(program, 1)
    message = "'optimizer' must give updates of shape (3,) at 'x' (got (1,))"
    assert str(raised.value) == f"rank 0, step 2: {message}"


@pytest.mark.parametrize(
    ("params", "gradients", "message"),
    [
        ((jnp.zeros(2), jnp.zeros(3)), [jnp.zeros(2), jnp.zeros(3)], "with a tuple (got a list)"),
        (
            {"a": [{0: jnp.zeros(2)}] * 200},
            {"a": [*[{0: jnp.zeros(2)}] * 100, *[{"0": jnp.zeros(2)}] * 100]},
            "made, with a dict of [0] (got a dict of ['0'])",
        ),
    ],
)
def test_a_tree_of_another_make_is_told_by_its_first_difference(params, gradients, message):
    def program(comm):
        worker = fs.jax.Worker(comm, params, SGD, strategy=fs.SyncSGD())
        worker.step(0.0, gradients)

    with pytest.raises(fs.InvalidField) as raised:
        fs.launch(program, 1)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 300


def test_a_whole_module_of_nnx_is_told_what_to_give_instead():
    modules = [nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(6)]

    def program(comm):
        net = nnx.Sequential(*modules)
        worker = fs.jax.Worker(comm, net, SGD, strategy=fs.LocalSGD(2))
        _, grads = nnx.value_and_grad(lambda net: net(jnp.ones((1, 2))).mean())(worker.params)
        worker.step(0.0, grads)

    with pytest.raises(fs.InvalidField) as raised:
        fs.launch(program, 1)
    assert str(raised.value).endswith("Give a module of nnx as nnx.split(model, nnx.Param)")
    assert len(str(raised.value)) < 300


def test_an_optimizer_that_wants_the_loss_gets_it():
    """The rate is halved whenever the loss has not fallen for two steps."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    optimizer = optax.chain(optax.sgd(1.0), plateau)

    def program(comm, losses):
        worker = fs.jax.Worker(comm, {"x": jnp.zeros(1)}, optimizer, strategy=fs.LocalSGD(100))
        seen = [0.0]
        for loss in losses:
            worker.step(loss, {"x": jnp.ones(1)})
            seen.append(worker.flat.state.item())
        return np.diff(seen).tolist()

    falling, level = [5.0, 4.0, 3.0, 2.0, 1.0], [5.0] * 5
    ours, theirs = fs.launch(lambda comm: program(comm, (falling, level)[comm.rank]), 2)
    assert ours == [-1.0] * 5
    assert theirs == plainly(optimizer, level)
    assert min(map(abs, theirs)) < 1


def plainly(optimizer, losses):
    """The updates of a plain loop of optax."""
    params = {"x": jnp.zeros(1)}
    state, told = optimizer.init(params), []
    for loss in losses:
        updates, state = optimizer.update({"x": jnp.ones(1)}, state, params, value=loss)
        told.append(updates["x"].item())
    return told


def test_without_its_packages_the_name_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.delitem(sys.modules, "flockstep.jax", raising=False)
    monkeypatch.delattr(fs, "jax", raising=False)
    assert not hasattr(fs, "jax")
    assert getattr(fs, "jax", None) is None
