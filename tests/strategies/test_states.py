"""States of strategies are data: saved to files, and loaded into a state that was just made."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies.harness import (
    B,
    W,
    X,
    Y,
    momentum_with,
    net,
    net_with_statistics,
    sgd,
    train,
)
from tests.strategies.table import TABLE, VARIANTS
from torch import nn
from torch.nn import functional as F

import flockstep as fs
from flockstep.strategies import load_state, save_state, shared_tensors

ALL = [*dict.fromkeys([*(row.strategy for row in TABLE), *VARIANTS])]
SAVED, STEPS = (4, 8), 8  # the last one before finish


def through_files(tensors, values):
    """As they come back from safetensors and from JSON as the standard has it."""
    text = json.dumps(values, allow_nan=False)
    return safetensors.torch.load(safetensors.torch.save(tensors)), json.loads(text)


def spoil(value: Any) -> Any:
    """The data of a state with something else in each place."""
    if isinstance(value, torch.Tensor):
        value.fill_(3)
    elif isinstance(value, torch.Generator):
        value.manual_seed(99)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = np.random.default_rng(99).bit_generator.state
    elif isinstance(value, list | deque):
        value.extend([spoil(value.pop()) for _ in range(len(value))])
    elif isinstance(value, torch.optim.Optimizer):
        value.param_groups[0]["lr"] = 3.0
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            if not each.metadata:
                setattr(value, each.name, spoil(getattr(value, each.name)))
    elif isinstance(value, int | float):
        return value + 3
    return value


def made_anew(worker: fs.Worker) -> None:
    """Save the strategy's state, throw it away, make another and load what was saved."""
    comm = worker.comm
    with comm.unmetered(), torch.no_grad(), worker._names:
        comm.barrier()
        files = through_files(*save_state(worker.state))
        shared = {name: each.read() for name, each in shared_tensors(worker.state).items()}
        shared, _ = through_files(shared, {})
        if isinstance(worker.strategy, fs.Codistillation):
            worker.state.hook.remove()

        comm.barrier()
        made, make = [], comm.shared
        comm.shared = lambda *how, **more: made.append(make(*how, **more)) or made[-1]
        worker.state = spoil(worker.strategy.init(worker))
        del comm.shared
        for each in made:
            each.write(torch.full(each.shape, 3, dtype=each.dtype))

        comm.barrier()
        load_state(worker.state, *files)
        for name, each in shared_tensors(worker.state).items():
            each.write(shared[name])
        comm.barrier()


def met(worker: fs.Worker) -> None:
    with worker.comm.unmetered():
        worker.comm.barrier()


SERVERS = (fs.Hogwild, fs.AsyncSGD, fs.Downpour, fs.StaleSync, fs.EASGD, fs.EAMSGD, fs.EAWild)


def outcome(strategy, model, lanes, at_boundary):
    """Every worker's state, clock and bytes, in a run that does something between some steps."""

    def program(comm):
        worker, _ = train(
            comm,
            strategy,
            make_model=model,
            steps=STEPS,
            momentum=momentum_with(strategy),
            after=lambda worker: worker.steps in SAVED and at_boundary(worker),
        )
        before = worker.flat.state.clone()
        worker.finish()
        figures = comm.now(), comm.meter.bytes_sent, comm.meter.exchanges
        return before, worker.flat.state.clone(), figures

    return fs.launch(program, W, seed=3, compute=fs.Compute(0.01, jitter=0.5), lanes=lanes)


