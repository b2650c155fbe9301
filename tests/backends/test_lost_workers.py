"""Runs that go on when workers are lost: `on_failure="continue"`.

Workers kill themselves at a step, at a line of this library, or are killed from outside at any
moment. Where that is drawn at random the seed stands in the test's name. In the simulator a worker
that is to die has its time among the faults, and computes until then."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import flockstep as fs

BACKENDS_THAT_LOSE = ["local", "torchrun", "ray"]
FORKING = BACKENDS_THAT_LOSE[:2]  # a worker is replaced in no time; Ray's must load torch first

pytestmark = pytest.mark.timeout(150)


# Ray runs the calls of torchrun: what is tested on it, too, is what it does by itself, and
# training.
everywhere = pytest.mark.parametrize("lossy", ["sim", *BACKENDS_THAT_LOSE], indirect=True)
and_simulated = pytest.mark.parametrize("lossy", ["sim", *FORKING], indirect=True)


@pytest.fixture(params=FORKING)
def lossy(request):
    return fs.Simulator() if request.param == "sim" else request.getfixturevalue(request.param)


def go_on(program, workers, backend, dying=(), **options):
    """`dying`: who will die, in rank order."""
    if isinstance(backend, fs.Simulator):
        backend = fs.Simulator(faults=fs.Faults(deaths={rank: death_of(rank) for rank in dying}))
    return fs.launch(program, workers, backend, on_failure="continue", **options)


def death_of(rank):
    return 1000.0 * (rank + 1)


def die(comm=None, exit_code=None):
    if comm is not None and comm.meter.is_virtual:
        comm.elapse(1e6)
        raise AssertionError("nobody has said that this worker is to die")
    if exit_code is not None:
        os._exit(exit_code)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # signals to oneself may take a moment to arrive


def loss_of(backend, rank, exit_code, step):
    """What is known of a lost worker. Only its parent learns how a process ended, and Ray's
    tells nobody.
    """
    if isinstance(backend, fs.Simulator):
        how = f"died at {death_of(rank):g} s of virtual time"
        return rank, None, step, f"rank {rank} {how} after step {step}"
    code = None if isinstance(backend, fs.Ray) else exit_code
    how = {None: "went away", -9: "was killed by SIGKILL"}.get(code, f"exited with {code}")
    return rank, code, step, f"rank {rank} {how} after step {step}"


def known_of(loss):
    return loss.rank, loss.exit_code, loss.step, str(loss)


def survivors_of(results):
    return {
        rank: value for rank, value in enumerate(results) if not isinstance(value, fs.WorkerLost)
    }


# --- what launch gives back -----------------------------------------------------------------------


@pytest.mark.wall_clock
@everywhere
def test_the_place_of_a_lost_worker_says_who_how_when_and_where(lossy):
    def program(comm):
        for _ in range(3 + comm.rank):
            comm.elapse()
        time.sleep(0.1)
        if comm.rank == 1:
            die(comm)
        if comm.rank == 2:
            die(comm, exit_code=5)
        comm.barrier()
        return comm.rank, comm.now(), comm.members

    results = go_on(program, 4, lossy, dying=[1, 2])
    killed, left = results[1], results[2]
    assert known_of(killed) == loss_of(lossy, 1, -9, 4)
    assert known_of(left) == loss_of(lossy, 2, 5, 5)
    for rank in (0, 3):
        own, ended, members = results[rank]
        assert own == rank
        assert members == (0, 3)
        assert all(0.1 <= loss.seconds <= ended + 0.1 for loss in (killed, left))


@and_simulated
def test_a_program_that_raises_stops_the_run_all_the_same(lossy):
    def program(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("one is wrong")
        comm.barrier()

    with pytest.raises(ZeroDivisionError, match="rank 1 raised"):
        go_on(program, 3, lossy)


@everywhere
def test_what_was_gathered_says_who_of_the_comm_took_part(lossy):
    def program(comm):
        odd = comm.split(comm.rank % 2)
        if comm.rank == 1:
            die(comm)
        tensors = [here.all_gather(torch.tensor([comm.rank])) for here in (comm, odd)]
        return [{r: int(each) for r, each in told.by_rank().items()} for told in tensors]

    results = survivors_of(go_on(program, 4, lossy, dying=[1]))
    world = {0: 0, 2: 2, 3: 3}
    assert results == {0: [world, {0: 0, 1: 2}], 2: [world, {0: 0, 1: 2}], 3: [world, {1: 3}]}


@pytest.mark.parametrize("lossy", BACKENDS_THAT_LOSE, indirect=True)
def test_when_nobody_is_left_the_last_loss_is_raised(lossy):
    def program(comm):
        time.sleep(0.5 * comm.rank)
        die()

    with pytest.raises(fs.WorkerLost) as raised:
        go_on(program, 2, lossy)
    assert known_of(raised.value) == loss_of(lossy, 1, -9, 0)


@and_simulated
def test_a_result_that_is_a_loss_is_a_result(lossy):
    results = go_on(lambda comm: fs.WorkerLost("not me", rank=7), 2, lossy)
    assert [loss.rank for loss in results] == [7, 7]


@and_simulated
def test_a_worker_that_is_lost_at_once_does_not_hold_up_the_start(lossy):
    results = go_on(
        lambda comm: die(comm) if comm.rank == 0 else comm.all_gather(torch.tensor(comm.rank)),
        3,
        lossy,
        dying=[0],
    )
    assert [[int(part) for part in results[rank]] for rank in (1, 2)] == [[1, 2], [1, 2]]


@and_simulated
def test_deadlock_is_still_found_and_names_the_lost(lossy):
    def program(comm):
        if comm.rank == 0:
            die(comm)
        comm.recv(torch.zeros(1), 3 - comm.rank)

    with pytest.raises(fs.DeadlockError) as raised:
        go_on(program, 3, lossy, dying=[0])
    assert "rank 0 was lost" in str(raised.value)
    assert "rank 1 waits in recv from rank 2" in str(raised.value)


def test_the_simulator_takes_it_too():
    assert go_on(lambda comm: comm.members, 3, "sim") == [(0, 1, 2)] * 3


# --- calls ----------------------------------------------------------------------------------------


def test_sums_through_a_codec_are_of_those_who_took_part(lossy):
    """Of codecs whose messages are gathered, and of such as are summed on the way."""
    codecs = [fs.TopK(1.0), fs.Float16(), fs.RandomK(1.0), fs.PowerSGD(1)]

    def program(comm):
        if comm.rank == 2:
            die()
        tensor = torch.full((3,), float(2**comm.rank))
        return [
            [
                comm.all_reduce(tensor.clone(), op, codec=codec, memory=memory).tolist()
                for op in ("sum", "mean")
            ]
            for codec in codecs
            for memory in (codec.memory(tensor, seed=comm.seed, rank=comm.rank),)
        ]

    expected = [[[11.0] * 3, [11 / 3] * 3]] * len(codecs)
    for result in survivors_of(go_on(program, 4, lossy)).values():
        assert torch.allclose(torch.tensor(result), torch.tensor(expected), rtol=1e-3)


@and_simulated
def test_calls_are_those_of_the_survivors(lossy):
    def program(comm):
        half = comm.split(comm.rank % 2)
        if comm.rank == 2:
            die(comm)
        mean = comm.all_reduce(torch.full((3,), float(2**comm.rank)), op="mean")
        gathered = comm.all_gather(torch.full((comm.rank + 1,), comm.rank))
        value = comm.shared("late", torch.tensor([comm.rank])).read()
        inside = half.all_reduce(torch.tensor([comm.rank]))
        again = comm.split(0)
        return (
            mean.tolist(),
            [part.tolist() for part in gathered],
            value.item(),
            inside.item(),
            half.members,
            again.size,
        )

    results = survivors_of(go_on(program, 4, lossy, dying=[2]))
    mean = pytest.approx([11 / 3] * 3)
    gathered = [[0], [1, 1], [3, 3, 3, 3]]
    assert results == {
        0: (mean, gathered, 0, 0, (0,), 3),
        1: (mean, gathered, 0, 4, (0, 1), 3),
        3: (mean, gathered, 0, 4, (0, 1), 3),
    }


@everywhere
def test_a_shared_tensor_starts_at_the_lowest_rank_that_is_there(lossy):
    def program(comm):
        if comm.rank < 2:
            die(comm)
        return comm.shared("value", torch.full((3,), float(comm.rank))).read().tolist()

    assert survivors_of(go_on(program, 4, lossy, dying=[0, 1])) == {2: [2.0] * 3, 3: [2.0] * 3}


@and_simulated
def test_a_lost_partner_is_an_error_that_a_program_may_catch(lossy):
    def program(comm):
        if comm.rank == 1:
            die(comm)
        seen = []
        for call in (
            lambda: comm.recv(torch.zeros(1), 1),
            lambda: comm.send(torch.zeros(1), 1),
            lambda: comm.exchange(torch.zeros(1), 1),
            lambda: comm.broadcast(torch.zeros(1), 1),
        ):
            try:
                call()
            except fs.WorkerLost as lost:
                seen.append((lost.rank, lost.exit_code, lost.step, str(lost)))
        return seen, comm.broadcast(torch.tensor([comm.rank]), 2).item()

    expected = [loss_of(lossy, 1, -9, 0)] * 4, 2
    assert survivors_of(go_on(program, 3, lossy, dying=[1])) == {0: expected, 2: expected}


@and_simulated
def test_an_error_about_a_lost_partner_that_nobody_catches_stops_the_run(lossy):
    def program(comm):
        return die(comm) if comm.rank == 1 else comm.broadcast(torch.zeros(1), 1)

    with pytest.raises(fs.WorkerLost, match="rank 1 .* after step 0"):
        go_on(program, 3, lossy, dying=[1])


@everywhere
def test_a_lock_and_a_turn_pass_on_from_who_is_lost_with_them(lossy):
    def program(comm):
        value = comm.shared("value", torch.zeros(1))
        for turn in range(4):
            with value.lock(in_turn=True):
                value.add(torch.tensor([1.0]))
                if (comm.rank, turn) in ((0, 0), (2, 1)):
                    die(comm)
        value.retire()
        comm.barrier()
        return value.read().item()

    assert survivors_of(go_on(program, 4, lossy, dying=[0, 2])) == {1: 11.0, 3: 11.0}


@and_simulated
def test_a_turn_passes_over_who_was_lost_before_it_came(lossy):
    def program(comm):
        order = comm.shared("order", torch.zeros(9, dtype=torch.int64))
        if comm.rank == 1:
            die(comm)
        for _ in range(3):
            with order.lock(in_turn=True):
                seen = order.read()
                seen[int((seen != 0).sum())] = comm.rank + 1
                order.write(seen)
        order.retire()
        comm.barrier()
        return order.read().tolist()

    for seen in survivors_of(go_on(program, 3, lossy, dying=[1])).values():
        assert seen == [1, 3, 1, 3, 1, 3, 0, 0, 0]


# --- deaths at any line, and at any moment --------------------------------------------------------


def at_line(number, act):
    """Call `act` when the `number`-th next line of this library is about to run in this thread."""
    left = [number]

    def trace(frame, event, argument):
        if "flockstep" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                act()
        return trace

    sys.settrace(trace)


def _shared(comm, k):
    return comm.shared(f"value {k}", torch.tensor([comm.rank, k])).read().tolist()


def _split(comm, k):
    part = comm.split(k % 2)
    return part.size, [int(rank) for rank in part.all_gather(torch.tensor(comm.rank))]


def _broadcast(comm, k):
    try:
        return comm.broadcast(torch.full((4,), comm.rank), root=k).tolist()
    except fs.WorkerLost as lost:
        return "lost", lost.rank


CALLS = {
    "all_reduce": lambda comm, k: (
        comm.all_reduce(torch.full((70_000,), 2.0**comm.rank)).unique().tolist()
    ),
    "all_gather": lambda comm, k: [int(rank) for rank in comm.all_gather(torch.tensor(comm.rank))],
    "broadcast": _broadcast,
    "shared": _shared,
    "split": _split,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("call", CALLS)
def test_who_dies_at_any_line_of_a_call_took_part_for_all_or_for_nobody(lossy, call, seed):
    """Five workers die one after the other, each inside a call, while three see it through. One of
    these stalls inside each call, until the others are through and the death is known: it must not
    come to another result."""
    draw = random.Random(f"{call} {seed}")
    lines = [(draw.randint(1, 60), draw.randint(1, 60)) for _ in range(5)]

    def program(comm):
        seen = []
        for k, (death, stall) in enumerate(lines):
            if comm.rank == k:
                at_line(death, die)
            if comm.rank == 7:
                at_line(stall, lambda: time.sleep(0.15))
            seen.append(CALLS[call](comm, k))
            if comm.rank == k:  # it came out of the call alive
                die()
        return seen

    results = survivors_of(go_on(program, 8, lossy))
    assert set(results) == {5, 6, 7}
    assert results[5] == results[6] == results[7], lines
    if call == "all_gather":
        for k, ranks in enumerate(results[5]):
            assert ranks in (list(range(k, 8)), list(range(k + 1, 8)))


@pytest.mark.parametrize("seed", range(3))
def test_who_dies_at_any_line_of_a_turn_holds_up_nobody(lossy, seed):
    draw = random.Random(seed)
    lines = [draw.randint(1, 60) for _ in range(3)]

    def program(comm):
        value = comm.shared("value", torch.zeros(1))
        if comm.rank < 3:
            at_line(lines[comm.rank], die)
        for _ in range(10):
            with value.lock(in_turn=True):
                value.add(torch.ones(1))
        value.retire()
        comm.barrier()
        return value.read().item()

    results = survivors_of(go_on(program, 5, lossy))
    assert {3, 4} <= set(results)
    assert len(set(results.values())) == 1
    assert 10 * len(results) <= results[3] <= 50, lines


class Killer(threading.Thread):
    """Kills workers, whose process numbers stand in files, each after a time."""

    def __init__(self, folder, delays):
        super().__init__()
        self.folder, self.delays = folder, delays

    def run(self):
        for rank, delay in self.delays.items():
            path = self.folder / str(rank)
            while not path.exists():
                time.sleep(0.001)
            time.sleep(delay)
            os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("lossy", "seed"), [*product(FORKING, range(6)), ("ray", 0)], indirect=["lossy"]
)
def test_collectives_are_uniform_while_workers_are_killed_from_outside(lossy, seed, tmp_path):
    draw = random.Random(seed)
    victims = draw.sample(range(5), 2)
    delays = {rank: draw.uniform(0, 0.25) for rank in victims}

    def program(comm):
        comm.barrier()
        unfinished = tmp_path / f"{comm.rank}.part"
        unfinished.write_text(str(os.getpid()))
        unfinished.replace(tmp_path / str(comm.rank))
        began, seen = time.monotonic(), []
        flat = comm.empty(20_000, torch.float32, torch.device("cpu"))
        while True:
            k = len(seen)
            flat.fill_(2.0**comm.rank)
            total = comm.all_reduce(flat).unique().tolist()
            gathered = [int(rank) for rank in comm.all_gather(torch.tensor(comm.rank))]
            seen.append((total, gathered, _broadcast(comm, k % comm.size)))
            enough = time.monotonic() > began + 1.0 and len(comm.members) == comm.size - 2
            if comm.all_reduce(torch.tensor(int(enough)), op="min").item():
                return seen

    killer = Killer(tmp_path, delays)
    killer.start()
    try:
        results = go_on(program, 5, lossy)
    finally:
        killer.join(30)
    seen = survivors_of(results)
    assert set(seen) == set(range(5)) - set(victims)
    first, *others = seen.values()
    assert all(other == first for other in others), delays
    for total, gathered, _ in first:
        assert len(total) == 1
        assert set(gathered) >= set(seen)
    assert first[-1][1] == sorted(seen)


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dying(fs.Strategy[Any]):
    """Another strategy, with workers that die: {rank: (moment, steps it has finished by then)}."""

    name: ClassVar[str] = "dying"
    of: fs.Strategy
    deaths: dict[int, tuple[str, int]]

    def _at(self, moment, worker):
        if self.deaths.get(worker.comm.rank) == (moment, worker.steps):
            die(worker.comm)

    def init(self, worker):
        return self.of.init(worker)

    def before_step(self, worker, state):
        self._at("before_step", worker)
        self.of.before_step(worker, state)

    def on_gradients(self, worker, state):
        self._at("on_gradients", worker)
        self.of.on_gradients(worker, state)

    def optimizer_step(self, worker, state):
        self.of.optimizer_step(worker, state)

    def after_step(self, worker, state):
        self.of.after_step(worker, state)
        self._at("after_step", worker)

    def preview(self, worker, state):
        return self.of.preview(worker, state)

    def finish(self, worker, state):
        self._at("finish", worker)
        self.of.finish(worker, state)


MOMENTS = ("before_step", "on_gradients", "after_step")
STRATEGIES = [
    fs.EAWild(period=2),
    fs.EAWild(period=2, groups=2, delegate="random"),
    fs.EASGD(period=2),
    fs.EASGD(period=2, mode="sync"),
    fs.Independent(),
    fs.LocalSGD(period=2),
    fs.SyncSGD(),
]
# Ray replaces a worker with a new process, which takes seconds: a shared tensor, locks in turn, a
# collective, groups.
ON_RAY = [STRATEGIES[k] for k in (0, 1, 2, 6)]


@pytest.mark.parametrize(
    ("strategy", "lossy", "seed"),
    [
        *product(STRATEGIES, ["local"], range(4)),
        *product(STRATEGIES, ["torchrun"], range(2)),
        *product(ON_RAY, ["ray"], [0]),
    ],
    ids=str,
    indirect=["lossy"],
)
def test_training_goes_on_without_the_lost(strategy, lossy, seed, tmp_path):
    """Three of six are killed at random steps, rank 0 among them with an even seed."""
    draw = random.Random(f"{strategy} {seed}")
    victims = [0, *draw.sample(range(1, 6), 2)] if seed % 2 == 0 else draw.sample(range(1, 6), 3)
    deaths = {rank: (draw.choice(MOMENTS), draw.randint(1, 17)) for rank in victims}
    # A step counts from the moment when its gradients are there.
    steps = {rank: step + (moment == "on_gradients") for rank, (moment, step) in deaths.items()}

    result = fs.run(
        "digits-mlp",
        Dying(strategy, deaths),
        6,
        lossy,
        epochs=4,
        batch_size=27,
        seed=seed,
        on_failure="continue",
    )

    assert {loss["rank"]: loss["step"] for loss in result.lost} == steps
    assert all(loss["exit_code"] == loss_of(lossy, 0, -9, 0)[1] for loss in result.lost)
    assert all(0 < loss["seconds"] < result.metrics["wall_seconds"] for loss in result.lost)
    assert (result.metrics["workers"], result.metrics["lost"]) == (6, 3)
    assert len(result.replicas) == 3
    assert result.metrics["steps"] == 36
    assert [row["step"] for row in result.history] == [9, 18, 27, 36]
    assert result.metrics["test_accuracy"] > 0.5
    assert all(math.isfinite(result.metrics[name]) for name in result.metrics)
    assert fs.load_result(result.save(tmp_path)).lost == result.lost


def test_scores_outlive_the_worker_that_evaluated(lossy):
    deaths = {0: ("before_step", 11), 1: ("before_step", 20)}
    result = fs.run(
        "digits-mlp",
        Dying(fs.SyncSGD(), deaths),
        4,
        lossy,
        epochs=3,
        batch_size=40,
        on_failure="continue",
    )
    assert [loss["rank"] for loss in result.lost] == [0, 1]
    assert all({"loss", "accuracy"} <= set(row) for row in result.history)
    assert [row["epoch"] for row in result.history] == [1, 2, 3]


def test_a_worker_lost_at_the_very_end_is_not_missed_by_the_others(lossy):
    deaths = {0: ("finish", 9)}
    result = fs.run(
        "digits-mlp",
        Dying(fs.EASGD(period=1), deaths),
        3,
        lossy,
        epochs=1,
        batch_size=54,
        on_failure="continue",
    )
    assert [(loss["rank"], loss["step"]) for loss in result.lost] == [(0, 9)]
    assert result.metrics["test_accuracy"] > 0.3


class One(nn.Module):
    """A single number."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def move(backend, strategy, workers, steps, deaths):
    """Numbers that only the strategy moves, from 10r on worker r: (before, after finish) of each
    survivor.
    """

    def program(comm):
        model = One()
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.0), Dying(strategy, deaths)
        )
        with worker.changing_parameters(), torch.no_grad():
            model.x.fill_(10.0 * comm.rank)
        for _ in range(steps):
            worker.step(0.0)
        before = model.x.item()
        return before, worker.finish().x.item()

    return survivors_of(go_on(program, workers, backend, dying=sorted(deaths)))


