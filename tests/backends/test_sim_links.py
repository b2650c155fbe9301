"""Links that are shared, unequal, lossy and change in time: virtual time by hand."""

from __future__ import annotations

import math

import pytest
import torch

import flockstep as fs
from flockstep.backends.sim.scheduler import to_ticks
from flockstep.errors import MessageLost, MismatchError
from flockstep.network import costs

ALPHA, RATE = 1e-3, 1e6
PLAIN = fs.Network(ALPHA, RATE)
W, N = 8, 400
TENSOR = torch.zeros(100)  # 400 bytes
SECOND = torch.zeros(250_000)  # of a link of 1 MB/s


def run(program, workers, network, **how):
    """What each worker returns, and its clock in ticks."""

    def timed(comm):
        return program(comm), comm._slot.clock

    return fs.launch(timed, workers, network=network, compute=0.0, **how)


def clocks(program, workers, network, **how):
    return [ticks / 10**18 for _, ticks in run(program, workers, network, **how)]


def equal_links():
    """One link between any two, said in ways that go through shared links."""
    matrix = ((RATE,) * W,) * W
    return {
        "matrix": fs.Network(ALPHA, RATE, bandwidths=matrix),
        "latencies": fs.Network(ALPHA, RATE, latencies=((ALPHA,) * W,) * W),
        "access": fs.Network(ALPHA, math.inf, uplink=RATE, downlink=RATE),
        "site": fs.Network(ALPHA, RATE, sites=(fs.Site("here"),)),
        "trace": fs.Network(ALPHA, RATE, trace=(fs.LinkChange(1e6, 0.5),)),
    }


CALLS = {
    "all_reduce": (
        lambda comm: comm.all_reduce(TENSOR.clone()),
        costs.all_reduce_seconds(PLAIN, W, N),
    ),
    "all_gather": (lambda comm: comm.all_gather(TENSOR), costs.all_gather_seconds(PLAIN, W, N)),
    "broadcast": (
        lambda comm: comm.broadcast(TENSOR.clone(), 3),
        costs.broadcast_seconds(PLAIN, W, N),
    ),
    "barrier": (lambda comm: comm.barrier(), costs.barrier_seconds(PLAIN, W)),
    "exchange": (
        lambda comm: comm.exchange(TENSOR, comm.rank ^ 1),
        costs.message_seconds(PLAIN, N),
    ),
}


@pytest.mark.parametrize("form", list(equal_links()))
@pytest.mark.parametrize("call", list(CALLS))
def test_equal_links_alone_give_the_closed_forms_to_the_tick(call, form):
    act, seconds = CALLS[call]

    def program(comm):
        comm.elapse(0.5 if comm.rank % 2 else 0.1)
        act(comm)

    ends = run(program, W, equal_links()[form])
    assert {ticks for _, ticks in ends} == {to_ticks(0.5) + to_ticks(seconds)}


@pytest.mark.parametrize("form", ["matrix", "latencies", "site", "trace"])
def test_what_all_want_of_one_worker_divides_what_it_can_carry_however_links_are_said(form):
    """Readers and writers of one shared tensor; and one worker that sends to many."""

    def program(comm):
        homes = [comm.shared(f"{rank}", TENSOR, home=rank) for rank in range(W)]
        comm.elapse(0.001 * comm.rank)
        if comm.rank % 2:
            homes[0].read()
        else:
            homes[0].add(TENSOR)
        homes[3].blend(TENSOR, 0.5)
        comm.barrier()
        if comm.rank == 2:
            comm.add_to_each([box for box in homes if not box.is_home], TENSOR)

    plain, shared = (clocks(program, W, network) for network in (PLAIN, equal_links()[form]))
    assert shared == pytest.approx(plain, rel=1e-12)
    assert plain[2] - plain[0] == pytest.approx(ALPHA + 7 * N / RATE)


