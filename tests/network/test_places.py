"""Matrices, sites, access links, traces and loss: as values, in words, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import flockstep as fs
from flockstep.errors import InvalidField
from flockstep.network import PRESETS, Routes, costs
from flockstep.notation import read, written

PAGE = Path(__file__).parents[2] / "docs" / "network.md"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"latencies": ((0, 1), (1,))},
            "'latencies' must be as many rows of numbers as each has columns (got ((0, 1), (1,)))",
        ),
        ({"latencies": ((0, -1), (1, 0))}, "'latencies' must be at least 0 from rank 0 to rank 1"),
        ({"bandwidths": ((0, 1), (0, 0))}, "'bandwidths' must be above 0 from rank 1 to rank 0"),
        (
            {"latencies": ((0, 1), (1, 0)), "sites": (fs.Site("a"),)},
            "'sites' must be left out where 'latencies' is given",
        ),
        ({"sites": (fs.Site("a"), fs.Site("a"))}, "'sites' must have different names"),
        ({"sites": ("a",)}, "'sites' must be some such as fs.Site(…) (got ('a',))"),
        (
            {"sites": (fs.Site("a"),), "routes": (fs.Route("a", "b", 0, 1),)},
            "'routes' must be between sites, a (got 'b')",
        ),
        ({"uplink": (1.0, 0.0)}, "'uplink' must be above 0 (got 0.0)"),
        ({"downlink": "fast"}, "'downlink' must be bytes per second, one for all workers or one"),
        ({"loss": 1.0}, "'loss' must be at least 0 and below 1 (got 1.0)"),
        ({"framing": 0.5}, "'framing' must be at least 1 and finite (got 0.5)"),
        (
            {"trace": (fs.LinkChange(5.0), fs.LinkChange(7.0), fs.LinkChange(6.0))},
            "'trace' must not go back in time: entry 3 must be at 7 s or later (got 6.0)",
        ),
        (
            {"trace": (fs.LinkChange(5.0, site="b"),), "sites": (fs.Site("a"),)},
            "'trace' must name sites, a (got 'b')",
        ),
    ],
)
def test_a_network_that_cannot_be_is_refused_in_one_line(fields, message):
    with pytest.raises(InvalidField) as caught:
        fs.Network(0.1, 1e6, **fields)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"latencies": ((0, 1), (1, 0))},
            "'latencies' must have a row for each of the 4 workers (got 2)",
        ),
        (
            {"uplink": (1.0, 2.0, 3.0)},
            "'uplink' must have a value for each of the 4 workers, or one for all (got 3)",
        ),
        (
            {"sites": (fs.Site("a", 2), fs.Site("b", 1))},
            "'sites' must have places for all of the 4 workers (got 3)",
        ),
        (
            {"trace": (fs.LinkChange(0.0, ranks=(4,)),)},
            "'trace' must name ranks below the number of workers, 4, in entry 1 (got (4,))",
        ),
    ],
)
def test_a_network_that_does_not_cover_all_workers_is_refused_before_they_start(fields, message):
    network = fs.Network(0.1, 1e6, **fields)
    started = []
    with pytest.raises(InvalidField) as caught:
        fs.launch(lambda comm: started.append(comm.rank), 4, network=network)
    assert str(caught.value) == message
    assert started == []


def test_it_prints_and_reads_back():
    network = fs.Network(
        0.04,
        1e8,
        sites=(fs.Site("Oslo", 2, inside="lan-10g", uplink=1e6), fs.Site("Rome")),
        routes=(fs.Route("Oslo", "Rome", 0.02, 1e7),),
        uplink=2e6,
        trace=(fs.LinkChange(1.0, 0.5, ranks=(0, 1)), fs.LinkChange(2.0, site="Rome")),
        loss=0.01,
    )
    text = written(network)
    assert read(fs.Network, text) == network
    spec = fs.RunSpec("digits-mlp", "sync_sgd", network=network)
    assert fs.RunSpec.from_toml(spec.to_toml()) == fs.RunSpec.from_json(spec.to_json()) == spec
    assert network.in_words() == (
        "800 Mbit/s, 40 ms; between sites Oslo (2 workers, 10 Gbit/s, 50 µs inside, uplink 8 "
        "Mbit/s), Rome; uplink 16 Mbit/s; 2 changes in time; 1 % of messages lost"
    )


def test_the_short_form_takes_access_links_and_loss():
    text = "latency=20ms,bandwidth=1Gbit/s,uplink=8Mbit/s,downlink=80Mbit/s,loss=0.01"
    assert fs.Network.read(text) == fs.Network(0.02, 125e6, uplink=1e6, downlink=1e7, loss=0.01)
    with pytest.raises(InvalidField, match=r"'loss' must be a number such as 0.01 \(got 'much'\)"):
        fs.Network.read("latency=1s,bandwidth=1B/s,loss=much")


def test_sites_that_say_no_number_share_the_other_workers():
    sites = (fs.Site("a"), fs.Site("b", 2), fs.Site("c"))
    routes = Routes(fs.Network(1.0, 1.0, sites=sites), 7)
    assert routes._site_of == [0, 0, 0, 1, 1, 2, 2]
    assert Routes(PRESETS["two-regions"], 4)._site_of == [0, 0, 1, 1]


def test_presets_of_places_say_what_they_are():
    assert PRESETS["home-uplinks"].in_words() == (
        "home-uplinks (10 Gbit/s, 15 ms; uplink 20 Mbit/s; downlink 100 Mbit/s)"
    )
    assert "1 % of messages lost" in PRESETS["phones"].in_words()
    for name, network in PRESETS.items():
        assert read(fs.Network, name) is network
        assert written(network) == name


@pytest.mark.parametrize(("gigabits", "measured"), [(5, 0.317), (1, 1.505)])
def test_the_two_published_all_reduces_are_met_within_a_per_cent(gigabits, measured):
    """30,846,720 floats on four hosts. The ideal ring is off by up to 7 %."""
    nbytes = 4 * 30_846_720
    network = fs.Network(0.0, gigabits * 125e6)
    fitted = network.as_measured()
    seconds = costs.all_reduce_seconds(fitted.between(range(4)), 4, nbytes)
    seconds += fitted.seconds_per_summed_byte * costs.summed_bytes(4, nbytes)
    assert seconds == pytest.approx(measured, rel=0.01)
    assert costs.all_reduce_seconds(network, 4, nbytes) == pytest.approx(measured, rel=0.07)


@pytest.mark.parametrize("more", [{}, {"uplink": 1e9}], ids=["plain", "shared"])
def test_what_is_measured_is_in_the_time_of_a_run(more):
    def program(comm):
        comm.all_reduce(torch.zeros(1000))
        return comm.now()

    network = fs.Network(1e-3, 1e6, framing=1.5, seconds_per_summed_byte=1e-6, **more)
    expected = 6 * 1e-3 + 1.5 * 4000 * 1.5 / 1e6 + 0.75 * 4000 * 1e-6
    assert fs.launch(program, 4, network=network) == pytest.approx([expected] * 4, rel=1e-12)


def test_only_simulated_runs_whose_workers_share_tensors_have_the_models_revision_in_their_ids(
    monkeypatch,
):
    def ids():
        return [
            fs.RunSpec("digits-mlp", strategy, backend=backend).id
            for strategy in (fs.SyncSGD(), fs.AsyncSGD())
            for backend in ("sim", "local")
        ]

    before = ids()
    monkeypatch.setattr("flockstep.spec.MODEL", 99)
    assert [a == b for a, b in zip(before, ids(), strict=True)] == [True, True, False, True]


def test_the_examples_of_the_page_do_what_they_say():
    examples = re.findall(r"```python\n(.*?)\n```", PAGE.read_text(), flags=re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), {"fs": fs, "math": math})


def test_arrays_and_tensors_are_as_good_as_lists():
    rows = [[0.0, 0.5], [0.25, 0.0]]
    listed = fs.Network(0.0, 1e6, latencies=rows, uplink=[1e6, 2e6])
    for kind in (np.array, torch.tensor):
        kinds = {"latencies": kind(rows), "uplink": kind([1e6, 2e6])}
        assert fs.Network(0.0, 1e6, **kinds) == listed