@everywhere
def test_the_mean_is_that_of_the_survivors(lossy):
    results = move(lossy, fs.LocalSGD(period=2), 4, 2, {1: ("before_step", 1)})
    assert results == {rank: (pytest.approx(50 / 3, rel=1e-15),) * 2 for rank in (0, 2, 3)}


@and_simulated
@pytest.mark.parametrize("alpha", [None, 0.25])
def test_the_centre_of_sync_easgd_is_pulled_by_those_who_took_part(lossy, alpha):
    results = move(
        lossy, fs.EASGD(period=1, alpha=alpha, mode="sync"), 4, 5, {2: ("before_step", 3)}
    )
    rate, centre, x = alpha or 0.9 / 4, 0.0, [0.0, 10.0, 20.0, 30.0]
    for step in range(5):
        pulls = [rate * (value - centre) for value in x]
        if step >= 3:
            pulls[2] = 0.0
        x = [value - pull for value, pull in zip(x, pulls, strict=True)]
        centre += sum(pulls)
    assert results == {rank: (pytest.approx(x[rank]), pytest.approx(centre)) for rank in (0, 1, 3)}


@and_simulated
def test_round_robin_goes_on_in_rank_order(lossy):
    results = move(lossy, fs.EASGD(period=1, alpha=0.25), 3, 4, {0: ("before_step", 2)})
    centre, x = 0.0, [0.0, 10.0, 20.0]
    for step in range(4):
        for rank in range(3):
            if rank or step < 2:
                pull = 0.25 * (x[rank] - centre)
                x[rank] -= pull
                centre += pull
    assert results == {rank: (pytest.approx(x[rank]), pytest.approx(centre)) for rank in (1, 2)}


