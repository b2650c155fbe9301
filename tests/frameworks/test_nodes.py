"""A framework of one's own, several frameworks in one run, and all backends."""

from __future__ import annotations

import re
from pathlib import Path

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