@pytest.mark.parametrize("strategy", ALL, ids=repr)
def test_a_run_goes_on_to_the_same_bits_with_a_state_from_files(strategy):
    """With statistics of batch normalisation; in two lanes and uninterrupted in one."""
    resumed = outcome(strategy, net_with_statistics, 2, made_anew)
    for ours, theirs in zip(resumed, outcome(strategy, net_with_statistics, 1, met), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        assert ours[2][2] == theirs[2][2]
        if isinstance(strategy, SERVERS) and strategy.codec is not None:
            # Nobody knows what a worker that is made anew has read of a server: all is sent again.
            assert ours[2][0] >= theirs[2][0]
            assert ours[2][1] >= theirs[2][1]
            continue
        assert ours[2][1] == theirs[2][1]
        # A centre on its way is there at once for who resumes.
        assert ours[2][0] == theirs[2][0] or isinstance(strategy, fs.NoSync)


REPEATS = [
    fs.SyncSGD(codec=fs.PowerSGD(1)),
    fs.LocalSGD(3, codec=fs.QSGD(4)),
    fs.DiLoCo(3, codec=fs.RandomK(0.2)),
    fs.NoSync(0.3, staleness=2),
    fs.PSOPS(2),
    fs.EASGD(2),
    fs.EAMSGD(2, mode="round_robin"),
    fs.SlowMo(3),
    fs.Codistillation(2, 2, 0),
]


@pytest.mark.parametrize("strategy", REPEATS, ids=repr)
def test_a_second_run_on_local_processes_goes_on_where_the_first_one_was_saved(strategy, local):
    """The first ends after 5 steps and leaves files; the second has new processes, and takes the
    rest.
    """

    def steps(worker, first, last):
        mine = slice(worker.comm.rank * B, (worker.comm.rank + 1) * B)
        for x, y in zip(X[first:last], Y[first:last], strict=True):
            loss = F.cross_entropy(worker.model(x[mine]), y[mine])
            loss = worker.adjust_loss(loss, (x[mine], y[mine]))
            loss.backward()
            worker.step(loss, accuracy=0.0)

    def started(comm):
        model = net()
        worker = fs.Worker(comm, model, sgd(model), strategy)
        worker.total_steps = 9
        return worker

    def whole(comm):
        worker = started(comm)
        steps(worker, 0, 9)
        worker.finish()
        return worker.flat.state.clone()

    def first(comm):
        worker = started(comm)
        steps(worker, 0, 5)
        met(worker)
        tensors, values = save_state(worker.state)
        for name, each in shared_tensors(worker.state).items():
            tensors[f"shared {name}"] = each.read()
        tensors["flat"] = worker.flat.state.clone()
        values["losses"] = [worker.loss, worker.smooth_loss]
        return safetensors.torch.save(tensors), json.dumps(values)

    def second(comm):
        worker = started(comm)
        worker.steps = 5
        packed, text = files[comm.rank]
        tensors, values = safetensors.torch.load(packed), json.loads(text)
        worker.loss, worker.smooth_loss = values.pop("losses")
        with torch.no_grad():
            worker.flat.state.copy_(tensors.pop("flat"))
            for name, each in shared_tensors(worker.state).items():
                each.write(tensors.pop(f"shared {name}"))
            load_state(worker.state, tensors, values)
        met(worker)
        steps(worker, 5, 9)
        worker.finish()
        return worker.flat.state.clone()

    files = fs.launch(first, W, local)
    for one, other in zip(fs.launch(whole, W, local), fs.launch(second, W, local), strict=True):
        assert torch.equal(one, other)


# --- save_state and load_state --------------------------------------------------------------------


@dataclass
class Inner:
    number: float = 0.0
    place: Any = fs.handle(default=None)


@dataclass
class Some:
    """A state with a field of any kind."""

    value: Any
    inner: Inner = field(default_factory=Inner)
    lens: Any = fs.handle(default=None)


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)
)
TENSORS = st.sampled_from(
    [
        torch.arange(6.0).view(2, 3),
        torch.tensor(2, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.arange(6.0).view(2, 3).T,
        torch.empty(0),
    ]
)
KEYS = st.one_of(st.integers(0, 9), st.sampled_from(["a", "b"]))
DATA = st.recursive(
    PLAIN | TENSORS | st.builds(torch.Size, st.lists(st.integers(0, 4), max_size=2)),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.lists(parts, max_size=3).map(deque),
        st.dictionaries(KEYS, parts, max_size=3),
    ),
    max_leaves=6,
)


