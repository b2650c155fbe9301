"""A framework of one's own, several frameworks in one run, and all backends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from tests.frameworks.harness import START, assert_alike, numpy_gradients, trained

import flockstep as fs

FLEETS = {
    "half and half": ("torch", "jax", "torch", "jax"),
    "all three": ("jax", "numpy", "torch", "numpy"),
}


@pytest.mark.parametrize("fleet", FLEETS.values(), ids=list(FLEETS))
def test_a_mixed_fleet_is_what_one_of_torch_alone_is(fleet):
    strategies = [
        fs.LocalSGD(3),
        fs.SyncSGD(),
        fs.LocalSGD(2, momentum="average"),
        fs.EAWild(2),
        fs.DiLoCo(3, codec=fs.Int8()),
        fs.GoSGD(0.5),
    ]
    assert_alike(trained(strategies, fleet), trained(strategies, "torch"), 1e-5)


def test_a_mixed_fleet_of_real_processes_is_what_the_simulator_gives(local):
    strategies = [fs.LocalSGD(3), fs.SyncSGD()]
    ours = trained(strategies, ("torch", "jax"), local, 2)
    assert_alike(ours, trained(strategies, "torch", workers=2), 1e-5)


@pytest.mark.parametrize("kept", ["torchrun", "ray"])
def test_jax_and_numpy_on_several_hosts_give_what_the_simulator_gives(kept, request):
    strategies = [fs.LocalSGD(3), fs.SyncSGD()]
    ours = trained(strategies, ("jax", "numpy"), request.getfixturevalue(kept), 2)
    assert_alike(ours, trained(strategies, "torch", workers=2), 1e-6)


@pytest.mark.parametrize("kept", ["torchrun", "ray"])
def test_trees_of_arrays_reach_the_launcher_once_they_are_numpys(kept, request):
    def program(comm):
        worker = fs.jax.Worker(
            comm, {"x": np.ones(2, np.float32)}, optax.sgd(0.1), strategy=fs.SyncSGD()
        )
        worker.step(0.0, {"x": np.ones(2, np.float32)})
        return jax.tree.map(np.asarray, worker.finish())

    for params in fs.launch(program, 2, request.getfixturevalue(kept)):
        np.testing.assert_allclose(params["x"], 0.9, rtol=1e-6)


class OfLists(fs.Node):
    """A framework whose parameters are lists of numbers."""

    def __init__(self, numbers):
        super().__init__(shapes=[(len(numbers),)], dtype=torch.float64, lr=0.1)
        self.numbers = numbers
        self.shown = 0

    def fill(self, state):
        state.copy_(torch.tensor(self.numbers, dtype=state.dtype))

    def show(self, state):
        self.numbers = state.tolist()
        self.shown += 1

    def gather(self, gradients, flat):
        flat.copy_(torch.tensor(gradients, dtype=flat.dtype))

    def update(self, parameters, gradients):
        parameters.sub_(gradients, alpha=self.settings["lr"])


@pytest.mark.parametrize("strategy", [fs.LocalSGD(2), fs.EAMSGD(1), fs.AsyncSGD()], ids=repr)
def test_four_methods_make_a_framework_of_ones_own(strategy):
    def ours(comm):
        node = OfLists([1.0, 2.0])
        worker = fs.NodeWorker(comm, node, strategy)
        for step in range(4):
            # The gradient of x²/2, and what is the worker's own.
            worker.step(0.0, [x + comm.rank + step for x in node.numbers])
        return worker.finish().tolist(), worker.snapshot().tolist(), node.shown

    def theirs(comm):
        worker = fs.numpy.Worker(comm, {"x": np.array([1.0, 2.0])}, strategy=strategy, lr=0.1)
        for step in range(4):
            worker.step(0.0, {"x": worker.params["x"] + comm.rank + step})
        return worker.finish()["x"].tolist()

    expected = fs.launch(theirs, 2)
    for (final, _, shown), other in zip(fs.launch(ours, 2), expected, strict=True):
        assert final == pytest.approx(other, rel=1e-12)
        assert shown == 6  # at the start, after each step, and at the end


def test_what_a_node_of_ones_own_has_not_is_said_in_one_line():
    def program(comm):
        said = []
        for attempt in (
            lambda: fs.NodeWorker(comm, "node", fs.SyncSGD()),
            lambda: OfLists([]).settings or fs.NodeWorker(comm, OfLists, fs.SyncSGD()),
            lambda: fs.NodeWorker(comm, OfLists([1.0]), fs.SyncSGD()).step(
                0.0, [1.0], buffers=[1.0]
            ),
        ):
            try:
                attempt()
            except fs.InvalidField as error:
                said.append(str(error))
        return said

    ((first, *rest),) = fs.launch(program, 1)
    assert first == "'node' must be an fs.Node (got 'node')"
    assert rest == ["rank 0, step 1: 'buffers' must be left out: this node takes none"]


def test_models_of_another_size_are_refused_before_they_meet():
    def program(comm):
        params = {"x": np.zeros(2 + comm.rank)}
        fs.numpy.Worker(comm, params, strategy=fs.SyncSGD(), lr=0.1)

    with pytest.raises(fs.MismatchError):
        fs.launch(program, 2)


def refused(make: Any, backend: Any = "sim") -> list[Any]:
    """What each worker hears when it is made, with the bytes and seconds that it took."""

    def program(comm: fs.Comm) -> Any:
        said = ""
        try:
            make(comm)
        except fs.MismatchError as error:
            said = str(error)
        return said, comm.meter.bytes_sent, comm.meter.exchanges, comm.meter.seconds_waiting

    return fs.launch(program, 2, backend)


SQUARES = {"a": np.zeros((2, 2), np.float32), "b": np.ones((2, 2), np.float32)}
TURNED = dict(reversed(SQUARES.items()))
NEED = "all workers of a run need the same leaves in the same order"
REMEDY = "fs.jax.Worker takes order=[…] of names, fs.numpy.Worker the order of its dict"
SGD = optax.sgd(0.1)


def by_numpy(comm: fs.Comm, params: Any, **how: Any) -> None:
    fs.numpy.Worker(comm, params, strategy=fs.SyncSGD(), lr=0.1, **how)


def by_jax(comm: fs.Comm, params: Any, **how: Any) -> None:
    fs.jax.Worker(comm, params, SGD, strategy=fs.SyncSGD(), **how)


def by_torch(comm: fs.Comm, net: torch.nn.Module) -> None:
    fs.Worker(comm, net, torch.optim.SGD(net.parameters(), 0.1), fs.SyncSGD())


def with_parts(**shapes: tuple[int, ...]) -> torch.nn.Module:
    net = torch.nn.Module()
    for name, shape in shapes.items():
        net.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    return net


OTHERS = {
    "dicts of numpy": (
        lambda comm: by_numpy(comm, TURNED if comm.rank else SQUARES),
        f"rank 1 has 'b' of shape (2, 2) as leaf 0 where rank 0 has 'a' of shape (2, 2): {NEED}. "
        f"{REMEDY}",
    ),
    "buffers": (
        lambda comm: by_numpy(comm, {"x": SQUARES["a"]}, buffers=TURNED if comm.rank else SQUARES),
        f"rank 1 has 'b' of shape (2, 2) as leaf 1 where rank 0 has 'a' of shape (2, 2): {NEED}. "
        f"{REMEDY}",
    ),
    "names": (
        lambda comm: by_numpy(comm, {"v" if comm.rank else "w": np.zeros(2)}),
        f"rank 1 has 'v' of shape (2,) as leaf 0 where rank 0 has 'w' of shape (2,): {NEED}. "
        f"{REMEDY}",
    ),
    "shapes": (
        lambda comm: by_numpy(comm, {"w": np.zeros((2, 3) if comm.rank else (3, 2))}),
        f"rank 1 has 'w' of shape (2, 3) as leaf 0 where rank 0 has 'w' of shape (3, 2): {NEED}",
    ),
    "one more": (
        lambda comm: by_numpy(comm, {"w": np.zeros(2), **({"v": np.ones(1)} if comm.rank else {})}),
        f"rank 1 has 'v' of shape (1,) as leaf 1 where rank 0 has none: {NEED}. {REMEDY}",
    ),
    "types": (
        lambda comm: by_numpy(comm, {"w": np.zeros(2, np.float32 if comm.rank else np.float64)}),
        "rank 1 has parameters of torch.float32, rank 0 of torch.float64: all workers of a run "
        "need the same type",
    ),
    "orders of jax": (
        lambda comm: by_jax(comm, SQUARES, order=["b", "a"] if comm.rank else None),
        f"rank 1 has 'b' of shape (2, 2) as leaf 0 where rank 0 has 'a' of shape (2, 2): {NEED}. "
        f"{REMEDY}",
    ),
    "an order that was forgotten": (
        lambda comm: (
            by_jax(comm, SQUARES) if comm.rank else by_torch(comm, with_parts(b=(2, 2), a=(2, 2)))
        ),
        f"rank 1 has 'a' of shape (2, 2) as leaf 0 where rank 0 has 'b' of shape (2, 2): {NEED}. "
        f"{REMEDY}",
    ),
    "a matrix and its transpose, of other names": (
        lambda comm: (
            by_jax(comm, {"kernel": np.zeros((2, 3), np.float32)})
            if comm.rank
            else by_torch(comm, torch.nn.Linear(2, 3, bias=False))
        ),
        f"rank 1 has 'kernel' of shape (2, 3) as leaf 0 where rank 0 has 'weight' of shape (3, 2): "
        f"{NEED}. {REMEDY}",
    ),
    "modules": (
        lambda comm: by_torch(
            comm, with_parts(b=(2,), a=(2,)) if comm.rank else with_parts(a=(2,), b=(2,))
        ),
        f"rank 1 has 'b' of shape (2,) as leaf 0 where rank 0 has 'a' of shape (2,): {NEED}",
    ),
}


@pytest.mark.parametrize(("make", "message"), OTHERS.values(), ids=list(OTHERS))
def test_models_of_other_leaves_are_refused_on_every_worker_in_one_line(make, message):
    assert refused(make) == [(message, 0, 0, 0.0)] * 2


def test_real_processes_refuse_models_of_another_order_on_every_worker(local):
    make, message = OTHERS["dicts of numpy"]
    assert [said for said, *_ in refused(make, local)] == [message] * 2


ALIKE = {
    "an order that is given": (
        lambda comm: by_torch(comm, with_parts(b=(2, 2), a=(2, 2))),
        lambda comm: by_jax(comm, SQUARES, order=["b", "a"]),
    ),
    "other names, and a column": (
        lambda comm: by_torch(comm, torch.nn.Linear(4, 1)),
        lambda comm: by_numpy(comm, {"w": np.zeros(4, np.float32), "c": np.zeros((), np.float32)}),
    ),
    "all in one": (
        lambda comm: by_torch(comm, torch.nn.Linear(4, 1).double()),
        lambda comm: fs.NodeWorker(comm, OfLists([0.0] * 5), fs.SyncSGD()),
    ),
}


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=list(ALIKE))
def test_frameworks_may_name_and_shape_the_same_numbers_otherwise(one, other):
    told = refused(lambda comm: (other if comm.rank else one)(comm))
    assert told == [("", 0, 0, 0.0)] * 2


def test_jax_and_numpy_agree_with_another_order_of_their_own(tmp_path):
    """The order of leaves is part of the flat model, not of what is trained."""

    def program(comm, names):
        params = {name: START[name] for name in names}
        worker = fs.numpy.Worker(comm, params, strategy=fs.LocalSGD(2), lr=0.1)
        x = np.random.default_rng(comm.rank).normal(size=(5, 10))
        for _ in range(4):
            loss, grads, _ = numpy_gradients(worker.params, x, np.arange(5) % 3)
            worker.step(loss, grads)
        return worker.finish()

    one, other = (
        fs.launch(lambda comm, names=names: program(comm, names), 2)[0]
        for names in (tuple(START), tuple(reversed(START)))
    )
    for name, array in one.items():
        assert (array == other[name]).all()


def test_the_page_of_frameworks_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    names: dict[str, object] = {}
    for each in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(each, "frameworks.md", "exec"), names)
    by_jax, by_numpy, by_mine = capsys.readouterr().out.splitlines()
    assert by_jax.split() == by_numpy.split() == ["[", "1.", "-2.", "3.", "0.5]"]
    assert by_mine == "tensor([1.0000, 2.0000])"


def pulled(comm: fs.Comm, worker: Any, gradient: Any) -> Any:
    """Steps in whatever order, of gradients that are this worker's own: where it was, and the
    centre.
    """
    for _ in range(6):
        worker.step(0.0, {"x": gradient})
    own = worker.flat.state.double().numpy().copy()
    comm.barrier()
    return own, np.asarray(worker.finish()["x"], np.float64)


@pytest.mark.parametrize("framework", ["numpy", "jax"])
def test_real_processes_pull_at_a_centre_and_nothing_is_lost(framework, local):
    """Σ x + x̃ changes by gradients alone, whoever comes first."""

    def program(comm):
        start, strategy = {"x": np.ones(3, np.float32)}, fs.EAWild(2)
        if framework == "jax":
            worker = fs.jax.Worker(comm, start, optax.sgd(0.1), strategy=strategy)
        else:
            worker = fs.numpy.Worker(comm, start, strategy=strategy, lr=0.1)
        return pulled(comm, worker, np.full(3, comm.rank + 1.0, np.float32))

    (one, centre), (other, centre_there) = fs.launch(program, 2, local)
    assert (centre == centre_there).all()
    assert (centre < 1).all()
    np.testing.assert_allclose(one + other + centre, 3 - 0.1 * 6 * (1 + 2), rtol=1e-5)