@and_simulated
@pytest.mark.parametrize("delegate", ["first", "random"])
def test_a_group_without_its_delegate_has_another(lossy, delegate):
    strategy = fs.EAWild(alpha=0.25, groups=2, delegate=delegate)
    results = move(lossy, strategy, 4, 6, {0: ("before_step", 2), 3: ("before_step", 3)})
    assert set(results) == {1, 2}
    assert results[1][1] == results[2][1]
    assert results[1][0] != results[2][0]
    assert results[1][1] != 0.0


@and_simulated
def test_independent_is_represented_by_the_next_best_when_the_best_is_lost(lossy):
    def program(comm):
        model = One()
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.0), fs.Independent()
        )
        with worker.changing_parameters(), torch.no_grad():
            model.x.fill_(10.0 * comm.rank)
        worker.step([3.0, 2.0, 0.5, 1.0][comm.rank])
        if comm.rank == 2:
            comm.broadcast = lambda *_: die(comm)  # after all know that it is the best
        return worker.finish().x.item()

    assert survivors_of(go_on(program, 4, lossy, dying=[2])) == {0: 30.0, 1: 30.0, 3: 30.0}


@and_simulated
def test_all_start_from_the_lowest_rank_that_is_there(lossy):
    def program(comm):
        if comm.rank == 0:
            die(comm)
        model = One()
        with torch.no_grad():
            model.x.fill_(10.0 * comm.rank)
        fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.0), fs.SyncSGD())
        return model.x.item()

    assert survivors_of(go_on(program, 3, lossy, dying=[0])) == {1: 10.0, 2: 10.0}


def test_results_of_before_there_were_losses_are_read(tmp_path):
    result = fs.run("digits-mlp", fs.SyncSGD(), workers=2, epochs=1)
    assert result.lost == []
    path = result.save(tmp_path) / "result.json"
    content = json.loads(path.read_text())
    del content["lost"]
    path.write_text(json.dumps(content))
    assert fs.load_result(tmp_path).lost == []