@pytest.mark.parametrize("is_traced", [False, True])
def test_what_travels_in_the_background_obeys_links_and_their_changes(is_traced):
    """Alone, it takes what it takes in the foreground."""
    trace = (fs.LinkChange(0.3, bandwidth=0.1, latency=3.0),) if is_traced else ()
    sites = (fs.Site("here"), fs.Site("there"))
    network = fs.Network(ALPHA, RATE, sites=sites, trace=trace)

    def program(comm, is_hidden):
        def exchange():
            comm.broadcast(SECOND.clone())
            comm.all_reduce(SECOND.clone())
            if comm.rank == 0:
                comm.send(SECOND, 3)
            elif comm.rank == 3:
                comm.recv(SECOND.clone(), 0)

        if not is_hidden:
            exchange()
            return
        with comm.in_background() as wait:
            exchange()
        wait()

    seen, hidden = (
        clocks(lambda comm, each=each: program(comm, each), 4, network) for each in (False, True)
    )
    assert hidden == pytest.approx(seen, rel=1e-12)


def test_nosync_pays_for_slow_links_whether_or_not_its_centre_is_late():
    network = fs.Network(ALPHA, RATE, trace=(fs.LinkChange(0.0, bandwidth=0.1),))
    how = {"workers": 4, "steps": 5, "compute": 0.001}
    slow, plain = (
        fs.run("digits-mlp", fs.NoSync(0.1), network=each, **how).metrics["seconds"]
        for each in (network, PLAIN)
    )
    assert slow > 5 * plain


@pytest.mark.parametrize("algorithm", ["ring", "tree", "hierarchical", "torus"])
def test_adding_up_takes_its_time_in_every_algorithm(algorithm):
    def seconds(network, algorithm):
        strategy = fs.SyncSGD(all_reduce=algorithm)
        how = {"workers": 4, "steps": 1, "compute": 0.0, "network": network}
        return fs.run("digits-mlp", strategy, **how).metrics["seconds"]

    ideal = fs.Network(0.0, math.inf)
    adding = fs.Network(0.0, math.inf, seconds_per_summed_byte=1e-9)
    assert seconds(ideal, algorithm) == 0
    took, flat = seconds(adding, algorithm), seconds(adding, "flat")
    if algorithm == "ring":
        assert took == pytest.approx(flat, rel=1e-3)
    assert took >= 0.99 * flat > 0


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "broadcast", "barrier"])
def test_a_ring_of_those_who_are_left_is_shorter(call):
    def program(comm):
        comm.elapse(0.1)
        comm.barrier()
        CALLS[call][0](comm)

    def ends(network):
        told = fs.launch(
            lambda comm: (program(comm), comm.now())[1],
            W,
            network=network,
            compute=0.0,
            faults=fs.Faults(deaths={7: 0.05}),
            on_failure="continue",
        )
        return told[:7]

    form = getattr(costs, f"{call}_seconds")
    seconds = form(PLAIN, 7) if call == "barrier" else form(PLAIN, 7, N)
    expected = 0.1 + costs.barrier_seconds(PLAIN, 7) + seconds
    assert ends(PLAIN) == pytest.approx([expected] * 7, rel=1e-9)
    assert ends(equal_links()["matrix"]) == pytest.approx([expected] * 7, rel=1e-9)


@pytest.mark.parametrize("workers", [2, 3, 5, 7])
def test_a_broadcast_among_any_number_is_the_closed_form(workers):
    ends = run(lambda comm: comm.broadcast(TENSOR.clone()), workers, equal_links()["matrix"])
    expected = to_ticks(costs.broadcast_seconds(PLAIN, workers, N))
    assert {ticks for _, ticks in ends} == {expected}


@pytest.mark.parametrize("form", ["plain", "trace", "matrix"])
def test_messages_and_shared_tensors_alone_give_the_closed_forms_to_the_tick(form):
    network = (equal_links() | {"plain": PLAIN})[form]

    def program(comm):
        shared = comm.shared("x", TENSOR)
        mailbox = comm.shared("m", TENSOR, home=1)
        took = []
        if comm.rank:
            comm.recv(TENSOR.clone(), 0)
            return took
        for call in (
            lambda: comm.send(TENSOR, 1),
            shared.read,
            lambda: shared.write(TENSOR),
            lambda: shared.add(TENSOR),
            lambda: shared.blend(TENSOR, 0.5),
            lambda: mailbox.add(TENSOR),
        ):
            before = comm._slot.clock
            call()
            took.append(comm._slot.clock - before)
        return took

    took, _ = run(program, 2, network)[0]
    one, two = to_ticks(costs.message_seconds(PLAIN, N)), to_ticks(costs.blend_seconds(PLAIN, N))
    assert took == [one, one, one, one, two, one]


