"""Times, speeds and sizes as people write and read them."""

from __future__ import annotations

import math

import pytest

import flockstep as fs
from flockstep.units import (
    read_bytes_per_second,
    read_seconds,
    shown_megabytes,
    shown_number,
    shown_seconds,
    shown_speed,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20ms", 0.02), ("0.5s", 0.5), ("100us", 1e-4), ("3 µs", 3e-6), ("0ms", 0.0), ("2.s", 2.0)],
)
def test_times_are_read_exactly(text, seconds):
    assert read_seconds("latency", text) == seconds


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("8bit/s", 1),
        ("8kbit/s", 1e3),
        ("100Mbit/s", 12.5e6),
        ("1 Gbit/s", 125e6),
        ("3B/s", 3),
        ("0.5kB/s", 500),
        ("12.5MB/s", 12.5e6),
        ("25GB/s", 25e9),
    ],
)
def test_speeds_are_read_exactly(text, bytes_per_second):
    assert read_bytes_per_second("bandwidth", text) == bytes_per_second


@pytest.mark.parametrize("text", ["", "20", "ms", "20 m", "-1s", "1e3s", "nans", "1Mb/s", "1s 2s"])
def test_what_has_no_unit_that_is_known_is_named(text):
    for reader in (read_seconds, read_bytes_per_second):
        with pytest.raises(fs.InvalidField, match=r"^'it' must be a .* such as .* \(got "):
            reader("it", text)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (shown_seconds(1e-4), "0.1 ms"),
        (shown_seconds(2e-6), "2 µs"),
        (shown_seconds(0.02), "20 ms"),
        (shown_seconds(90), "90 s"),
        (shown_seconds(0), "0 s"),
        (shown_speed(125e6), "1 Gbit/s"),
        (shown_speed(12.5e6), "100 Mbit/s"),
        (shown_speed(2), "16 bit/s"),
        (shown_speed(math.inf), "no limit"),
        (shown_megabytes(3_228_960), "3.229 MB"),
        (shown_megabytes(12_345_678_901), "12,346 MB"),
        (shown_number(0.77777), "0.7778"),
        (shown_number(-12345.6), "-12,346"),
        (shown_number(math.nan), "nan"),
        (fs.Network.preset("lan-1g").in_words(), "lan-1g (1 Gbit/s, 0.1 ms)"),
        (fs.Network(0.02, 12.5e6).in_words(), "100 Mbit/s, 20 ms"),
        (
            fs.Network(0.02, 12.5e6, fs.Network.preset("lan-10g"), 4).in_words(),
            "100 Mbit/s, 20 ms; lan-10g (10 Gbit/s, 50 µs) inside households of 4",
        ),
        (fs.Compute(0.02).in_words(), "a step takes 20 ms"),
        (
            fs.Compute(0.02, 0.1, {5: 2, 3: 2, 1: 1.5}).in_words(),
            "a step takes 20 ms, give or take 10%; 1.5 times as long on rank 1; "
            "2 times as long on ranks 3, 5",
        ),
        (fs.Compute.measured().in_words(), "steps take the CPU time that is measured"),
    ],
)
def test_figures_are_shown_with_units(shown, expected):
    assert shown == expected


def test_a_network_of_ones_own_is_taken_as_a_text_everywhere():
    text, network = "latency=20ms,bandwidth=100Mbit/s", fs.Network(0.02, 12.5e6)
    spec = fs.RunSpec("digits-mlp", "sync_sgd", network=text, compute="20ms")
    assert (spec.network, spec.compute) == (network, fs.Compute(0.02))
    assert fs.RunSpec.from_toml(spec.to_toml()) == spec
    assert fs.Simulator(network=text).network == network
    assert fs.RunSpec.from_toml(f'task="digits-mlp"\nstrategy="SyncSGD"\nnetwork="{text}"') == (
        fs.RunSpec("digits-mlp", fs.SyncSGD(), network=network)
    )
