"""Every example runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("arguments", [(), ("local", "2")])
def test_own_loop(arguments, run):
    accuracy = float(re.search(r"accuracy (\d\.\d+)", run("own_loop.py", *arguments))[1])
    assert accuracy > 0.85


@pytest.mark.parametrize("arguments", [(), ("local", "2"), ("sim", "4", "mixed")])
def test_jax_loop(arguments, run):
    accuracy = float(re.search(r"accuracy (\d\.\d+)", run("jax_loop.py", *arguments))[1])
    assert accuracy > 0.85


def test_slow_worker(run):
    """The first figure of a line is with equal workers, the second with one that is four times
    as slow.
    """
    seconds = {
        line.split()[0]: [float(figure) for figure in re.findall(r"after (\d+\.\d+)", line)]
        for line in run("slow_worker.py").splitlines()
    }
    even, uneven = seconds["sync_sgd"]
    assert uneven > 3 * even
    even, uneven = seconds["ea_wild"]
    assert uneven < 2 * even


def test_no_example_is_left_out():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"own_loop.py", "jax_loop.py", "slow_worker.py"}