# ---- Sharing


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_late_transfer_slows_an_earlier_one(lanes):
    """Both have two seconds of bytes; of the first one's half is through when the other begins."""

    def program(comm):
        shared = comm.shared("x", torch.zeros(500_000))
        comm.barrier()
        if comm.rank == 0:
            shared.read()
        else:
            comm.elapse(1.0)
            shared.add(torch.ones(500_000))

    # Rank 0: 1 s alone, then 1 s of bytes at half the speed, until 3 s. Rank 1 has 1 s of bytes
    # left then, and the link for itself: until 4 s.
    assert clocks(program, 2, fs.Network(0.0, RATE), lanes=lanes) == [3.0, 4.0]


def test_two_equal_transfers_over_one_link_take_twice_as_long():
    network = fs.Network(0.0, math.inf, uplink=RATE)

    def program(comm):
        mailbox = comm.shared("m", SECOND, home=2)
        if comm.rank < 2:
            mailbox.read()

    assert clocks(program, 3, network) == [2.0, 2.0, 0.0]


def test_max_min_fairness_of_three_flows_and_two_links():
    """Links of 1 and 3 MB/s; one flow uses both, and each link has one of its own. The narrow link
    gives ½ to each of its two; the wide one has 2½ left for its own. With 1 MB each, that one ends
    after 0.4 s, and the others, which nobody keeps from having their ½, after 2 s."""
    inf = math.inf
    network = fs.Network(0.0, inf, uplink=(1e6, inf, inf, inf), downlink=(inf, 3e6, inf, inf))

    def program(comm):
        at_0 = comm.shared("at 0", SECOND, home=0)
        at_1 = comm.shared("at 1", SECOND, home=1)
        if comm.rank in (1, 3):
            at_0.read()  # 0 → 1 over both links, 0 → 3 over the narrow one
        elif comm.rank == 2:
            at_1.add(SECOND)  # 2 → 1 over the wide one

    assert clocks(program, 4, network) == pytest.approx([0.0, 2.0, 0.4, 2.0], rel=1e-15)


def test_all_that_goes_between_two_sites_shares_their_link():
    network = fs.Network(0.0, RATE, sites=(fs.Site("a", 2, fs.Link(0.0, 1e9)), fs.Site("b", 2)))

    def program(comm):
        comm.exchange(SECOND, comm.rank ^ 2)

    assert clocks(program, 4, network) == [2.0] * 4

    def inside(comm):
        comm.exchange(SECOND, comm.rank ^ 1)

    assert clocks(inside, 4, network) == pytest.approx([0.001, 0.001, 1.0, 1.0], rel=1e-14)


def test_links_may_differ_by_direction_and_the_slowest_sets_the_pace_of_a_ring():
    rates = ((1, 1e6, 4e6), (2e6, 1, 1e6), (4e6, 1e6, 1))
    network = fs.Network(0.0, 1.0, bandwidths=rates)

    def program(comm):
        if comm.rank == 0:
            comm.send(SECOND, 1)
        elif comm.rank == 1:
            comm.recv(SECOND.clone(), 0)
            comm.send(SECOND, 0)
        if comm.rank == 0:
            comm.recv(SECOND.clone(), 1)

    assert clocks(program, 3, network)[:2] == [1.5, 1.5]

    def ring(comm):  # 0→1 at 1, 1→2 at 1, 2→0 at 4 MB/s
        comm.all_reduce(SECOND.clone())

    assert clocks(ring, 3, network) == pytest.approx([4 / 3] * 3, rel=1e-14)


