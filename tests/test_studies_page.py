"""Everything on the page about studies runs, and every statistic has its sentence."""

from __future__ import annotations

import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.study.test_running import Here

import flockstep as fs
from flockstep.study import running
from flockstep.study.planning import planned_runs, planned_tries

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "studies.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def here(monkeypatch, tmp_path):
    made = Here()
    monkeypatch.setattr(running, "_workers", lambda jobs, on: nullcontext(made))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies").mkdir()
    text = (ROOT / "studies" / "period.toml").read_text()
    (tmp_path / "studies" / "period.toml").write_text(text.replace("epochs = 10", "epochs = 1"))
    return made


def test_the_declared_study_is_one():
    (text,) = blocks("toml")
    study = fs.Study.from_toml(text)
    assert len(study.cells) == 3 * 2 * 2 - 2
    runs = planned_runs(study, {})
    assert {run.spec.epochs for run in runs} == {4}
    assert {run.spec.optimizer.name for run in runs} == {"sgd"}
    assert study.at_full_scale().base["task"] == "digits-cnn"


def test_the_lines_of_python_run(here, capsys):
    (block,) = blocks("python")
    exec(compile(block, "studies.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Which strategy is best for digits-mlp?\n")


def test_the_commands_run(here, flockstep):
    for line in "".join(blocks("console")).splitlines():
        _, *arguments = shlex.split(line.split("  #")[0])
        if arguments[0] == "compare":
            arguments += ["--epochs", "1", "--seeds", "2"]
        done = flockstep(*arguments)
        assert done.returncode == 0, (line, done.stderr)


def test_the_declared_studies_are_whole():
    for path in sorted((ROOT / "studies").glob("*.toml")):
        study = fs.Study.from_toml(path)
        # Of a study that is tuned, what is tried comes first.
        plan = planned_runs if study.tune is None else lambda study, _: planned_tries(study)
        assert plan(study, {})
        if study.full:
            assert plan(study.at_full_scale(), {})


def test_the_picture_is_there():
    for target in re.findall(r"\]\((pictures/\S+)\)", PAGE):
        assert (ROOT / "docs" / target).read_bytes().startswith(b"\x89PNG")
