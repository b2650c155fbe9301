"""Virtual time: the clock follows the costs, exactly."""

from __future__ import annotations

import math

import pytest
import torch

import flockstep as fs
from flockstep.backends.sim.scheduler import TICKS_PER_SECOND, to_ticks
from flockstep.network import costs

ALPHA, RATE = 1e-3, 1e6
NETWORK = fs.Network(latency_seconds=ALPHA, bytes_per_second=RATE)


def clocks(program, workers, **options):
    def timed(comm):
        program(comm)
        return comm.now()

    return fs.launch(timed, workers, network=options.pop("network", NETWORK), **options)


def train(strategy, steps, **options):
    """The clocks of workers that train a linear model of 100 parameters for `steps` steps."""

    def program(comm):
        model = torch.nn.Linear(100, 1, bias=False)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.01), strategy)
        for _ in range(steps):
            loss = model(torch.ones(1, 100)).square().sum()
            loss.backward()
            worker.step(loss)

    return clocks(program, **options)


N = 400  # bytes
W = 8


@pytest.mark.parametrize("lanes", [1, 2])
def test_sync_sgd_takes_the_closed_form(lanes):
    """n · (c + 2(w−1)α + 2((w−1)/w)nβ), to the last bit of the clock's attoseconds."""
    steps, compute = 37, 0.01
    got = train(fs.SyncSGD(), steps, workers=W, compute=fs.Compute(compute), lanes=lanes)
    all_reduce = 2 * (W - 1) * ALPHA + 2 * (W - 1) / W * N / RATE
    exact = steps * (round(compute * 10**18) + round(all_reduce * 10**18)) / 10**18
    assert got == [exact] * W
    assert exact == pytest.approx(steps * (compute + all_reduce), rel=1e-15)


def test_local_sgd_pays_once_a_period():
    got = train(fs.LocalSGD(period=5), 20, workers=W, compute=fs.Compute(0.01))
    assert got == pytest.approx(
        [20 * 0.01 + 4 * costs.all_reduce_seconds(NETWORK, W, N)] * W, rel=1e-14
    )


def test_independent_workers_pay_nothing_until_the_end():
    assert train(fs.Independent(), 20, workers=W, compute=fs.Compute(0.01)) == pytest.approx(
        [0.2] * W, rel=1e-14
    )


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        (lambda comm, x: comm.all_reduce(x), 2 * 7 * ALPHA + 2 * 7 / 8 * N / RATE),
        (lambda comm, x: comm.all_gather(x), 7 * (ALPHA + N / RATE)),
        (lambda comm, x: comm.broadcast(x), 3 * (ALPHA + N / RATE)),
        (lambda comm, x: comm.barrier(), 3 * ALPHA),
        (lambda comm, x: comm.exchange(x, comm.rank ^ 1), ALPHA + N / RATE),
    ],
    ids=["all_reduce", "all_gather", "broadcast", "barrier", "exchange"],
)
def test_a_call_costs_what_the_design_says_from_when_the_last_arrives(call, seconds):
    def program(comm):
        comm.elapse(0.5 if comm.rank % 2 else 0.1)
        call(comm, torch.zeros(100))

    assert clocks(program, W) == pytest.approx([0.5 + seconds] * W, rel=1e-14)


def test_a_message_arrives_a_transfer_after_it_was_sent():
    def program(comm):
        if comm.rank == 0:
            comm.elapse(1.0)
            comm.send(torch.zeros(100), 1)
        elif comm.rank == 1:
            comm.recv(torch.zeros(100), 0)
        else:
            comm.elapse(2.0)
            comm.send(torch.zeros(0), 3) if comm.rank == 2 else comm.recv(torch.zeros(0), 2)

    transfer = ALPHA + N / RATE
    assert clocks(program, 4) == pytest.approx(
        [1 + transfer, 1 + transfer, 2 + ALPHA, 2 + ALPHA], rel=1e-14
    )


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_a_message_leaves_when_the_one_before_has_been_taken(lanes, first):
    """Whichever of the two threads comes first: the sender that finds the way free did not have to
    sleep, but is no earlier for it."""
    transfer = ALPHA + N / RATE

    def program(comm):
        if comm.rank == 0:
            comm.send(torch.zeros(100), 1)
            if first == "receiver":  # it runs on until it waits for the message of rank 2
                comm.recv(torch.zeros(0), 2)
            comm.send(torch.zeros(100), 1)
        elif comm.rank == 1:
            comm.elapse(1.0)
            comm.recv(torch.zeros(100), 0)
            if first == "receiver":
                comm.send(torch.zeros(0), 2)
            comm.elapse(0.5)
            comm.recv(torch.zeros(100), 0)
        elif first == "receiver":
            comm.recv(torch.zeros(0), 1)
            comm.send(torch.zeros(0), 0)

    relayed = 2 * ALPHA if first == "receiver" else 0.0
    sent = 1 + relayed + transfer
    taken = max(1.5 + relayed / 2, sent)
    assert clocks(program, 3, lanes=lanes)[:2] == pytest.approx([sent, taken], rel=1e-14)