def test_a_route_is_the_same_both_ways_unless_the_way_back_has_one():
    sites = tuple(fs.Site(name, 1) for name in "abc")
    routes = (fs.Route("a", "b", 0.25, math.inf), fs.Route("b", "a", 0.5, math.inf))
    network = fs.Network(1.0, math.inf, sites=sites, routes=routes)

    def program(comm):
        times = []
        for sender, receiver in ((0, 1), (1, 0), (1, 2), (2, 1)):
            began = comm.now()
            if comm.rank == sender:
                comm.send(TENSOR, receiver)
                times.append(comm.now() - began)
            elif comm.rank == receiver:
                comm.recv(TENSOR.clone(), sender)
        return times

    first, second, third = (each for each, _ in run(program, 3, network))
    assert (first, second, third) == ([0.25], [0.5, 1.0], [1.0])


# ---- Changes in time


def test_a_trace_changes_the_speed_in_the_middle_of_a_transfer():
    """One second of bytes: half of it until 0.5 s, a quarter at half the speed until 1 s, and the
    rest at a quarter of the speed: one second more."""
    trace = (fs.LinkChange(0.5, bandwidth=0.5), fs.LinkChange(1.0, bandwidth=0.25, latency=3.0))
    network = fs.Network(0.125, RATE, trace=trace)

    def program(comm):
        comm.exchange(SECOND, 1 - comm.rank)
        first = comm.now()
        comm.exchange(torch.zeros(0), 1 - comm.rank)
        return first

    for first, ticks in run(program, 2, network):
        assert first == 2.0 + 0.125
        assert ticks == to_ticks(2.125 + 0.375)


def test_a_change_of_some_ranks_leaves_the_others_alone():
    network = fs.Network(0.0, RATE, trace=(fs.LinkChange(0.0, bandwidth=0.5, ranks=(0,)),))

    def program(comm):
        comm.exchange(SECOND, comm.rank ^ 1)

    assert clocks(program, 4, network) == [2.0, 2.0, 1.0, 1.0]


# ---- Loss

LOSSY = fs.Network(ALPHA, RATE, loss=0.25)


@pytest.mark.parametrize("network", [LOSSY, fs.Network(ALPHA, math.inf, uplink=RATE, loss=0.25)])
def test_lost_messages_are_sent_again_and_paid_for(network):
    """As many attempts as a geometric law says, to within five deviations; each that is lost costs
    its bytes once more, and a round trip."""
    messages = 400

    def program(comm):
        for _ in range(messages):
            if comm.rank == 0:
                comm.send(TENSOR, 1)
            else:
                comm.recv(TENSOR.clone(), 0)
        return comm.meter.bytes_sent

    (sent, ticks), _ = run(program, 2, network, seed=3)
    again = sent // N - messages
    assert sent % N == 0
    mean, deviation = messages / 3, math.sqrt(messages * 0.25) / 0.75
    assert abs(again - mean) < 5 * deviation
    one = to_ticks(N / RATE)
    assert ticks == pytest.approx(
        (messages + again) * one + (messages + 2 * again) * to_ticks(ALPHA)
    )


def test_collectives_pay_for_what_is_lost_too():
    def program(comm):
        for _ in range(20):
            comm.all_reduce(TENSOR.clone())
        return comm.meter.bytes_sent

    lossless, lossy = (run(program, 4, network) for network in (PLAIN, LOSSY))
    assert sum(sent for sent, _ in lossy) == pytest.approx(
        4 / 3 * sum(sent for sent, _ in lossless), rel=0.15
    )
    assert lossy[0][1] > lossless[0][1]


def test_a_message_that_may_be_lost_is_paid_for_and_missed_when_it_would_have_come():
    def program(comm):
        heard = []
        for number in range(100):
            if comm.rank == 0:
                comm.send(torch.full((100,), float(number)), 1, may_be_lost=True)
                continue
            try:
                heard.append(float(comm.recv(torch.zeros(100), 0, may_be_lost=True)[0]))
            except MessageLost as error:
                assert str(error) == "rank 1: a message of rank 0 was lost"
        return heard if comm.rank else comm.meter.bytes_sent

    (sent, ticks), (heard, other) = run(program, 2, LOSSY)
    assert sent == 100 * N
    assert ticks == other == 100 * to_ticks(costs.message_seconds(LOSSY, N))
    assert heard == sorted(heard) and 55 <= len(heard) <= 95


