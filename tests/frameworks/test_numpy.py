"""Workers of NumPy arrays: every strategy as with PyTorch, and what is the worker's own."""

from __future__ import annotations

import math
import re
import time

import numpy as np
import pytest
import torch
from tests.frameworks.harness import (
    START,
    assert_alike,
    momentum,
    numpy_gradients,
    own_batches,
    trained,
)
from tests.strategies.table import TABLE, VARIANTS

import flockstep as fs
from flockstep.flat import FlatTensors

STRATEGIES = [
    strategy
    for strategy in (*(row.strategy for row in TABLE), *VARIANTS[::3])
    if not isinstance(strategy, fs.Codistillation)
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_every_strategy_is_what_it_is_with_torch(strategy):
    has_momentum = not getattr(strategy, "delay_compensation", 0)
    ours, theirs = (
        trained([strategy], name, has_momentum=has_momentum) for name in ("numpy", "torch")
    )
    assert_alike(ours, theirs, 1e-9)


def test_real_processes_give_what_the_simulator_gives(local):
    strategies = [
        fs.LocalSGD(3),
        fs.SyncSGD(),
        fs.NoSync(0.3),
        fs.DiLoCo(3),
        fs.SyncSGD(codec=fs.TopK(0.1)),
    ]
    assert_alike(trained(strategies, "numpy", local), trained(strategies, "torch"), 1e-9)


def test_on_shared_pages_the_arrays_are_the_shared_memory(local):
    """Without gradients nobody moves, and one worker's change is seen by the other, who moves there
    later.
    """

    def program(comm):
        plain = FlatTensors.live_in

        def late(self, memory):
            time.sleep(0.3)
            plain(self, memory)

        if comm.rank == 0:
            FlatTensors.live_in = late
        params = {"x": np.zeros(3)}
        worker = fs.numpy.Worker(comm, params, strategy=fs.Hogwild(), lr=0.1)
        if comm.rank == 1:
            worker.step(0.0, {"x": np.array([1.0, 2.0, 3.0])})
        FlatTensors.live_in = plain
        comm.barrier()
        return worker.params["x"].copy()

    for seen in fs.launch(program, 2, local):
        np.testing.assert_allclose(seen, [-0.1, -0.2, -0.3])


def test_one_worker_is_a_plain_loop_to_the_bit():
    def program(comm):
        worker = fs.numpy.Worker(comm, START, momentum, strategy=fs.LocalSGD(2), lr=0.1)
        for x, y in own_batches(comm, 6):
            loss, grads, _ = numpy_gradients(worker.params, x, y)
            worker.step(loss, grads)
        return worker.finish(), list(own_batches(comm, 6))

    ((ours, batches),) = fs.launch(program, 1)
    params, state = {name: array.copy() for name, array in START.items()}, {}
    for x, y in batches:
        momentum(params, numpy_gradients(params, x, y)[1], 0.1, state)
    for name, array in params.items():
        assert (ours[name] == array).all()


def test_the_start_of_the_program_is_left_alone_and_the_arrays_are_views_of_the_flat_tensor():
    start = {"x": np.zeros(3), "y": np.ones((2, 2), np.float64)}

    def program(comm):
        worker = fs.numpy.Worker(comm, start, strategy=fs.LocalSGD(1), lr=1.0)
        seen = worker.params
        worker.step(0.0, {"y": np.ones((2, 2)), "x": np.ones(3)})
        final = worker.finish()
        final["x"][:] = 7  # a copy
        return seen["x"].tolist(), worker.flat.state.tolist()

    assert fs.launch(program, 2) == [([-1.0] * 3, [-1.0] * 3 + [0.0] * 4)] * 2
    assert (start["x"] == 0).all()


def test_batches_are_those_of_the_torch_worker_as_arrays():
    data = np.arange(40.0).reshape(20, 2), np.arange(20)

    def program(comm):
        ours = fs.numpy.Worker(comm, {"x": np.zeros(1)}, strategy=fs.SyncSGD(), lr=0.1)
        net = torch.nn.Linear(1, 1)
        theirs = fs.Worker(comm, net, torch.optim.SGD(net.parameters(), 0.1), fs.SyncSGD())
        pairs = zip(
            ours.batches(data, batch_size=4, epochs=2),
            theirs.batches(data, batch_size=4, epochs=2),
            strict=True,
        )
        alike = [
            type(x) is np.ndarray and (x == a.numpy()).all() and (y == b.numpy()).all()
            for (x, y), (a, b) in pairs
        ]
        by_epoch = ours.batches({"x": data[0]}, batch_size=5).by_epoch()
        kinds = {type(batch["x"]) for epoch in by_epoch for batch in epoch}
        return len(alike), all(alike), kinds == {np.ndarray}

    assert fs.launch(program, 2, seed=5) == [(6, True, True)] * 2


def test_buffers_are_exchanged_behind_the_parameters():
    def program(comm):
        worker = fs.numpy.Worker(
            comm,
            {"x": np.zeros(2)},
            strategy=fs.LocalSGD(2),
            lr=0.1,
            buffers={"mean": np.zeros(1)},
        )
        for _ in range(2):
            worker.step(0.0, {"x": np.zeros(2)}, buffers={"mean": np.full(1, float(comm.rank))})
        params, buffers = worker.finish()
        return params["x"].tolist(), buffers["mean"].tolist(), worker.buffers["mean"].tolist()

    assert fs.launch(program, 3) == [([0.0, 0.0], [1.0], [1.0])] * 3


def test_schedules_clipping_and_callbacks_do_what_they_do_with_torch():
    def ours(comm):
        worker = fs.numpy.Worker(
            comm, {"x": np.ones(4)}, strategy=fs.SyncSGD(), lr=0.5, schedule=fs.Cosine()
        )
        worker.total_steps = 4
        worker.clip_gradients(1.0)
        worker.on_gradients(lambda flat: flat.add_(1.0))
        for step in range(4):
            worker.step(0.0, {"x": np.full(4, float(comm.rank + step))})
        return worker.flat.state, worker.gradient_norm

    def theirs(comm):
        net = torch.nn.Linear(4, 1, bias=False).double()
        torch.nn.init.ones_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), 0.5)
        worker = fs.Worker(comm, net, optimizer, fs.SyncSGD(), schedule=fs.Cosine())
        worker.total_steps = 4
        worker.clip_gradients(1.0)
        worker.on_gradients(lambda flat: flat.add_(1.0))
        for step in range(4):
            net.weight.grad = torch.full((1, 4), float(comm.rank + step)).double()
            worker.step(0.0)
        return worker.flat.state, worker.gradient_norm

    for (x, norm), (x_there, norm_there) in zip(
        fs.launch(ours, 2), fs.launch(theirs, 2), strict=True
    ):
        assert torch.allclose(x, x_there, rtol=1e-12)
        assert math.isclose(norm, norm_there)


