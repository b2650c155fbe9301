"""What every strategy says of itself at any moment of a run: the model that stands for it, and
whether its workers wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.strategies.harness import W, momentum_with, net, net_with_statistics, train
from tests.strategies.table import TABLE, VARIANTS
from torch import nn

import flockstep as fs
from flockstep.strategies import STRATEGIES

ALL = [*dict.fromkeys([*(row.strategy for row in TABLE), *VARIANTS])]
MODELS = [pytest.param(net, id="plain"), pytest.param(net_with_statistics, id="with statistics")]

# Before the first exchange of most, after one, and at the end with some history.
LOOKS, STEPS = (1, 5, 9), 9
NEVER_WAIT = {
    fs.Independent, fs.EAWild, fs.Hogwild, fs.AsyncSGD, fs.Downpour, fs.GoSGD, fs.ADPSGD,
    fs.AllToAllSGD,
}  # fmt: skip

CASES = [
    pytest.param(strategy, model, id=f"{strategy!r} {name}")
    for model, name, strategies in (
        (net, "plain", [row.strategy for row in TABLE[::4]]),
        (net_with_statistics, "with statistics", ALL),
    )
    for strategy in strategies
]


def meet(worker):
    with worker.comm.unmetered():
        worker.comm.barrier()


def preview_of(worker):
    with worker.comm.unmetered(), torch.no_grad():
        return worker.strategy.preview(worker, worker.state)


def end_of(worker):
    """What a run leaves on a worker: its model's flat state, its clock, and what it sent."""
    worker.finish()
    meter = worker.comm.meter
    return worker.flat.state.clone(), worker.comm.now(), meter.bytes_sent, meter.exchanges


def simulated(program, lanes):
    return fs.launch(program, W, seed=3, compute=fs.Compute(0.01, jitter=0.5), lanes=lanes)


def looked_at(strategy, model, steps, lanes, takes_looks):
    """Of each worker its looks and its end, in a run of `STEPS` that ends after `steps` of them."""

    def program(comm):
        looks = []

        def look(worker):
            if worker.steps in LOOKS:
                meet(worker)
                if takes_looks:
                    preview_of(worker).fill_(torch.nan)  # it belongs to the caller
                    looks.append(preview_of(worker))

        how = {"make_model": model, "steps": steps, "total_steps": STEPS}
        momentum = momentum_with(strategy)
        worker, _ = train(comm, strategy, after=look, momentum=momentum, **how)
        return looks, *end_of(worker)

    return simulated(program, lanes)


@pytest.mark.parametrize(("strategy", "model"), CASES)
def test_a_preview_is_what_finish_would_give_and_leaves_no_trace(strategy, model):
    """A run in two lanes with previews, and runs in one lane that end where the looks are: the last
    of them is the same run without previews.
    """
    seen = looked_at(strategy, model, STEPS, lanes=2, takes_looks=True)
    for place, steps in enumerate(LOOKS):
        ended = looked_at(strategy, model, steps, lanes=1, takes_looks=False)
        for (looks, *_), (_, finished, *_) in zip(seen, ended, strict=True):
            assert torch.equal(looks[place], finished)
            assert torch.equal(looks[place], seen[0][0][place])
    for (_, state, *figures), (_, other, *others) in zip(seen, ended, strict=True):
        assert torch.equal(state, other)
        assert figures == others


LOCAL = [
    fs.LocalSGD(3, codec=fs.Int8()),
    fs.DiLoCo(3),
    fs.SyncSGD(),
    fs.EASGD(2),
    fs.EAWild(2),
    fs.Hogwild(),
    fs.Downpour(3, 2),
    fs.StaleSync(2),
    fs.GoSGD(0.5),
    fs.ADPSGD(),
    fs.AllToAllSGD(),
    fs.SGP(),
    fs.Codistillation(2, 2, 0),
]


