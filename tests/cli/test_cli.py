"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import flockstep as fs
from flockstep.cli.demo import STRATEGIES as DEMO_STRATEGIES
from flockstep.cli.run import make_strategy


def module(*arguments: str, cwd=None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where the fixture `flockstep` runs it in this one."""
    return subprocess.run(
        [sys.executable, "-m", "flockstep", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
    )


@pytest.mark.cluster  # a program of its own
def test_run_as_a_module_prints_one_json_object_and_nothing_else():
    place = ["--backend", "local", "--workers", "2"]
    done = module(
        "run", "digits-mlp", "local_sgd", *place, "--set", "period=8", "--epochs", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["fields"]["period"] == 8
    assert printed["metrics"]["test_accuracy"] > 0.5
    assert len(printed["history"]) == 2
    assert done.stderr == ""


def test_run_prints_a_table_and_saves_the_result(flockstep, tmp_path):
    done = flockstep("run", "digits-mlp", "sync_sgd", "--epochs", "1", "--out", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    assert "test_accuracy" in done.stdout
    assert fs.load_result(tmp_path / "r").config["strategy"] == "sync_sgd"


@pytest.mark.cluster  # a program of its own
def test_a_task_in_the_current_folder_is_found(tmp_path):
    (tmp_path / "here.py").write_text(
        "from flockstep.tasks import TASKS\nmine = TASKS['digits-mlp']\n"
    )
    done = module(
        "run", "here:mine", "independent", "--epochs", "1", "--workers", "2", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["task"] == "here:mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "digits-mlp", "sync_sdg"],
            "unknown strategy 'sync_sdg'; did you mean 'sync_sgd'? known: ad_psgd, adacomm, ",
        ),
        (
            ["run", "digits", "sync_sgd"],
            "unknown task 'digits'; did you mean 'digits-mlp'? known: cifar10-densenet40, ",
        ),
        (
            ["run", "digits-mlp", "sync_sgd", "--backend", "moon"],
            "unknown backend 'moon'; known: local, ray, sim, torchrun",
        ),
        (
            ["run", "digits-mlp", "sync_sgd", "--network", "moon"],
            "unknown network 'moon'; known: home-uplinks, ideal",
        ),
        (
            ["run", "digits-mlp", "sync_sgd", "--assignment", "moon"],
            "unknown assignment 'moon'; known: coarse, disjoint, ",
        ),
        (["run", "digits-mlp", "local_sgd"], "'period' of local_sgd must be given: --set period=…"),
        (
            ["run", "digits-mlp", "local_sgd", "--set", "period=0"],
            "'period' must be at least 1 (got 0)",
        ),
        (
            ["run", "digits-mlp", "local_sgd", "--set", "period=x"],
            "'period' must be a whole number or none (got 'x')",
        ),
        (
            ["run", "digits-mlp", "local_sgd", "--set", "perod=3"],
            "unknown field of local_sgd 'perod'; did you mean 'period'? known: codec, momentum, ",
        ),
        (
            ["run", "digits-mlp", "local_sgd", "--set", "period"],
            "'--set' must be FIELD=VALUE (got 'period')",
        ),
        (
            ["run", "digits-mlp", "sync_sgd", "--set", "codec=two_bits"],
            "unknown codec 'two_bits'; did you mean 'one_bit'? known: float16, int8, ",
        ),
        (
            ["run", "digits-mlp", "sync_sgd", "--set", "codec=top_k"],
            "'ratio' of top_k must be given: codec=top_k(ratio=…)",
        ),
        (
            ["run", "digits-mlp", "sync_sgd", "--set", "codec=top_k(ratio=2)"],
            "'ratio' must be above 0 and at most 1",
        ),
        (
            ["run", "digits-mlp", "sync_sgd", "--set", "codec=one_bit(2)"],
            "'codec' must give one_bit at most 0 values",
        ),
        (
            ["run", "digits-mlp", "sync_sgd", "--set", "codec=(("],
            "'codec' must be a codec such as one_bit or top_k",
        ),
        (
            ["list", "strategy"],
            "unknown list 'strategy'; did you mean 'strategies'? known: assignments, backends",
        ),
    ],
)
def test_bad_input_is_one_line_on_stderr(refused, arguments, message):
    refused(arguments, message)


def test_list_names_everything(flockstep):
    listed = json.loads(flockstep("list", "--json").stdout)
    assert set(listed) == {
        "strategies", "codecs", "tasks", "datasets", "assignments", "schedules", "optimizers",
        "backends", "networks", "studies",
    }  # fmt: skip
    assert {usage.split()[0] for usage in listed["strategies"]} == {
        "sync_sgd", "independent", "best_only", "local_sgd", "post_local_sgd", "adacomm",
        "households", "diloco", "slowmo", "nosync", "pso_ps", "easgd", "eamsgd", "ea_wild",
        "hogwild", "async_sgd", "downpour", "stale_sync", "gosgd", "ad_psgd", "d_psgd",
        "codistillation", "all_to_all_sgd", "sgp",
    }  # fmt: skip
    assert {usage.split()[0] for usage in listed["codecs"]} == {
        "float16", "int8", "one_bit", "qsgd", "threshold", "top_k", "random_k", "power_sgd",
        "natural", "tern_grad", "sign_sgd", "quantised_top_k",
    }  # fmt: skip
    assert "local_sgd" in flockstep("list", "strategies").stdout


def test_help_shows_examples(flockstep):
    assert (
        "flockstep run digits-mlp local_sgd --workers 8 --set period=8"
        in flockstep("run", "--help").stdout
    )


@pytest.mark.cluster  # half a minute of programs
def test_demo_compares_all_strategies_on_both_backends(flockstep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it leaves a report
    done = flockstep("demo", "--epochs", "1", "--seeds", "1", "--json")
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(run["backend"], run["strategy"]) for run in runs] == [
        (place, strategy)
        for place in ("sim", "local")
        for strategy in (each.name for each in DEMO_STRATEGIES)
    ]
    table = flockstep("demo", "--epochs", "1", "--seeds", "2", "--report", "seen.html").stdout
    assert "open seen.html" in table
    assert "<title>" in (tmp_path / "seen.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flockstep-demo.html", "seen.html"]
    assert "local_sgd(period=8)" in table
    assert "async_sgd(staleness_aware=true)" in table  # names are not broken at 80 columns
    heading = next(line for line in table.splitlines() if "strategy" in line)
    assert heading.split() == [
        "workers",
        "strategy",
        "accuracy",
        "seconds",
        "MB",
        "sent",
        "exchanges",
    ]
    assert "…" not in table  # nothing is cut off at 80 columns


@pytest.mark.parametrize("strategy", DEMO_STRATEGIES, ids=lambda strategy: strategy.name)
def test_no_method_of_the_demo_looks_broken_for_want_of_a_setting(strategy):
    """Its simulated workers, and as many as it has processes; until they are good enough."""
    target = 0.87 if strategy.name == "independent" else 0.92
    for workers in (8, 2):
        run = fs.run("digits-mlp", strategy, workers, epochs=10, target=target)
        assert run.metrics["test_accuracy"] >= target


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("local_sgd", ["period=none"], fs.LocalSGD(period=None)),
        ("easgd", ["period=4", "alpha=0.25", "mode=sync"], fs.EASGD(4, 0.25, mode="sync")),
        (
            "ea_wild",
            ["groups=2", "representative=random"],
            fs.EAWild(groups=2, delegate="random"),
        ),
        ("sync_sgd", [], fs.SyncSGD()),
        ("sync_sgd", ["codec=one_bit"], fs.SyncSGD(codec=fs.OneBit())),
        ("local_sgd", ["period=8", "codec=top_k(ratio=0.01)"], fs.LocalSGD(8, codec=fs.TopK(0.01))),
        (
            "diloco",
            ["period=8", "nesterov=false", "codec=qsgd(4, bucket=64)"],
            fs.DiLoCo(8, nesterov=False, codec=fs.QSGD(4, 64)),
        ),
        ("post_local_sgd", ["switch_at=0.5", "period=4"], fs.PostLocalSGD(0.5, 4)),
        ("post_local_sgd", ["switch_at=10", "period=4"], fs.PostLocalSGD(10, 4)),
        ("async_sgd", ["staleness_aware=true", "momentum=0.9"], fs.AsyncSGD(0.9, True)),
    ],
)
def test_settings_become_fields(name, settings, expected):
    assert make_strategy(name, settings) == expected