def alike(one: Any, other: Any) -> bool:
    """Equal values of equal types, however they are nested."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    return one == other


@given(DATA, DATA)
def test_whatever_data_is_saved_comes_back_into_whatever_was_there(saved, there):
    state, lens = Some(saved, Inner(0.5, place="not saved"), lens="not saved"), object()
    fresh = Some(there, Inner(1.5, place=lens), lens=lens)
    inner = fresh.inner
    load_state(fresh, *through_files(*save_state(state)))
    assert alike(fresh.value, saved)
    assert fresh.inner is inner
    assert (inner.number, inner.place, fresh.lens) == (0.5, lens, lens)


@pytest.mark.parametrize("number", [math.inf, -math.inf, 0.1, 1 << 70, -0.0])
def test_numbers_come_back_to_the_bit(number):
    fresh = Some(None)
    load_state(fresh, *through_files(*save_state(Some(number))))
    assert repr(fresh.value) == repr(number)


def test_not_a_number_comes_back():
    fresh = Some(None)
    load_state(fresh, *through_files(*save_state(Some(math.nan))))
    assert math.isnan(fresh.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: torch.Generator().manual_seed(seed),
        np.random.default_rng,
        lambda seed: np.random.Generator(np.random.Philox(seed)),
    ],
    ids=["torch", "numpy", "philox"],
)
def test_a_generator_goes_on_where_it_was(make):
    def draw(generator):
        if isinstance(generator, torch.Generator):
            return torch.rand(3, generator=generator).tolist()
        return generator.random(3, dtype=np.float32).tolist()  # an odd number of half words

    old, new = Some(make(1)), Some(make(2))
    draw(old.value)
    generator = new.value
    load_state(new, *through_files(*save_state(old)))
    assert new.value is generator
    assert draw(new.value) == draw(old.value)


def test_what_shares_memory_still_does():
    def make():
        start = torch.zeros(4)
        parameter = nn.Parameter(start[:2])
        outer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
        return Some([start, outer]), parameter

    old, parameter = make()
    parameter.grad = torch.ones(2)
    old.value[1].step()
    new, fresh = make()
    load_state(new, *through_files(*save_state(old)))
    assert fresh.tolist() == [-0.5, -0.5]
    for outer, each in ((old.value[1], parameter), (new.value[1], fresh)):
        each.grad = torch.ones(2)
        outer.step()
    assert new.value[0].tolist() == old.value[0].tolist() == pytest.approx([-1.45, -1.45, 0, 0])


def test_what_is_saved_is_a_copy():
    tensor = torch.zeros(2)
    tensors, _ = save_state(Some(tensor))
    tensor.fill_(1)
    assert tensors == {"state.value": pytest.approx(torch.zeros(2))}


def test_names_are_paths():
    tensors, values = save_state(Some({"a": [torch.ones(1), 2]}))
    assert list(tensors) == ["state.value.a.0"]
    assert values == {
        "state": {"dataclass": "Some"},
        "state.value": {"dict": ["a"]},
        "state.value.a": {"list": 2},
        "state.value.a.1": 2,
        "state.inner": {"dataclass": "Inner"},
        "state.inner.number": 0.0,
    }


def test_nothing_is_a_state_too():
    assert save_state(None) == ({}, {"state": None})
    load_state(None, {}, {"state": None})
    assert shared_tensors(None) == {}


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        (lambda: None, "state.value", "function"),
        ([nn.Linear(1, 1)], "state.value.0", "Linear"),
        ({"a": {1, 2}}, "state.value.a", "set"),
        ({(1, 2): 3}, "state.value", "dict"),
        (np.float64(3), "state.value", "float64"),
    ],
)
def test_what_is_neither_data_nor_a_handle_is_named(value, path, kind):
    with pytest.raises(fs.FlockstepError) as raised:
        save_state(Some(value))
    assert str(raised.value).startswith(f"Some: '{path}' must be data (")
    assert str(raised.value).endswith(f"or a field made with fs.handle() (got a {kind})")


def test_an_own_strategy_with_an_unmarked_handle_is_named_when_it_is_looked_at():
    @dataclass(frozen=True)
    class Own(fs.Strategy[Any]):
        name = "own"

        def init(self, worker):
            return Some(worker.comm)

        def finish(self, worker, state):
            pass

    def program(comm):
        model = net()
        worker = fs.Worker(comm, model, sgd(model), Own())
        worker.strategy.preview(worker, worker.state)

    with pytest.raises(fs.FlockstepError, match=r"^Own: 'state.value' must .* \(got a SimComm\)$"):
        fs.launch(program, 2)


def test_two_parts_of_one_name_are_refused():
    with pytest.raises(
        fs.FlockstepError, match="two parts of the state have the name 'state.value.1'"
    ):
        save_state(Some({1: 2, "1": 3}))


@pytest.mark.parametrize(
    ("state", "change", "message"),
    [
        (Some(1), {"state.value": None}, "'state.value' is missing in what was saved"),
        (Some(1), {"state.other": 3}, "'state.other' was saved, but Some has no such field"),
        (
            Some(1),
            {"state": {"dataclass": "Other"}},
            r"'state' was saved as a Other \(got a Some\)",
        ),
        (
            Some(1),
            {"state.value": {"parts": 2}},
            r"'state.value' must be one of float, .* \(got {'parts': 2}\)",
        ),
        (3, {"state": 4}, r"a state must be an object that can change, .* \(got a int\)"),
    ],
)
def test_what_does_not_fit_is_refused(state, change, message):
    tensors, values = save_state(state)
    for path, value in change.items():
        values[path] = value
        if value is None:
            del values[path]
    with pytest.raises(fs.FlockstepError, match=message):
        load_state(state, tensors, values)


def test_shared_tensors_are_found_wherever_they_are():
    def program(comm):
        model = net()
        workers = [
            fs.Worker(comm, model, sgd(model), strategy)
            for strategy in (
                fs.AsyncSGD(0.5, True),
                fs.GoSGD(),
                fs.ADPSGD(),
                fs.EAWild(),
                fs.DPSGD(),
            )
        ]
        return [sorted(shared_tensors(worker.state)) for worker in workers]

    assert fs.launch(program, 3)[0] == [
        ["state.clock", "state.server.value", "state.velocity"],
        ["state.mailboxes.0", "state.mailboxes.1", "state.mailboxes.2"],
        ["state.models.1"],
        ["state.centre.shared"],
        [],
    ]
