"""How long a worker waits and sends, and how old its updates are, on every backend."""

from __future__ import annotations

import time

import pytest
import torch

import flockstep as fs
from flockstep.comm import Trace

LATE = 0.25  # seconds
BUSY = 3.0  # that a busy machine may add


def be_late(comm, seconds=LATE):
    if comm.meter.is_virtual:
        comm.elapse(seconds)
    else:
        time.sleep(seconds)


@pytest.mark.wall_clock
def test_a_late_worker_makes_the_other_wait_about_that_long(launch):
    def program(comm):
        meter, seen = comm.meter, {}
        tensor = torch.zeros(8)
        flag = comm.shared("flag", torch.zeros(1, dtype=torch.int64))

        def measure(name, first, second):
            comm.barrier()
            if comm.rank == 0:
                be_late(comm)
            began, waiting, sending = comm.now(), meter.seconds_waiting, meter.seconds_sending
            (second if comm.rank else first)()
            took = comm.now() - began
            seen[name] = meter.seconds_waiting - waiting, meter.seconds_sending - sending, took

        def together(name, call):
            measure(name, call, call)

        together("all_reduce", lambda: comm.all_reduce(tensor))
        together("all_gather", lambda: comm.all_gather(tensor))
        together("broadcast", lambda: comm.broadcast(tensor))
        together("barrier", comm.barrier)
        together("exchange", lambda: comm.exchange(tensor, 1 - comm.rank))
        together("split", lambda: comm.split(0))
        together("shared", lambda: comm.shared("s", tensor))
        measure("recv", lambda: comm.send(tensor, 1), lambda: comm.recv(tensor, 0))
        measure(
            "wait_until",
            lambda: flag.write(torch.ones(1, dtype=torch.int64)),
            lambda: flag.wait_until(lambda value: value.item() == 1),
        )
        return seen

    late, other = launch(program, 2)
    for name, (waiting, sending, took) in other.items():
        assert 0.8 * LATE <= waiting <= LATE + BUSY, name
        assert waiting + sending <= took + 1e-9, name
    assert sum(waiting for waiting, *_ in late.values()) < LATE + BUSY


@pytest.mark.wall_clock
def test_who_wants_a_lock_waits_for_its_holder(launch):
    def program(comm):
        shared = comm.shared("s", torch.zeros(8))
        if comm.rank == 0:
            with shared.lock():
                comm.barrier()
                be_late(comm)
        else:
            comm.barrier()
            before = comm.meter.seconds_waiting
            with shared.lock():
                be_late(comm)  # what is done with the lock is computing
            return comm.meter.seconds_waiting - before
        return None

    _, waiting = launch(program, 2)
    assert 0.8 * LATE <= waiting < 2 * LATE + BUSY


def test_waiting_and_sending_are_no_longer_than_the_run_and_nothing_is_counted_unmetered(launch):
    def program(comm):
        meter, tensor = comm.meter, torch.zeros(100_000)
        shared = comm.shared("s", tensor)
        waiting, sending = meter.seconds_waiting, meter.seconds_sending
        with comm.unmetered():
            if comm.rank == 0:
                be_late(comm)
            comm.all_reduce(tensor)
            shared.add(tensor)
            comm.exchange(tensor, 1 - comm.rank)
        assert (meter.seconds_waiting, meter.seconds_sending) == (waiting, sending)
        assert meter.staleness_count == 0
        for _ in range(5):
            comm.all_reduce(tensor)
            shared.blend(tensor, 0.5)
        return meter.seconds_waiting, meter.seconds_sending - sending, comm.now()

    for waiting, sending, seconds in launch(program, 2):
        assert waiting >= 0
        assert sending > 0
        assert waiting + sending <= seconds


def test_staleness_is_how_often_others_have_changed_the_value_since_it_was_read(launch, request):
    def program(comm):
        one = torch.ones(4)
        shared, clock = comm.shared("s", one), comm.shared("clock", torch.ones(1).long())
        mailbox = comm.shared("mailbox", one, home=0)
        stale = []

        def turn(rank, *calls):
            before = comm.meter.staleness_sum, comm.meter.staleness_count
            if comm.rank == rank:
                for call in calls:
                    call()
                after = comm.meter.staleness_sum, comm.meter.staleness_count
                stale.append((after[0] - before[0], after[1] - before[1]))
            comm.barrier()

        def add():
            shared.add(one)

        def look():
            with comm.unmetered():
                shared.read()

        turn(0, add, add, add)  # nobody else has changed it
        turn(1, add)  # after three by the other
        turn(1, add, lambda: shared.write(one))  # still has not read it: three each
        turn(1, shared.read, add)
        turn(0, lambda: shared.blend(one, 0.5))  # four by the other since the start; reads, too
        turn(1, look, add)  # a look from outside does not count as having read it
        turn(0, add)
        turn(0, lambda: clock.add(torch.ones(1).long()), lambda: mailbox.add(one))  # no updates
        return stale, comm.meter.staleness_max

    first, second = launch(program, 2)
    if "ray" in request.node.callspec.id:
        assert all(count == 0 for stale, _ in (first, second) for _, count in stale)
        return
    assert first == ([(0, 3), (4, 1), (1, 1), (0, 0)], 4)
    assert second == ([(3, 1), (6, 2), (0, 1), (1, 1)], 3)