def test_each_side_of_an_exchange_may_be_lost_by_itself():
    def program(comm):
        missed = []
        for number in range(200):
            try:
                comm.exchange(TENSOR, 1 - comm.rank, may_be_lost=True)
            except MessageLost:
                missed.append(number)
        return missed

    (first, ticks), (second, _) = run(program, 2, LOSSY)
    assert ticks == 200 * to_ticks(costs.message_seconds(LOSSY, N))
    assert 25 <= len(first) <= 80 and 25 <= len(second) <= 80
    assert set(first) != set(second) and set(first) & set(second)


def test_an_add_that_is_lost_changes_nothing_and_tells_nobody():
    def program(comm):
        shared = comm.shared("x", torch.zeros(1))
        if comm.rank == 0:
            for _ in range(200):
                shared.add(torch.ones(1), may_be_lost=True)
        comm.barrier()
        with comm.unmetered():
            return float(shared.read())

    arrived = run(program, 2, LOSSY)[1][0]
    assert 120 <= arrived <= 180


def test_of_a_blend_the_request_or_the_answer_may_be_lost():
    def program(comm):
        shared = comm.shared("x", torch.zeros(1))
        heard = 0
        if comm.rank == 0:
            for _ in range(400):
                with comm.unmetered():
                    value = shared.read()
                try:
                    shared.blend(value + 1, 1.0, may_be_lost=True)
                    heard += 1
                except MessageLost:
                    continue
        comm.barrier()
        with comm.unmetered():
            return heard, float(shared.read())

    heard, changed = run(program, 2, LOSSY)[0][0]
    assert 185 <= heard <= 265  # 0.75² of 400
    assert 260 <= changed <= 340  # 0.75 of 400: some answers were lost
    assert heard < changed


@pytest.mark.parametrize("call", ["message", "exchange"])
def test_both_sides_say_the_same_of_what_may_be_lost(call):
    def program(comm):
        may_be_lost = comm.rank == 0
        if call == "exchange":
            comm.exchange(TENSOR, 1 - comm.rank, may_be_lost=may_be_lost)
        elif comm.rank == 0:
            comm.send(TENSOR, 1, may_be_lost=True)
        else:
            comm.recv(TENSOR.clone(), 0)

    message = "rank 0 said that the message between them may be lost, rank 1 did not"
    with pytest.raises(MismatchError, match=message):
        fs.launch(program, 2, network=PLAIN)


# ---- Whole trainings

EVERYTHING = fs.Network(
    2e-3,
    4e5,
    sites=(
        fs.Site("a", inside=fs.Link(1e-4, 1e6), uplink=2e5, downlink=3e5),
        fs.Site("b", uplink=1e5, downlink=4e5),
    ),
    routes=(fs.Route("b", "a", 5e-3, 1e5),),
    trace=(
        fs.LinkChange(0.03, bandwidth=0.5, latency=2.0),
        fs.LinkChange(0.05, bandwidth=0.3, site="a"),
        fs.LinkChange(0.06, bandwidth=2.0, ranks=(1, 2)),
    ),
    loss=0.1,
)
STRATEGIES = [
    fs.SyncSGD(),
    fs.AsyncSGD(),
    fs.GoSGD(0.5),
    fs.ADPSGD(),
    fs.DPSGD(),
    fs.EAWild(period=2),
    fs.NoSync(0.1),
]


def train(strategy, network, workers=5, steps=6, **how):
    def program(comm):
        torch.manual_seed(comm.rank)
        model = torch.nn.Linear(60, 1)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), 1e-3), strategy)
        for _ in range(steps):
            loss = model(torch.randn(2, 60)).square().mean()
            loss.backward()
            worker.step(loss)
        worker.finish()
        meter = comm.meter
        figures = meter.bytes_sent, meter.ticks_waiting, meter.ticks_sending
        return worker.flat.state.tolist(), comm._slot.clock, figures

    compute = fs.Compute(0.01, jitter=0.3)
    return fs.launch(program, workers, network=network, compute=compute, **how)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: each.name)