def test_a_sender_that_comes_after_the_message_before_was_taken_does_not_wait():
    transfer = ALPHA + N / RATE

    def program(comm):
        for _ in range(3):
            if comm.rank == 0:
                comm.elapse(1.0)
                comm.send(torch.zeros(100), 1)
            else:
                comm.recv(torch.zeros(100), 0)

    assert clocks(program, 2) == pytest.approx([3 * (1 + transfer)] * 2, rel=1e-14)


def send_and_recv(comm, tensor):
    for sender in (0, 1, 1):  # the second of two in a row waits until the first was taken
        if comm.rank == sender:
            comm.send(tensor, 1 - sender)
        else:
            comm.recv(tensor, sender)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    "call",
    [
        lambda comm, tensor: comm.exchange(tensor, 1 - comm.rank),
        send_and_recv,
        lambda comm, tensor: comm.all_reduce(tensor),
        lambda comm, tensor: comm.barrier(),
    ],
    ids=["exchange", "send", "all_reduce", "barrier"],
)
def test_what_is_not_counted_does_not_even_make_workers_wait(call, lanes):
    """Rank 0 is at 1 s and rank 1 at 2 s, whatever they tell each other."""

    def program(comm):
        comm.elapse(1.0 + comm.rank)
        with comm.unmetered():
            call(comm, torch.ones(1000))
        assert (comm.meter.ticks_waiting, comm.meter.ticks_sending) == (0, 0)

    assert clocks(program, 2, lanes=lanes) == [1.0, 2.0]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_slow_worker_sets_the_pace_of_sync_sgd_but_not_of_ea_wild(lanes):
    slow = fs.Compute(0.01, slow={3: 2.0})
    all_reduce = costs.all_reduce_seconds(NETWORK, W, N)
    synchronous = train(fs.SyncSGD(), 50, workers=W, compute=slow, lanes=lanes)
    assert synchronous == pytest.approx([50 * (0.02 + all_reduce)] * W, rel=1e-12)

    wild = train(fs.EAWild(period=10), 50, workers=W, compute=slow, lanes=lanes)
    blend = 2 * (ALPHA + N / RATE)
    assert wild[3] >= 50 * 0.02
    for rank in set(range(W)) - {3}:
        # Its own computing, and at worst a link that it shares with all each time.
        assert wild[rank] <= 50 * 0.01 + 5 * W * blend


@pytest.mark.parametrize("lanes", [1, 2])
def test_sixteen_workers_share_a_slow_home_link(lanes):
    slow_link = fs.Network(0.0, 1e4)  # 400 bytes: 0.04 s, four steps' worth

    def program(comm):
        shared = comm.shared("x", torch.zeros(100))
        comm.elapse(0.01)
        shared.add(torch.ones(100))

    # All at the same time, each at a sixteenth of the speed.
    assert clocks(program, 16, network=slow_link, lanes=lanes) == pytest.approx(
        [0.01 + 16 * 0.04] * 16, rel=1e-14
    )
    pulls = 4
    wild = train(
        fs.EAWild(), pulls, workers=16, network=slow_link, compute=fs.Compute(0.01), lanes=lanes
    )
    # All end their pulls at the same time, and compute at the same time, while the link is idle.
    assert wild == pytest.approx([pulls * (0.01 + 16 * 0.08)] * 16, rel=1e-12)


def test_a_reader_sees_what_landed_before_and_not_what_comes_after():
    def program(comm):
        shared = comm.shared("x", torch.zeros(1))
        comm.elapse(float(comm.rank))
        if comm.rank in (1, 3):
            shared.add(torch.ones(1))
        return float(shared.read())

    assert fs.launch(program, 5, network=fs.Network.preset("ideal")) == [0, 1, 1, 2, 2]


def test_the_lock_is_given_in_the_order_of_asking():
    def program(comm):
        shared = comm.shared("x", torch.zeros(4))
        comm.elapse([0.3, 0.0, 0.2, 0.1][comm.rank])
        with shared.lock():
            comm.elapse(1.0)
        return comm.now()

    assert fs.launch(program, 4, network=fs.Network.preset("ideal")) == pytest.approx(
        [4.0, 1.0, 3.0, 2.0]
    )