def test_updates_of_a_slow_worker_are_as_stale_as_its_speed_says():
    """The fast worker pushes every tick, the slow one every third, after the fast one's."""
    steps = 6

    def program(comm):
        model = torch.nn.Linear(2, 1)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), 0.1), fs.AsyncSGD())
        for _ in range(steps):
            loss = model(torch.ones(2)).square().sum()
            loss.backward()
            worker.step(loss)
        worker.finish()
        meter = comm.meter
        return meter.staleness_sum, meter.staleness_max, meter.staleness_count

    compute = fs.Compute(0.01, slow={1: 3.0})
    fast, slow = fs.launch(program, 2, network=fs.Network.preset("ideal"), compute=compute)
    assert fast == (1, 1, steps)  # at the fourth, the slow one's first
    assert slow == (6, 3, steps)  # three at its first and second; then the fast one has ended


@pytest.mark.wall_clock
def test_a_trace_has_all_time_and_all_bytes(launch):
    def program(comm):
        meter, tensor = comm.meter, torch.zeros(1000)
        assert meter.trace is None
        meter.trace = Trace(10_000)
        shared = comm.shared("s", tensor)
        at_rank_2 = comm.shared("h", tensor, home=2)
        for _ in range(3):
            comm.elapse(0.01)
            comm.all_reduce(tensor)
            comm.exchange(tensor, comm.rank ^ 1)
            with shared.lock():
                shared.add(tensor)
            at_rank_2.read()
        if comm.rank == 0:
            comm.send(tensor, 1)
        elif comm.rank == 1:
            comm.recv(tensor, 0)
        now = comm.now()
        return (
            meter.trace.table(),
            meter.seconds_waiting,
            meter.seconds_sending,
            now,
            meter.bytes_sent,
        )

    for rank, ((rows, names), waiting, sending, now, nbytes) in enumerate(launch(program, 4)):
        kinds, starts, durations = rows[:, 0], rows[:, 2], rows[:, 3]
        assert durations[kinds == 1].sum().item() == pytest.approx(waiting, abs=1e-9)
        assert durations[kinds == 2].sum().item() == pytest.approx(sending, abs=1e-9)
        assert rows[:, 4].sum().item() == nbytes
        assert (starts[1:] >= (starts + durations)[:-1] - 1e-9).all()
        assert now - 1e-9 <= (starts + durations)[-1].item() <= now + BUSY
        assert {"computing", "all_reduce", "exchange", "add s"} <= set(names)
        exchanges = rows[(rows[:, 1] == names.index("exchange"))]
        assert set(exchanges[:, 5].tolist()) == {float(rank ^ 1)}
        if rank != 2:  # which has it for nothing
            reads = rows[(rows[:, 1] == names.index("read h"))]
            assert set(reads[:, 5].tolist()) == {2.0}


@pytest.mark.wall_clock
def test_what_is_done_off_the_clock_takes_no_time_of_the_run(local):
    def program(comm):
        before = comm.now()
        for _ in range(3):
            with comm.off_the_clock():
                inside = comm.now()
                time.sleep(LATE)
                comm.barrier()
                assert comm.now() == inside  # it stands still
        return comm.now() - before

    for seconds in fs.launch(program, 2, local):
        assert seconds < LATE


@pytest.mark.wall_clock
def test_who_was_ahead_is_as_far_ahead_after_having_been_off_the_clock(local):
    """The late worker arrives with its clock ahead of the other's, which was held on arrival. It
    goes on when the other's clock shows the same: so at any moment both show the same again.
    """

    late, noise = 1.5, 0.7  # a busy machine may wake either of them late

    def program(comm):
        if comm.rank == 0:
            be_late(comm, late)
        with comm.off_the_clock():
            held = comm.now()
            comm.barrier()
        return held, comm.now(), time.monotonic() - comm.now()

    (ahead, goes_on, began), (behind, goes_on_behind, began_behind) = fs.launch(program, 2, local)
    assert ahead - behind >= late - noise
    assert goes_on - goes_on_behind == pytest.approx(ahead - behind, abs=noise)
    assert began == pytest.approx(began_behind, abs=noise)


@pytest.mark.wall_clock
def test_a_clock_that_catches_up_has_waited(local):
    def program(comm):
        meter = comm.meter
        meter.trace = Trace(100)
        comm.catch_up(100.0)
        comm.catch_up(50.0)  # it never goes back
        rows, names = meter.trace.table()
        shown = rows[rows[:, 1] == names.index("catch_up")]
        return comm.now(), meter.seconds_waiting, meter.seconds_sending, shown[:, 3].sum().item()

    for now, waiting, sending, shown in fs.launch(program, 2, local):
        assert 100 <= now < 100 + BUSY
        assert 100 - BUSY < waiting <= now
        assert sending == 0
        assert shown == pytest.approx(waiting)