@pytest.mark.parametrize("strategy", [fs.LocalSGD(3), fs.EASGD(2), fs.PSOPS(3)], ids=repr)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(strategy, tmp_path):
    data = np.random.default_rng(0).normal(size=(60, 10)), np.arange(60) % 3

    def program(comm, steps, is_resumed):
        worker = fs.numpy.Worker(comm, START, momentum, strategy=strategy, lr=0.1)
        worker.total_steps = 12
        if is_resumed:
            assert worker.resume(tmp_path) == {"note": 5}
        for x, y in worker.batches(data, batch_size=5, epochs=2):
            loss, grads, _ = numpy_gradients(worker.params, x, y)
            worker.step(loss, grads)
            if worker.steps == 5 and not is_resumed:
                worker.checkpoint(tmp_path, {"note": 5})
            if worker.steps == steps:
                break
        worker.finish()
        return worker.flat.state.clone()

    whole = fs.launch(lambda comm: program(comm, 12, False), 2)
    again = fs.launch(lambda comm: program(comm, 12, True), 2)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


X3 = {"x": np.zeros(3)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"params": {}}, "'params' must have an array"),
        ({"params": [1.0]}, "'params' must be a dict of arrays"),
        (
            {"params": {"x": np.zeros(3, int)}},
            "'params' must be an array of float16, float32 or float64 at 'x' (got int64)",
        ),
        ({"params": {"x": torch.zeros(3)}}, "at 'x' (got a Tensor of torch.float32)"),
        ({"params": {"x": {"y": np.zeros(3)}}}, "at 'x' (got a dict)"),
        (
            {"params": {"x": np.zeros(3), "y": np.zeros(2, np.float32)}},
            "parameters and buffers must share one dtype: 'y' is torch.float32, "
            "the first parameter torch.float64",
        ),
        ({"buffers": {"m": np.zeros(1, np.float32)}}, "must share one dtype: 'm' is torch.float32"),
        ({"update": 3}, "'update' must be a function of params, grads, lr and state (got 3)"),
        ({"lr": 0}, "'lr' must be above 0"),
        ({"strategy": "sync"}, "'strategy' must be a strategy such as fs.LocalSGD(period=8)"),
        ({"strategy": fs.Codistillation(2, 2, 0)}, "'strategy' must be one without 'on_loss'"),
        (
            {"strategy": fs.AsyncSGD(delay_compensation=0.1), "update": momentum},
            "'optimizer' must be known to be plain SGD for 'delay_compensation', as fs.numpy's own "
            "is (got 'NumpyNode')",
        ),
    ],
)
def test_what_cannot_work_is_said_in_one_line_when_the_worker_is_made(given, message):
    arguments = {"params": X3, "strategy": fs.SyncSGD(), "lr": 0.1, **given}

    def program(comm):
        try:
            fs.numpy.Worker(comm, **arguments)
        except fs.FlockstepError as error:
            return str(error)

    for said in fs.launch(program, 2):
        assert message in said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"gradients": {"x": np.zeros(2)}},
            "rank 0, step 1: 'gradients' must be torch.float64 of (3,) at 'x' "
            "(got torch.float64 of (2,))",
        ),
        (
            {"gradients": {"x": np.zeros(3, np.float32)}},
            "must be torch.float64 of (3,) at 'x' (got torch.float32 of (3,))",
        ),
        ({"gradients": {}}, "when the worker was made (got \"none named 'x'\")"),
        ({"gradients": {**X3, "y": np.zeros(1)}}, "was made (got \"a new one, 'y'\")"),
        ({"gradients": None}, "'gradients' must be a dict of arrays (got None)"),
        ({"gradients": X3, "buffers": X3}, "'buffers' must have the leaves that they had"),
        ({"gradients": X3, "loss": "low"}, "'loss' must be one number"),
        ({"gradients": X3, "loss": math.nan}, "the loss is nan at step 1"),
        ({"gradients": X3, "accuracy": "good"}, "'accuracy' must be one number"),
    ],
)
def test_a_step_that_is_given_something_else_says_so_in_one_line(how, message):
    def program(comm):
        worker = fs.numpy.Worker(comm, X3, strategy=fs.SyncSGD(), lr=0.1)
        with pytest.raises(fs.FlockstepError) as raised:
            worker.step(**{"loss": 0.0, **how})
        return str(raised.value)

    (said,) = fs.launch(program, 1)
    assert message in said
    assert "\n" not in said