def test_easgd_takes_turns_at_the_pace_of_the_slowest():
    got = train(fs.EASGD(period=1), 10, workers=4, compute=fs.Compute(0.01, slow={2: 5.0}))
    assert min(got) > 9 * 0.05


def test_jitter_is_seeded_and_of_mean_one():
    def program(comm):
        for _ in range(4000):
            comm.elapse()
        return comm.now()

    compute = fs.Compute(0.01, jitter=0.5)
    first = fs.launch(program, 3, compute=compute, seed=1)
    assert first == fs.launch(program, 3, compute=compute, seed=1)
    assert first != fs.launch(program, 3, compute=compute, seed=2)
    assert len(set(first)) == 3
    spread = math.sqrt(math.exp(0.25) - 1)
    for clock in first:  # five standard errors
        assert clock / 40 == pytest.approx(1, abs=5 * spread / math.sqrt(4000))


def test_measured_steps_take_real_time():
    def program(comm):
        model = torch.nn.Linear(300, 300)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.01), fs.Independent()
        )
        for _ in range(5):
            loss = model(torch.ones(50, 300)).square().mean()
            loss.backward()
            worker.step(loss)
        return comm.now()

    assert all(0 < clock < 5 for clock in fs.launch(program, 2, compute=fs.Compute.measured()))


def test_households_talk_on_the_inner_link():
    inner, outer = (
        fs.Link(0.0, 4e5),
        fs.Network(0.5, math.inf, inside=fs.Link(0.0, 4e5), household_size=2),
    )
    assert outer.between((2, 3)) == inner
    assert outer.between((1, 2)) is outer

    def program(comm):
        comm.split(comm.rank // 2).exchange(torch.zeros(100), 1 - comm.rank % 2)
        inside = comm.now()
        comm.barrier()
        return inside, comm.now()

    assert fs.launch(program, 4, network=outer) == [(0.001, 1.001)] * 4


def test_background_work_takes_the_time_that_is_left_of_it():
    """An all-reduce of two workers is two messages of a second: during 0.5 s of computing, or 5
    s.
    """

    def program(comm):
        for seconds in (0.5, 5.0):
            with comm.in_background() as wait:
                comm.all_reduce(torch.zeros(4))
            comm.elapse(seconds)
            wait()
        return comm.now()

    network = fs.Network(latency_seconds=1.0, bytes_per_second=1e30)
    assert fs.launch(program, 2, network=network) == pytest.approx([2.0 + 5.0] * 2)


def test_shared_tensors_cannot_be_used_in_the_background():
    def program(comm):
        shared = comm.shared("value", torch.zeros(1))
        with comm.in_background():
            shared.read()

    with pytest.raises(
        fs.FlockstepError, match=r"rank \d: read of shared 'value' cannot be in the background"
    ):
        fs.launch(program, 2)


def test_the_time_of_a_call_is_its_transfer_and_the_rest_is_waiting():
    """In ticks, so to the last digit: a worker that comes 10 ms late, and a link that two
    share."""
    tensor = torch.zeros(250)  # 1,000 bytes: 1 ms, and 1 ms latency
    ms = TICKS_PER_SECOND // 1000

    def program(comm):
        meter, seen = comm.meter, []
        shared = comm.shared("s", tensor)

        def measure(call):
            comm.barrier()
            comm.elapse(0.010 * (comm.rank == 0))
            waiting, sending = meter.ticks_waiting, meter.ticks_sending
            call()
            seen.append((meter.ticks_waiting - waiting, meter.ticks_sending - sending))

        measure(lambda: comm.all_reduce(tensor.clone()))
        measure(lambda: comm.exchange(tensor, 1 - comm.rank))
        measure(lambda: comm.recv(tensor.clone(), 0) if comm.rank else comm.send(tensor, 1))
        measure(lambda: comm.barrier())
        comm.barrier()
        waiting, sending = meter.ticks_waiting, meter.ticks_sending
        shared.read()  # both at the same moment: the bytes take twice as long, the latency does not
        seen.append((meter.ticks_waiting - waiting, meter.ticks_sending - sending))
        return seen

    late, other = fs.launch(program, 2, network=NETWORK)
    all_reduce = to_ticks(costs.all_reduce_seconds(NETWORK, 2, 1000))
    assert late == [(0, all_reduce), (0, 2 * ms), (0, 2 * ms), (0, ms), (0, 3 * ms)]
    assert other == [
        (10 * ms, all_reduce),
        (10 * ms, 2 * ms),
        (12 * ms, 0),  # the message's cost is its sender's
        (10 * ms, ms),
        (0, 3 * ms),
    ]