def test_with_everything_on_a_run_depends_on_neither_lanes_nor_the_time_of_day(strategy):
    first = train(strategy, EVERYTHING, lanes=1)
    assert first == train(strategy, EVERYTHING, lanes=1)
    assert first == train(strategy, EVERYTHING, lanes=3)
    assert first != train(strategy, EVERYTHING, lanes=1, seed=1)


def test_a_worker_behind_a_slow_link_does_not_slow_the_others_of_an_asynchronous_method():
    slow = fs.Network(0.0, 1e9, uplink=(1e9, 1e9, 1e9, 1e4), downlink=(1e9, 1e9, 1e9, 1e4))
    even = fs.Network(0.0, 1e9, uplink=1e9, downlink=1e9)
    # The lock of the server is held while a change travels, so one without locks.
    uneven_ends = [ticks for _, ticks, _ in train(fs.Hogwild(), slow, workers=4)]
    even_ends = [ticks for _, ticks, _ in train(fs.Hogwild(), even, workers=4)]
    assert uneven_ends[3] > 2 * even_ends[3]

    def fast_steps(network):
        """When rank 0 has taken its steps, before all meet at the end."""

        def program(comm):
            shared = comm.shared("x", torch.zeros(60))
            for _ in range(5):
                comm.elapse(0.01)
                shared.add(torch.ones(60))
                shared.read()
            return comm.now()

        return fs.launch(program, 4, network=network)[0]

    assert fast_steps(slow) == pytest.approx(fast_steps(even), rel=1e-3)


def test_weights_of_gossip_that_are_lost_are_left_out_of_the_mean_at_the_end():
    """Equal replicas without gradients stay what they are, whatever is lost."""

    def program(comm):
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.constant_(model.weight, 2.0)
        strategy = fs.GoSGD(1.0)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), 0.0), strategy)
        for _ in range(10):
            loss = model(torch.ones(3)).sum()
            loss.backward()
            worker.step(loss)
        comm.barrier()
        own = worker.state.weight
        with comm.unmetered():
            inside = float(worker.state.mailboxes[comm.rank].read()[-1])
        worker.finish()
        return own + inside, model.weight.tolist()

    network = fs.Network(1e-3, 1e6, loss=0.3)
    outcome = fs.launch(program, 4, network=network, compute=0.01)
    weights = sum(weight for weight, _ in outcome)
    assert 0 < weights < 0.99
    for _, parameters in outcome:
        assert parameters == [pytest.approx([2.0] * 3, rel=1e-6)]


def test_who_is_not_heard_leaves_its_weight_to_the_worker_itself():
    """DPSGD on two workers with weights of a half: of replicas 0 and 1 the mean is left where both
    are heard; a worker that hears nothing keeps its own."""

    def program(comm):
        model = torch.nn.Linear(1, 1, bias=False)
        strategy = fs.DPSGD(order="after_step")
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), 0.0), strategy)
        kept = 0
        for _ in range(60):
            with worker.changing_parameters():
                torch.nn.init.constant_(model.weight, float(comm.rank))
            loss = model(torch.ones(1)).sum()
            loss.backward()
            worker.step(loss)
            after = model.weight.item()
            assert after in (0.5, float(comm.rank))
            kept += after != 0.5
        return kept

    network = fs.Network(1e-3, 1e6, loss=0.25)
    for kept in fs.launch(program, 2, network=network, compute=0.01):
        assert 5 <= kept <= 28


@pytest.mark.parametrize("preset", ["one-rack", "two-regions", "home-uplinks", "phones"])
@pytest.mark.parametrize("workers", [2, 5])
def test_presets_of_places_take_any_number_of_workers(preset, workers):
    ends = run(lambda comm: comm.all_reduce(TENSOR.clone()), workers, fs.Network.preset(preset))
    assert len({ticks for _, ticks in ends}) == 1 and ends[0][1] > 0