def test_arrays_are_changed_by_the_worker_alone_unless_it_is_meant():
    def program(comm):
        worker = fs.numpy.Worker(comm, X3, strategy=fs.LocalSGD(1), lr=0.1)
        with pytest.raises(ValueError, match="read-only"):
            worker.params["x"] -= 1
        with worker.changing_parameters():
            worker.params["x"][:] = comm.rank
        with pytest.raises(ValueError, match="read-only"):
            worker.params["x"] -= 1
        worker.step(0.0, X3)
        return worker.snapshot()["x"].tolist(), worker.params["x"].tolist()

    assert fs.launch(program, 2) == [([0.5] * 3, [0.5] * 3)] * 2


def test_an_update_may_return_new_arrays():
    def program(comm):
        def update(params, grads, lr, state):
            return {name: params[name] - lr * grads[name] for name in params}

        start = {"w": np.ones(3, np.float32)}
        worker = fs.numpy.Worker(comm, start, update, strategy=fs.LocalSGD(2), lr=0.5)
        worker.step(1.0, {"w": np.ones(3, np.float32)})
        return worker.params["w"].tolist()

    assert fs.launch(program, 2) == [[0.5] * 3] * 2


def updated(update, start, steps=2):
    """What an update makes of parameters, with gradients of ones and a rate of a half."""

    def program(comm):
        worker = fs.numpy.Worker(comm, start, update, strategy=fs.LocalSGD(2), lr=0.5)
        for _ in range(steps):
            worker.step(1.0, {name: np.ones_like(array) for name, array in start.items()})
        return {name: array.tolist() for name, array in worker.params.items()}

    return fs.launch(program, 2)[0]