@pytest.mark.parametrize("strategy", LOCAL, ids=repr)
@pytest.mark.parametrize("model", MODELS)
def test_on_local_processes_a_preview_is_what_finish_gives(strategy, model, local):
    def program(comm):
        looks = []

        def look(worker):
            if worker.steps in (2, 5, 8):
                looks.append(preview_of(worker))

        worker, _ = train(comm, strategy, make_model=model, steps=8, after=look)
        sent = comm.meter.bytes_sent
        again = preview_of(worker)
        assert comm.meter.bytes_sent == sent
        finished, *_ = end_of(worker)
        return looks, torch.equal(again, finished) and torch.equal(looks[-1], finished)

    told = fs.launch(program, W, local)
    for looks, is_equal in told:
        assert is_equal
        assert all(torch.equal(one, other) for one, other in zip(looks, told[0][0], strict=True))


@dataclass
class FollowState:
    seen: list[torch.Tensor]
    steps: int = 0


@dataclass(frozen=True)
class Follow(fs.Strategy[FollowState]):
    """One that says nothing but finish, and changes all that it has there."""

    name: ClassVar[str] = "follow"
    fails: bool = False

    def init(self, worker):
        return FollowState([])

    def finish(self, worker, state):
        state.seen.append(worker.comm.all_reduce(worker.flat.state, op="mean").clone())
        state.steps += 1
        if self.fails:
            raise ValueError("no end")


def test_a_strategy_that_only_says_finish_is_previewed_by_it_and_undone():
    def program(comm):
        model = nn.Linear(2, 2)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters()), Follow())
        with torch.no_grad():
            worker.flat.state.fill_(comm.rank)
        shown, own = preview_of(worker), worker.flat.state.clone()
        seen = len(worker.state.seen), worker.state.steps
        worker.finish()
        return shown.mean().item(), own.mean().item(), seen, worker.flat.state.mean().item()

    assert fs.launch(program, 3) == [(1.0, float(rank), (0, 0), 1.0) for rank in range(3)]


def test_a_finish_that_fails_is_undone_too():
    def program(comm):
        model = nn.Linear(2, 2)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters()), Follow(fails=True))
        with torch.no_grad():
            worker.flat.state.fill_(comm.rank)
        with pytest.raises(ValueError, match="no end"):
            preview_of(worker)
        return worker.flat.state.mean().item(), worker.state

    assert fs.launch(program, 2) == [(float(rank), FollowState([])) for rank in range(2)]


def test_a_strategy_that_says_nothing_is_previewed_as_each_workers_own():
    @dataclass(frozen=True)
    class Silent(fs.Strategy[None]):
        name: ClassVar[str] = "silent"

    def program(comm):
        model = nn.Linear(2, 2)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters()), Silent())
        with torch.no_grad():
            worker.flat.state.fill_(comm.rank)
        return preview_of(worker).mean().item(), Silent().waits

    assert fs.launch(program, 2) == [(0.0, True), (1.0, True)]


def test_those_whose_workers_never_wait_say_so():
    for strategy in ALL:
        in_groups = isinstance(strategy, fs.EAWild) and strategy.groups is not None
        is_first_come = getattr(strategy, "mode", None) == "first_come"
        is_bounded = isinstance(strategy, fs.AllToAllSGD) and strategy.staleness is not None
        never = type(strategy) in NEVER_WAIT and not in_groups and not is_bounded
        never = never or is_first_come
        assert strategy.waits != never, strategy
    assert set(STRATEGIES.values()) >= NEVER_WAIT


@pytest.mark.parametrize("strategy", [each for each in ALL if not each.waits], ids=repr)
@pytest.mark.parametrize("early", [0, W - 1])
def test_whose_workers_never_wait_may_stop_a_worker_early(strategy, early):
    def program(comm):
        worker, losses = train(comm, strategy, steps=9 if comm.rank == early else 12)
        return len(losses), end_of(worker)[0]

    told = simulated(program, lanes=1)
    assert [steps for steps, _ in told] == [9 if rank == early else 12 for rank in range(W)]
    assert all(torch.equal(state, told[0][1]) for _, state in told)
    assert told[0][1].isfinite().all()


def test_where_workers_wait_one_that_stops_early_stops_the_run():
    def program(comm):
        train(comm, fs.SyncSGD(), steps=9 if comm.rank == 1 else 12)[0].finish()

    with pytest.raises(fs.FlockstepError):
        simulated(program, lanes=1)
