"""The cost formulas of the design, at points that can be checked by hand."""

from __future__ import annotations

import math

import pytest

import flockstep as fs
from flockstep.network import PRESETS, costs

LINK = fs.Link(latency_seconds=0.5, bytes_per_second=4.0)  # α = 1/2, β = 1/4


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (costs.all_reduce_seconds(LINK, 4, 8), 2 * 3 * 0.5 + 2 * 3 / 4 * 8 / 4),
        (costs.all_gather_seconds(LINK, 4, 8), 3 * (0.5 + 2)),
        (costs.broadcast_seconds(LINK, 9, 8), 4 * (0.5 + 2)),
        (costs.barrier_seconds(LINK, 8), 3 * 0.5),
        (costs.message_seconds(LINK, 8), 0.5 + 2),
        (costs.blend_seconds(LINK, 8), 2 * (0.5 + 2)),
    ],
)
def test_costs(seconds, expected):
    assert seconds == expected


def test_one_worker_pays_nothing_for_collectives():
    for cost in (costs.all_reduce_seconds, costs.all_gather_seconds, costs.broadcast_seconds):
        assert cost(LINK, 1, 100) == 0


def test_the_ideal_network_is_free():
    assert PRESETS["ideal"].seconds(10**12) == 0
    assert math.isinf(PRESETS["ideal"].bytes_per_second)


def test_presets_are_named():
    for name, network in PRESETS.items():
        assert fs.Network.preset(name) is network
