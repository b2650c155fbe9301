"""Three tiers of links: households, neighbourhoods, and all the rest."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import flockstep as fs
from flockstep.errors import InvalidField
from flockstep.network import costs
from flockstep.notation import read, written

INSIDE, NEARBY = fs.Link(0.001, 1e6), fs.Link(0.01, 1e5)
NETWORK = fs.Network(0.1, 1e4, INSIDE, 2, NEARBY, 4)
PARAMETERS = 6  # of the model here
NBYTES = 4 * PARAMETERS


@pytest.mark.parametrize(
    ("ranks", "link"),
    [
        ((0, 1), INSIDE),
        ((6, 7), INSIDE),
        ((1, 2), NEARBY),
        ((4, 5, 6, 7), NEARBY),
        ((4, 5), INSIDE),
        ((3, 4), NETWORK),
        (range(8), NETWORK),
    ],
)
def test_a_call_runs_on_the_link_of_the_smallest_tier_around_it(ranks, link):
    assert NETWORK.between(tuple(ranks)) is link


def test_messages_take_the_time_of_their_tier():
    def program(comm):
        times = []
        for distance in (1, 2, 4):
            before = comm.now()
            comm.exchange(torch.zeros(25), comm.rank ^ distance)
            times.append(comm.now() - before)
        return times

    expected = [costs.message_seconds(link, 100) for link in (INSIDE, NEARBY, NETWORK)]
    for times in fs.launch(program, 8, network=NETWORK, compute=0.0):
        assert times == pytest.approx(expected)


def households(steps):
    """When each step of a training with households in neighbourhoods is over."""
    strategy = fs.Households(4, 4, neighbourhoods=2, neighbourhood_period=2)

    def program(comm):
        model = nn.Linear(2, 2)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy
        )
        ends = [0.0]
        for _ in range(steps):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            worker.step(loss)
            ends.append(comm.now())
        return [after - before for before, after in pairwise(ends)]

    return fs.launch(program, 8, network=NETWORK, compute=0.5)


def test_households_in_neighbourhoods_pay_by_the_closed_forms_on_all_three_tiers():
    """Gradients inside each household at every step; parameters among neighbours at steps 2, 6, …
    and among all at steps 4, 8, …
    """
    at_home = costs.all_reduce_seconds(INSIDE, 2, NBYTES)
    around = costs.all_reduce_seconds(NEARBY, 4, NBYTES)
    everywhere = costs.all_reduce_seconds(NETWORK, 8, NBYTES)
    step = 0.5 + at_home
    expected = [step, step + around, step, step + everywhere] * 2
    for times in households(8):
        assert times == pytest.approx(expected)


def test_a_tensor_that_all_share_is_on_the_outer_link():
    def program(comm):
        shared = comm.shared("centre", torch.zeros(25))
        if comm.rank == 0:
            shared.read()
        return comm.now()

    seconds = fs.launch(program, 8, network=NETWORK)[0]
    assert seconds == pytest.approx(costs.message_seconds(NETWORK, 100))


def test_it_prints_reads_back_and_says_so_in_words():
    network = fs.Network(0.01, 1.25e7, "lan-10g", 2, nearby="lan-1g", neighbourhood_size=4)
    text = (
        "network(latency_seconds=0.01, bytes_per_second=12500000.0, inside='lan-10g', "
        "household_size=2, nearby='lan-1g', neighbourhood_size=4)"
    )
    assert written(network) == text
    assert read(fs.Network, text) == network
    assert network.in_words() == (
        "100 Mbit/s, 10 ms; lan-1g (1 Gbit/s, 0.1 ms) inside neighbourhoods of 4; "
        "lan-10g (10 Gbit/s, 50 µs) inside households of 2"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"nearby": NEARBY},
            "'neighbourhood_size' must be given together with 'nearby' (got None)",
        ),
        (
            {"neighbourhood_size": 4},
            "'neighbourhood_size' must be given together with 'nearby' (got 4)",
        ),
        (
            {"nearby": NEARBY, "neighbourhood_size": 4},
            "'household_size' must be given where 'neighbourhood_size' is (got None)",
        ),
        (
            {"inside": INSIDE, "household_size": 2, "nearby": NEARBY, "neighbourhood_size": 5},
            "'neighbourhood_size' must be a multiple of household_size, 2 (got 5)",
        ),
        (
            {"inside": INSIDE, "household_size": 2, "nearby": 3, "neighbourhood_size": 4},
            "'nearby' must be a link such as fs.Network.preset('lan-10g') (got 3)",
        ),
        (
            {"inside": INSIDE, "household_size": 2, "nearby": NEARBY, "neighbourhood_size": 0},
            "'neighbourhood_size' must be at least 1 (got 0)",
        ),
    ],
)
def test_tiers_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(InvalidField) as caught:
        fs.Network(1.0, 1.0, **fields)
    assert str(caught.value) == message


def test_neighbourhoods_divide_the_workers():
    with pytest.raises(InvalidField, match=r"'neighbourhood_size' must divide .* workers, 6"):
        fs.launch(lambda comm: None, 6, network=NETWORK)
