"""docs/results.md says what every figure of a run is: these, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flockstep as fs
from flockstep.result import LOOK_FIELDS

PAGE = (Path(__file__).parents[1] / "docs" / "results.md").read_text()


@pytest.fixture(scope="module")
def result() -> fs.Result:
    measure = "replicas,spread,distance,staleness,time,positions,flatness,training"
    return fs.run("digits-mlp", "ea_wild", 2, steps=6, look_every=3, measure=measure, target=2.0)


def fields(section: str) -> dict[str, list[str]]:
    """The other cells of each row of a section's table, by its field."""
    (text,) = re.findall(rf"^## `result\.{section}`\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.M)
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text, flags=re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in rows}


def test_every_metric_is_explained(result):
    table = fields("metrics")
    assert set(table) == set(result.metrics)
    never_null = {name for name, (*_, null) in table.items() if null == "never"}
    assert never_null <= {name for name, value in result.metrics.items() if value is not None}
    assert {name for name, value in result.metrics.items() if value is None} == {
        name for name in table if name.endswith("_to_target")
    }


def test_every_field_of_a_look_is_explained(result):
    table = fields("history")
    assert tuple(table) == LOOK_FIELDS
    assert set(table) == set(result.history[-1])
    plain = fs.run("digits-mlp", "ea_wild", 2, steps=2)
    left_out = {
        name for name, (*_, null) in table.items() if "measure=" in null or "as `st" in null
    }
    assert set(plain.history[-1]) == set(table) - left_out


def test_every_row_has_a_meaning_a_unit_and_when_it_is_null():
    for section in ("metrics", "history"):
        for name, cells in fields(section).items():
            assert len(cells) == 3, name
            assert all(cells), name
