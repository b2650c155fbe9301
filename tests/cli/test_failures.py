"""Bugs in a task of one's own: one line that names the place; all of it with --debug."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flockstep.cli import main

RUN = sys.modules["flockstep.cli.run"]

TASK = """
import torch
import flockstep as fs

data = torch.randn(40, 4), torch.randint(2, (40,))
{extra}

def model():
    {model}
    return torch.nn.Linear(4, 2)


def loss(model, batch):
    {loss}
    return fs.classification_loss(model, batch)


def metric(model, batch):
    {metric}
    return fs.classification_accuracy(model, batch)


mine = fs.Task("mine", model, torch.optim.Adam, loss, train=data, test=data, metric=metric)
"""
LINES = {"extra": 6, "model": 9, "loss": 14, "metric": 19}


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    """Writes a task with a bug."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])

    def write(name, **bugs):
        code = {"extra": "", "model": "pass", "loss": "pass", "metric": "pass", **bugs}
        (tmp_path / f"{name}.py").write_text(TASK.format(**code))
        return f"{name}:mine"

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


LATE = "assert not model.training, 'labels'"  # not before a worker trains
BUGS = [
    ("loss", LATE, "rank 0 raised AssertionError: labels"),
    ("loss", "torch.zeros(2) @ torch.zeros(3)", "task '{task}' raised RuntimeError: inconsistent"),
    ("metric", "1 / 0", "task '{task}' raised ZeroDivisionError: division by zero"),
    ("model", "raise OSError('no weights')", "OSError: no weights"),
    ("extra", "widht = width", "NameError: name 'width' is not defined"),
    ("extra", "width = = 3", "SyntaxError: invalid syntax"),
]


@pytest.mark.parametrize(("where", "bug", "said"), BUGS)
def test_a_bug_is_one_line_with_its_place(flockstep, own_task, where, bug, said):
    name = f"own_{where}_{len(bug)}"
    task = own_task(name, **{where: bug})
    done = flockstep("run", task, "independent", "--workers", "1", "--steps", "2")
    said = said.format(task=task)
    function = " in <module>" if where == "extra" else f" in {where}"
    if "Syntax" in said:  # it was never run
        function = ""
    assert done.stderr.startswith(f"flockstep: {name}.py:{LINES[where]}{function}: {said}")
    assert done.stderr.endswith("(--debug shows the whole traceback)\n")
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 1


@pytest.mark.cluster  # processes of its own
def test_on_processes_too(flockstep, own_task):
    task = own_task("own_local", loss=LATE)
    place = ["--backend", "local", "--workers", "1"]
    done = flockstep("run", task, "independent", *place, "--steps", "2")
    assert done.stderr.startswith(
        "flockstep: own_local.py:14 in loss: rank 0 raised AssertionError"
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_debug_shows_the_whole_traceback(flockstep, own_task, is_first):
    task = own_task(f"own_debug_{is_first}", loss=LATE)
    command = ["run", task, "independent", "--workers", "1", "--steps", "2"]
    done = flockstep(*(["--debug", *command] if is_first else [*command, "--debug"]))
    assert "Traceback (most recent call last)" in done.stderr
    assert f"    {LATE}\n" in done.stderr
    assert "in train\n" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"flockstep: {task.split(':')[0]}.py:14 in loss")
    assert done.returncode == 1


@pytest.mark.parametrize("command", ["inspect", "list", "show", "demo"])
def test_every_command_has_debug(flockstep, command):
    assert "--debug" in flockstep(command, "--help").stdout


def test_what_the_model_raises_has_its_place(flockstep, own_task, tmp_path):
    """Though it is the data that may be wrong."""
    task = own_task("own_fit", loss="pass")
    path = tmp_path / "own_fit.py"
    text = path.read_text().replace("torch.nn.Linear(4, 2)", "Mine(4, 2)")
    text = text.replace(
        "def model():",
        "class Mine(torch.nn.Linear):\n    def forward(self, x):\n        return x @ x\n\n\n"
        "def model():",
    )
    path.write_text(text.replace(" loss, train", " fs.classification_loss, train"))
    done = flockstep("run", task, "independent", "--workers", "1", "--steps", "2")
    assert done.stderr.startswith("flockstep: own_fit.py:10 in forward: 'train' must have inputs")


def test_debug_of_an_error_on_purpose(flockstep):
    done = flockstep("run", "digits-mlp", "moon", "--debug")
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("flockstep: unknown strategy 'moon'")


def test_a_bug_of_the_library_is_not_hidden(monkeypatch):
    """A user would look for it in vain."""
    names = {}
    exec(compile("def broken(*_): return {}['bug']", "<library>", "exec"), names)
    monkeypatch.setattr("flockstep.cli.failures.INSTALLED", [Path("/")])
    monkeypatch.setattr(RUN, "make_run_spec", names["broken"])
    monkeypatch.setattr("sys.argv", ["flockstep", "run", "digits-mlp", "sync_sgd"])
    with pytest.raises(KeyError, match="bug"):
        main()
