"""Simulated workers that die, pause and come back. What the others notice of a loss is tested with
that of real processes, in test_lost_workers.py, and for every strategy in its table."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch

import flockstep as fs

QUIET = fs.Network.preset("ideal")


def go_on(program, workers=2, lanes=None, seed=0, network=QUIET, **faults):
    return fs.launch(
        program,
        workers,
        seed=seed,
        lanes=lanes,
        network=network,
        faults=fs.Faults(**faults),
        on_failure="continue",
    )


def clocks(comm, steps=4):
    """When each step of a second ended, and how long the worker has waited."""
    seen = []
    for _ in range(steps):
        comm.elapse(1.0)
        seen.append(comm.now())
    return seen, comm.meter.seconds_waiting


# --- deaths ---------------------------------------------------------------------------------------


def test_by_default_a_death_ends_the_run_with_who_when_and_where():
    with pytest.raises(fs.WorkerLost) as raised:
        fs.launch(
            lambda comm: [comm.elapse() for _ in range(99)],
            3,
            compute=0.25,
            faults=fs.Faults(deaths={1: 3.0}),
        )
    loss = raised.value
    assert str(loss) == "rank 1 died at 3 s of virtual time after step 11"
    assert (loss.rank, loss.step, loss.seconds, loss.exit_code) == (1, 11, 3.0, None)


def test_a_death_after_a_step_is_when_it_has_been_computed():
    def program(comm):
        for _ in range(5):
            comm.elapse()
        return comm.members

    left, lost = go_on(program, deaths={1: "3 steps"})
    assert left == (0,)
    assert (lost.step, lost.seconds) == (3, pytest.approx(0.03))


def test_who_has_ended_before_its_death_lives():
    assert go_on(lambda comm: comm.elapse(1.0) or comm.rank, deaths={1: 1.5}) == [0, 1]


def test_what_arrives_at_the_time_of_a_death_or_later_never_does():
    """A second per message: the first arrives at 1, the second at 2."""

    def program(comm):
        if comm.rank == 1:
            for value in (1.0, 2.0):
                comm.send(torch.tensor([value]), 0)
            return None
        heard = [comm.recv(torch.zeros(1), 1).item()]
        try:
            heard.append(comm.recv(torch.zeros(1), 1).item())
        except fs.WorkerLost as lost:
            heard.append(str(lost))
        return heard, comm.now()

    slow = fs.Network(latency_seconds=1.0, bytes_per_second=1e12)
    for death, second in ((1.5, 1.5), (2.0, 2.0)):
        (heard, now), lost = go_on(program, network=slow, deaths={1: death})
        assert heard == [1.0, f"rank 1 died at {second:g} s of virtual time after step 0"]
        assert now == second == lost.seconds
    (heard, _), result = go_on(program, network=slow, deaths={1: 2.5})
    assert (heard, result) == ([1.0, 2.0], None)


def test_a_change_lands_before_its_sender_dies_or_not_at_all():
    """It leaves at 0 and lands at 1."""

    def program(comm):
        value = comm.shared("value", torch.zeros(1))
        if comm.rank == 1:
            value.add(torch.ones(1))
            return None
        comm.elapse(5.0)
        return value.read().item()

    slow = fs.Network(latency_seconds=1.0, bytes_per_second=1e12)
    assert [go_on(program, network=slow, deaths={1: at})[0] for at in (0.5, 1.0, 1.5)] == [0, 0, 1]


def test_who_is_there_when_the_last_comes_takes_part_for_all():
    """All are there at 2; the mean takes until 3.5 or so."""

    def program(comm):
        comm.elapse(float(comm.rank))
        return comm.all_reduce(torch.tensor([2.0**comm.rank])).item()

    slow = fs.Network(latency_seconds=0.5, bytes_per_second=1e12)
    for death, total in ((1.5, 5.0), (2.0, 5.0), (2.5, 7.0)):
        first, lost, last = go_on(program, 3, network=slow, deaths={1: death})
        assert (first, last) == (total, total)
        assert lost.seconds == death


def test_the_others_learn_of_a_death_when_it_happens():
    def program(comm):
        if comm.rank == 1:
            comm.elapse(9.0)
        comm.barrier()
        return comm.now()

    assert go_on(program, 3, deaths={1: 4.0})[::2] == [4.0, 4.0]


def test_a_lock_is_free_from_the_death_of_its_holder_on():
    def program(comm):
        value = comm.shared("value", torch.zeros(1))
        comm.elapse(0.1 * (2 - comm.rank))
        with value.lock():
            comm.elapse(9.0 if comm.rank == 1 else 0.5)
        return comm.now()

    first, lost = go_on(program, deaths={1: 3.0})
    assert (first, lost.rank) == (3.5, 1)


def test_a_worker_that_waits_for_a_value_of_the_lost_is_asked_again():
    def program(comm):
        flags = comm.shared("flags", torch.zeros(comm.size))
        if comm.rank == 1:
            comm.elapse(9.0)
        flags.add(torch.eye(comm.size)[comm.rank])
        flags.wait_until(lambda value: bool(value[list(comm.members)].all()))
        return comm.now(), comm.members

    assert go_on(program, 3, deaths={1: 2.0})[::2] == [(2.0, (0, 2))] * 2


def test_what_a_dying_program_does_on_its_way_out_has_no_effect():
    seen = []

    def program(comm):
        value = comm.shared("value", torch.zeros(1))
        try:
            comm.elapse(2.0)
        finally:
            if comm.rank == 1:
                seen.append("unwound")
                value.add(torch.ones(1))
        comm.elapse(2.0)
        return value.read().item()

    assert go_on(program, deaths={1: 1.0})[0] == 0.0
    assert seen == ["unwound"]


def test_the_last_of_all_to_die_at_random_is_raised():
    with pytest.raises(fs.WorkerLost, match="rank . died at"):
        go_on(lambda comm: comm.elapse(1e9), 4, death_rate=1.0)


# --- pauses ---------------------------------------------------------------------------------------


def test_a_pause_makes_the_step_longer_in_which_it_falls_to_the_tick():
    pauses = [fs.Pause(0, at=1.25, seconds=0.5), fs.Pause(0, at="3 steps", seconds=2)]

    def steps(comm):
        for _ in range(4):
            comm.elapse()
        return comm.now(), comm.meter.ticks_waiting

    program_ended, ticks = fs.launch(
        steps, 1, compute=1.0, network=QUIET, faults=fs.Faults(pauses=pauses)
    )[0]
    assert (program_ended, ticks) == (6.5, 2_500_000_000_000_000_000)
    paused, plain = go_on(clocks, pauses=pauses[0])
    assert paused == ([1.0, 2.5, 3.5, 4.5], 0.5)
    assert plain == ([1.0, 2.0, 3.0, 4.0], 0.0)


def test_pauses_that_overlap_are_one():
    pauses = [fs.Pause(0, at=1.5, seconds=2), fs.Pause(0, at=2.5, seconds=2)]
    assert go_on(clocks, pauses=pauses)[0] == ([1.0, 5.0, 6.0, 7.0], 3.0)


def test_who_waits_in_a_pause_goes_on_when_both_are_over():
    def program(comm):
        if comm.rank == 0:
            comm.elapse(2.0)
        comm.barrier()
        return comm.now(), comm.meter.seconds_waiting

    for pause, until in (((1.0, 0.5), 2.0), ((1.0, 3.0), 4.0), ((2.5, 1.0), 2.0)):
        pauses = [fs.Pause(1, *pause)]
        assert go_on(program, pauses=pauses) == [(2.0, 0.0), (until, until)]


def test_a_late_joiner_is_waited_for_by_those_who_wait_alone():
    def program(comm):
        comm.elapse(1.0)
        before = comm.now()
        comm.barrier()
        return before, comm.now(), comm.meter.seconds_waiting

    early, late = go_on(program, pauses=[fs.Pause(1, seconds=5)])
    assert early == (1.0, 6.0, 5.0)
    assert late == (6.0, 6.0, 5.0)


def test_a_pause_may_be_the_last():
    first, lost = go_on(clocks, pauses=[fs.Pause(1, at=1.5, seconds=9)], deaths={1: 3.0})
    assert first[0][-1] == 4.0
    assert (lost.seconds, lost.step) == (3.0, 0)


def test_a_trace_shows_a_pause_as_waiting(tmp_path):
    faults = fs.Faults(pauses=[fs.Pause(1, at="2 steps", seconds=1)])
    path = tmp_path / "trace.json"
    fs.run("digits-mlp", fs.LocalSGD(4), workers=2, steps=4, faults=faults, trace=path)
    assert '"name":"pause"' in path.read_text().replace('": "', '":"')


# --- at random ------------------------------------------------------------------------------------


def test_random_faults_repeat_with_the_seed_and_differ_with_another():
    def run(seed, lanes):
        faults = {"death_rate": 0.1, "pause_rate": 0.5, "pause_seconds": 0.5}
        return [str(each) for each in go_on(clocks, 8, lanes, seed, **faults)]

    first = run(0, 1)
    assert first == run(0, 2) == run(0, 1)
    assert first != run(1, 1)


def test_a_rate_of_deaths_changes_no_pause():
    rates = {"pause_rate": 0.5, "pause_seconds": 0.5}
    plain = go_on(clocks, 8, **rates)
    dying = go_on(clocks, 8, **rates, death_rate=0.1)
    survivors = [rank for rank, each in enumerate(dying) if not isinstance(each, fs.WorkerLost)]
    assert 0 < len(survivors) < 8
    assert all(plain[rank] == dying[rank] for rank in survivors)


def test_random_faults_are_as_often_and_as_long_as_they_say():
    def program(comm):
        comm.elapse(1000.0)
        return comm.now() - 1000

    paused = go_on(program, 16, pause_rate=0.5, pause_seconds=0.2)
    assert sum(paused) / 16 == pytest.approx(100, rel=0.1)  # 500 pauses of 0.2 s in each
    ends = go_on(lambda comm: comm.elapse(1e6) if comm.rank else None, 400, death_rate=0.01)
    seconds = [loss.seconds for loss in ends[1:]]
    assert sum(seconds) / 399 == pytest.approx(100, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_the_number_of_lanes_changes_nothing(seed):
    """All kinds of calls, by workers that die and pause at random."""

    def program(comm):
        value = comm.shared("value", torch.zeros(4))
        seen = []
        for step in range(12):
            comm.elapse(0.1 + 0.01 * ((comm.rank * 7 + step * 3) % 5))
            seen.append(comm.members)
            with value.lock(in_turn=step % 3 == 0):
                value.add(torch.full((4,), float(comm.rank + step)))
            peer = comm.rank ^ 1
            for call in (
                lambda peer=peer: comm.exchange(torch.tensor([1.0 * comm.rank]), peer).item(),
                lambda step=step: comm.broadcast(torch.tensor([comm.rank]), step % 6).item(),
                lambda: comm.all_reduce(torch.tensor([comm.now()])).item(),
            ):
                try:
                    seen.append(call())
                except fs.WorkerLost as lost:
                    seen.append(str(lost))
            seen.append(comm.now())
        value.retire()
        return seen, value.peek().tolist()

    def run(lanes):
        faults = {"death_rate": 0.15, "pause_rate": 0.5, "pause_seconds": 0.2}
        network = fs.Network.preset("wan-100m")
        results = go_on(program, 6, lanes, seed, network, **faults)
        return [str(each) for each in results]

    results = run(1)
    assert 0 < sum("died" in each and each.startswith("rank") for each in results) < 6
    assert results == run(2) == run(3)


# --- bad input ------------------------------------------------------------------------------------

MOMENT = "must be seconds, a time such as '1.5s', or steps such as '100 steps'"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fs.Faults(deaths=[1]), "'deaths' must map ranks to seconds, or to steps, such as"),
        (lambda: fs.Faults(deaths={-1: 1}), "'deaths' must be at least 0 (got -1)"),
        (lambda: fs.Faults(deaths={1: -2}), "'deaths' must be between 0 and 1e"),
        (lambda: fs.Faults(deaths={1: "2 epochs"}), f"'deaths' {MOMENT} (got '2 epochs')"),
        (lambda: fs.Faults(deaths={1: "0 steps"}), "'deaths' must be at least 1 step"),
        (lambda: fs.Faults(deaths={1: None}), "'deaths' must be a number (got None)"),
        (lambda: fs.Faults(pauses=[3]), "'pauses' must be one such as fs.Pause(2, at='1s'"),
        (lambda: fs.Faults(pauses="late"), "'pauses' must be one such as fs.Pause(2, at='1s'"),
        (lambda: fs.Faults(death_rate=-1), "'death_rate' must be between 0 and 1e+06 (got -1)"),
        (lambda: fs.Faults(pause_seconds=0), "'pause_seconds' must be above 0 and at most 1e+12"),
        (lambda: fs.Pause(-1), "'rank' must be"),
        (lambda: fs.Pause(1, at="soon"), f"'at' {MOMENT} (got 'soon')"),
        (lambda: fs.Pause(1, seconds=0), "'seconds' must be above 0"),
        (lambda: fs.Simulator(faults=3), "'faults' must be one such as fs.Faults(deaths={3: '100"),
        (
            lambda: go_on(print, 2, deaths={2: 1}),
            "'deaths' must name ranks below the number of workers, 2 (got 2)",
        ),
        (
            lambda: go_on(print, 2, pauses=[fs.Pause(5)]),
            "'pauses' must name ranks below the number of workers, 2 (got 5)",
        ),
        (
            lambda: go_on(print, 2, deaths={0: 1, 1: "2 steps"}),
            "'deaths' must leave one of 2 workers alive",
        ),
        (
            lambda: fs.launch(print, 2, "local", faults=fs.Faults(deaths={1: 1})),
            "'faults' must be left out with a backend other than 'sim'",
        ),
    ],
)
def test_bad_faults_are_refused_in_one_line(make, message):
    with pytest.raises(fs.InvalidField) as raised:
        make()
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "network", ["lan-1g", "one-rack", fs.Network(0.01, 1e6, loss=0.2)], ids=str
)
@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "broadcast", "barrier"])
def test_who_is_left_alone_goes_on_over_any_network(network, call):
    def program(comm):
        for _ in range(4):
            comm.elapse(1.0)
            if call == "barrier":
                comm.barrier()
            else:
                getattr(comm, call)(torch.ones(100))
        return comm.now()

    faults = fs.Faults(deaths={1: 1.5})
    result = fs.launch(program, 2, network=network, faults=faults, on_failure="continue")
    assert 4.0 <= result[0] < 4.5
    assert isinstance(result[1], fs.WorkerLost)


def test_what_goes_wrong_when_a_message_arrives_ends_the_run():
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.ones(5), 1)
        elif comm.rank == 1:
            comm.recv(torch.ones(7), 0)
        with suppress(fs.MismatchError):
            comm.barrier()

    network = fs.Network(0.01, 1e6, uplink=1e6)
    with pytest.raises(fs.MismatchError, match="rank 0 sent 5 .* rank 1 expected 7"):
        fs.launch(program, 3, network=network)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_worker_that_dies_while_its_message_travels_is_dead_for_all_from_then_on(lanes):
    def program(comm):
        comm.elapse()
        if comm.rank == 0:
            comm.send(torch.ones(1000), 2)
        elif comm.rank == 1:
            comm.elapse(0.8)
            time.sleep(0.2)  # so that the other lane is through
        return comm.members

    backend = fs.Simulator(
        fs.Network(0.0, 4000.0), fs.Compute(1.0), lanes=lanes, faults=fs.Faults(deaths={0: 1.5})
    )
    assert fs.launch(program, 3, backend, on_failure="continue")[1] == (1, 2)
