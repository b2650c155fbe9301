"""The pages that are generated, and the example that is installed."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import flockstep as fs
from flockstep.codecs import CODECS
from flockstep.data import ASSIGNMENTS, DATASETS
from flockstep.schedules.schedules import SCHEDULES
from flockstep.strategies import STRATEGIES, save_state
from flockstep.tasks import TASKS

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_strategies_is_that_of_the_classes():
    generated = runpy.run_path(str(DOCS / "generate.py"))["page"]()
    assert (DOCS / "strategies.md").read_text() == generated, "run: python docs/generate.py"
    assert generated.count("| – |") == 2  # Independent and Float16 have no paper
    assert generated.count("\n| `fs.") == len(STRATEGIES) + len(CODECS)


def blocks(language: str) -> list[str]:
    page = (DOCS / "own_strategy.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def block(language: str) -> str:
    return blocks(language)[0]


@pytest.mark.cluster  # a pip and two programs of its own
def test_a_strategy_of_ones_own_is_short_installs_and_runs(tmp_path):
    assert len(block("toml").splitlines()) + len(block("python").splitlines()) < 40
    package, site = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    (package / "pyproject.toml").write_text(block("toml"))
    (package / "flockstep_follow.py").write_text(block("python"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(package)], check=True, timeout=120, cwd=tmp_path)
    command = block("console").splitlines()[1].split()
    assert command[0] == "flockstep"
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", *command, "--json"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["strategy"] == "follow"
    assert told["fields"] == {"period": 2}
    assert told["metrics"]["test_accuracy"] > 0.7


def test_the_page_of_data_runs_and_names_everything(capsys):
    page = (DOCS / "data.md").read_text()
    names: dict[str, object] = {}
    for each in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(each, "data.md", "exec"), names)
    accuracy, ratio = map(float, capsys.readouterr().out.split())
    assert 0 < accuracy < 1
    assert 250 < ratio < 350
    assert all(f"`fs.{scheme.__name__}(" in page for scheme in ASSIGNMENTS.values())
    assert all(f"`{name}`" in page for name in [*TASKS, *DATASETS])
    recipes = {
        *SCHEDULES.values(),
        fs.BatchGrowth,
        fs.TwoStage,
        fs.RMSpropWarmup,
        fs.LARS,
        fs.LAMB,
        fs.SmoothedLoss,
    }
    assert all(f"`fs.{recipe.__name__}(" in page for recipe in recipes - {fs.Constant})


def test_the_example_runs_where_it_stands(local):
    names: dict[str, object] = {}
    exec(block("python"), names)
    result = fs.run("digits-mlp", names["Follow"](period=2), workers=2, backend=local, epochs=1)
    assert result.metrics["test_accuracy"] > 0.4


def test_the_example_with_a_state_of_data_and_handles_runs_and_is_saved():
    names: dict[str, object] = {}
    for each in blocks("python"):
        exec(each, names)
    board = names["Board"]()

    def program(comm):
        model = nn.Linear(2, 1)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), board)
        for _ in range(2 + comm.rank):
            loss = (model(torch.ones(2)) - comm.rank).square().sum()
            loss.backward()
            worker.step(loss)
        with comm.unmetered(), torch.no_grad():
            shown = board.preview(worker, worker.state)
        worker.finish()
        return torch.equal(shown, worker.flat.state), save_state(worker.state)[1]["state.visits"]

    assert not board.waits
    assert fs.launch(program, 3) == [(True, 2), (True, 3), (True, 4)]
    assert fs.run("digits-mlp", board, workers=2, epochs=1).metrics["test_accuracy"] > 0.4
