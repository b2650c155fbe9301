"""Everything in the README runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import flockstep as fs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_blocks_run_in_order_on_both_backends(tmp_path, monkeypatch, capsys, local):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert float(re.search(r"accuracy (0\.\d+)", printed)[1]) > 0.8
    assert "\n[]\n" in printed
    assert float(printed.splitlines()[-1]) > 0.7
    assert fs.load_result(tmp_path / "results" / "wild").config["workers"] == 16

    assert len(fs.launch(names["program"], workers=2, backend=local)) == 2
    own = names["PullTogether"]
    assert (
        fs.run("digits-mlp", own(), workers=2, backend=local, epochs=1).metrics["test_accuracy"]
        > 0.4
    )


def commands() -> list[str]:
    return "".join(blocks("console")).splitlines()


@pytest.mark.parametrize("line", commands())
def test_the_commands_run(line, flockstep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some of them leave a file
    program, *arguments = shlex.split(line)
    if program == "flockstep" and "ray" not in arguments:
        done = flockstep(*arguments)
    else:
        module = {"flockstep": "flockstep", "torchrun": "torch.distributed.run"}[program]
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "TMPDIR": str(tmp_path)},  # torchrun leaves a folder for logs there
        )
    assert done.returncode == 0, done.stderr


def test_the_tables_name_every_strategy_and_backend():
    from flockstep.launch import BACKENDS
    from flockstep.strategies import STRATEGIES

    for name, strategy in STRATEGIES.items():
        assert f"`{name}`" in README
        assert f"`fs.{strategy.__name__}(" in README
    assert all(f'`"{name}"`' in README for name in BACKENDS)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((\S+\.md)\)", README):
        assert (ROOT / target).exists(), target