def test_an_update_may_put_new_arrays_in_the_place_of_the_old_ones():
    def rebinding(params, grads, lr, state):
        params["a"] = params["a"] - lr * grads["a"]
        params["b"] -= lr * grads["b"]  # and change others in place

    def swapping(params, grads, lr, state):
        params["a"], params["b"] = params["b"], params["a"]

    start = {"a": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}
    assert updated(rebinding, start) == {"a": [0.0] * 2, "b": [-1.0] * 2}
    assert updated(swapping, start, steps=1) == {"a": [0.0] * 2, "b": [1.0] * 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda params: params.update(y=np.zeros(1)),
            "'params' must have the leaves that they had when the worker was made "
            "(got \"a new one, 'y'\")",
        ),
        (lambda params: params.pop("x"), "worker was made (got \"none named 'x'\")"),
        (
            lambda params: params.update(x=np.zeros(2)),
            "'params' must be torch.float64 of (3,) at 'x' (got torch.float64 of (2,))",
        ),
        (
            lambda params: params.update(x=np.zeros(3, np.float32)),
            "'params' must be torch.float64 of (3,) at 'x' (got torch.float32 of (3,))",
        ),
        (lambda params: params.update(x=[0.0] * 3), "float64 at 'x' (got a list)"),
    ],
)
def test_an_update_that_leaves_other_parameters_says_so_in_one_line(change, message):
    def update(params, grads, lr, state):
        change(params)

    with pytest.raises(fs.InvalidField) as raised:
        updated(update, X3)
    assert re.match("rank [01], step 1: 'params' must", str(raised.value))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_parameters_without_dimensions_take_numbers_of_numpy():
    def program(comm):
        worker = fs.numpy.Worker(
            comm, {"x": np.zeros((), np.float32)}, strategy=fs.SyncSGD(), lr=0.5
        )
        worker.step(0.0, {"x": np.float32(comm.rank)})
        worker.step(0.0, {"x": (worker.params["x"] - 1).mean()})
        return worker.finish()["x"].item()

    assert fs.launch(program, 2) == [0.375] * 2


def adam(params, grads, lr, state):
    state["t"] = state.get("t", 0) + 1
    state["fall"] = state.get("fall", 1.0) * 0.9
    state["rise"] = np.float32(1 - state["fall"])
    for name, gradient in grads.items():
        mean = state.setdefault(f"{name} mean", np.zeros_like(gradient))
        mean += 0.1 * (gradient - mean)
        params[name] -= lr * mean / state["rise"] / state["t"]


def test_an_optimizer_that_keeps_numbers_goes_on_from_a_checkpoint_to_the_bit(tmp_path):
    def program(comm, is_resumed):
        start = {"x": np.ones(3, np.float32)}
        worker = fs.numpy.Worker(comm, start, adam, strategy=fs.LocalSGD(2), lr=0.1)
        if is_resumed:
            worker.resume(tmp_path)
        while worker.steps < 6:
            worker.step(0.0, {"x": worker.params["x"] + np.float32(comm.rank)})
            if worker.steps == 3 and not is_resumed:
                worker.checkpoint(tmp_path)
        worker.finish()
        kinds = {name: type(value) for name, value in worker.node.state.items()}
        return worker.flat.state.tolist(), kinds

    whole = fs.launch(lambda comm: program(comm, False), 2)
    assert whole == fs.launch(lambda comm: program(comm, True), 2)
    _, kinds = whole[0]
    assert kinds == {"t": int, "fall": float, "rise": np.float32, "x mean": np.ndarray}


def test_state_that_cannot_be_kept_is_refused_in_one_line(tmp_path):
    def program(comm):
        def update(params, grads, lr, state):
            state["both"] = {"x": grads["x"]}

        worker = fs.numpy.Worker(comm, X3, update, strategy=fs.LocalSGD(2), lr=0.1)
        worker.step(0.0, X3)
        worker.checkpoint(tmp_path)

    with pytest.raises(fs.InvalidField) as raised:
        fs.launch(program, 2)
    assert "'state' must keep arrays and numbers only" in str(raised.value)
    assert "a dict at 'both'" in str(raised.value)


def test_averaged_state_is_that_of_the_same_name_on_all_workers():
    """In whatever order each worker has made it."""

    def program(comm):
        def update(params, grads, lr, state):
            for name in ("b", "a", "other", "more")[:: 1 if comm.rank else -1]:
                state.setdefault(name, np.full(1, ord(name[0]) + comm.rank * 2.0))
            state.setdefault("half", comm.rank / 2)
            state.setdefault("t", comm.rank)

        strategy = fs.LocalSGD(2, momentum="average")
        start = {"b": np.zeros(1), "a": np.zeros(1)}
        worker = fs.numpy.Worker(comm, start, update, strategy=strategy, lr=0.1)
        for _ in range(2):
            worker.step(0.0, start)
        return {name: np.asarray(value).item() for name, value in worker.node.state.items()}

    for rank, state in enumerate(fs.launch(program, 2)):
        arrays = {name: ord(name[0]) + 1.0 for name in ("a", "b", "other", "more")}
        assert state == {**arrays, "half": 0.25, "t": rank}
