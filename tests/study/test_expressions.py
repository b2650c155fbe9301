"""Values computed from others."""

from __future__ import annotations

import pytest

import flockstep as fs
from flockstep.study.expressions import (
    evaluated,
    filled_in,
    names_in_expression,
    names_in_text,
)

NAMES = {"workers": 16, "period": 128, "households": 8, "kind": "sync"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("128 / workers", 8.0),
        ("round(local_batch(128, workers, households, period))", 61),
        ("effective_batch(61, workers, households, period) > 128", True),
        ("-period + 2 ** 3 % 5", -125),
        ("min(workers, period) if kind == 'sync' else 0", 16),
        ("ceil(log2(period)) + floor(sqrt(2)) + int(1.9) + abs(-1)", 10),
    ],
)
def test_arithmetic_conditions_and_functions(text, value):
    assert evaluated("computed.x", text, NAMES.__getitem__) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "workers.real",
        "[workers for _ in (1,)]",
        "(lambda: 1)()",
        "open('x')",
        "workers if",
        "1 / 0",
        "2 ** 10 ** 10",
        "round(workers, key=1)",
        "'a' * 3 + 1",
        3,
    ],
)
def test_nothing_else_is_computed(text):
    with pytest.raises((fs.InvalidField, fs.UnknownName)):
        evaluated("computed.x", text, NAMES.__getitem__)


def test_names_are_found_and_filled_in():
    text = "compute(slow={3: 2.0}, seconds={step})"
    assert names_in_text(text) == {"step"}
    assert filled_in(text, {"step": 0.5}.__getitem__) == "compute(slow={3: 2.0}, seconds=0.5)"
    assert names_in_expression("computed.x", "round(period / workers)") == {"period", "workers"}
