"""`flockstep run` makes specs, prints them, and runs those of files."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.specs import EVERY_CLASS, PLACES, run_specs, specs_of

import flockstep as fs
from flockstep.notation import written
from flockstep.result import require_result_folder


def arguments(spec: fs.RunSpec) -> list[str]:
    """The command that says the same as a spec."""
    flags = []
    for name, value in json.loads(spec.to_json()).items():
        if name == "sampling":
            flags += [f"--order={spec.sampling.order}", f"--shuffle={spec.sampling.shuffle}"]
        elif isinstance(value, bool):
            flags.append(f"--{name.replace('_', '-')}")
        elif name not in ("version", "task", "strategy"):
            text = ",".join(value) if isinstance(value, list) else value
            flags.append(f"--{name.replace('_', '-')}={text}")
    return ["run", spec.task, written(spec.strategy), *flags]


LAW = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def is_said(flockstep, spec: fs.RunSpec) -> None:
    done = flockstep(*arguments(spec), "--print-spec")
    assert done.returncode == 0, done.stderr
    assert done.stdout == spec.to_toml()
    assert fs.RunSpec.from_toml(done.stdout) == spec


@LAW
@given(spec=run_specs())
def test_every_spec_can_be_said_on_the_command_line(flockstep, spec):
    is_said(flockstep, spec)


@pytest.mark.parametrize(("kind", "name"), EVERY_CLASS, ids=lambda each: str(each))
@settings(LAW, max_examples=5)
@given(data=st.data())
def test_any_spec_of_every_class_can_be_said_on_the_command_line(flockstep, kind, name, data):
    fields = {"strategy": "sync_sgd", **PLACES[kind](data.draw(specs_of(kind, name)))}
    is_said(flockstep, fs.RunSpec("digits-mlp", **fields))


def test_a_spec_prints_as_json_too(flockstep):
    done = flockstep("run", "digits-mlp", "local_sgd(8)", "--lr", "0.1", "--print-spec", "--json")
    assert json.loads(done.stdout) == {
        "version": 1,
        "task": "digits-mlp",
        "strategy": "local_sgd(period=8)",
        "lr": 0.1,
    }


def test_settings_add_to_a_call(flockstep):
    call = ["digits-mlp", "local_sgd(period=8, momentum=reset)", "--set", "codec=one_bit"]
    done = flockstep("run", *call, "--set", "period=4", "--print-spec")
    strategy = fs.RunSpec.from_toml(done.stdout).strategy
    assert strategy == fs.LocalSGD(4, "reset", fs.OneBit())


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    spec = fs.RunSpec(
        "digits-mlp",
        "local_sgd(8)",
        workers=2,
        epochs=1,
        optimizer="sgd(lr=0.1, momentum=0.9)",
        sampling=fs.Sampling(shuffle="global"),
    )
    path.write_text(spec.to_toml())
    return path


def test_a_file_is_run(flockstep, file):
    done = flockstep("run", str(file), "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert told["metrics"]["workers"] == 2
    assert told["metrics"]["test_accuracy"] > 0.5
    assert "local_sgd(period=8)" in flockstep("run", str(file), "--epochs", "2").stdout


def test_flags_take_the_place_of_a_files_fields(flockstep, file):
    def printed(*flags):
        done = flockstep("run", str(file), *flags, "--print-spec")
        assert done.returncode == 0, done.stderr
        return fs.RunSpec.from_toml(done.stdout)

    before = fs.RunSpec.load(file)
    assert printed() == before
    assert printed("--seed", "3", "--workers", "4") == before.replace(seed=3, workers=4)
    assert printed("--steps", "9") == before.replace(steps=9)
    assert printed("--lr", "0.5") == before.replace(lr=0.5)
    assert printed("--optimizer", "adam") == before.replace(optimizer="adam")
    assert printed("--set", "period=4").strategy == fs.LocalSGD(4)
    assert printed("sync_sgd").strategy == fs.SyncSGD()
    assert printed("--order", "with_replacement").sampling == fs.Sampling(
        "with_replacement", "global"
    )
    assert printed("--workers", "none").workers == 8
    assert printed("--backend", "torchrun", "--workers", "none").workers is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "fast"], "'--lr' must be a number or none (got 'fast')"),
        (["--workers", "0"], "'workers' must be at least 1 (got 0)"),
        (["--workers", "2.5"], "'--workers' must be a whole number or none (got 2.5)"),
        (["--epochs", "1", "--steps", "1"], "'epochs' and 'steps' must not be given together"),
        (["--optimizer", "adam(lr=1)", "--lr", "1"], "'lr' must not be given twice"),
        (["--optimizer", "adam("], "'--optimizer' must be an optimizer such as adam or sgd"),
        (["--compute", "fast"], "unknown compute 'fast'; known: compute, measured"),
        (["--look-every", "often"], "'look_every' must be an interval such as '1 epoch'"),
        (["--measure", "all"], "'measure' must be some of replicas, spread, distance, staleness"),
        (["--device", "tpu"], "'device' must be one of 'cpu', 'cuda', 'auto' (got 'tpu')"),
        (["--seed", str(2**63)], "'seed' must be below 2**63"),
        (["--backend", "local", "--network", "wifi"], "'network' must be left out with a backend"),
        (["--patience", "60"], "'patience' must be left out with backend 'sim' (got 60.0)"),
        (["--backend", "local", "--patience", "0"], "'patience' must be above 0 and finite"),
    ],
)
def test_a_flag_that_is_wrong_is_one_line_on_stderr(refused, file, flags, message):
    refused(["run", "digits-mlp", "sync_sgd", *flags], message)
    if "--network" not in flags:
        refused(["run", str(file), *flags], message)


def test_a_file_that_is_wrong_is_one_line_that_names_it(refused, tmp_path):
    path = tmp_path / "run.toml"
    refused(["run", str(path)], f"{path}: cannot be read: No such file or directory")
    path.write_text('task = "digits-mlp"\nstrategy = "sync_sgd"\nepoch = 3\n')
    refused(["run", str(path)], f"{path}: unknown field 'epoch'; did you mean 'epochs'? known: ")


def test_a_task_without_a_strategy_is_a_wrong_use(flockstep):
    done = flockstep("run", "digits-mlp")
    assert done.returncode == 2
    assert "flockstep: missing argument 'STRATEGY'" in done.stderr


def test_a_target_that_is_missed_is_shown_as_such(flockstep):
    done = flockstep("run", "digits-mlp", "sync_sgd", "--workers=2", "--steps=2", "--target=2")
    assert done.returncode == 0
    for line in done.stdout.splitlines():
        assert ("_to_target" in line) == line.rstrip().endswith("–  the target was not reached")
    assert "seconds_to_target" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('assignment = "coarse(3)"\nworkers = 4', "'shards' must "),
        ('batch_size = "batch_growth(8)"\nseconds = 1.0', "'batch_size' must be a number where "),
        ('task = "no_such_module:x"', "cannot load task 'no_such_module:x'"),
    ],
)
def test_what_shows_only_when_a_file_is_run_names_the_file_too(refused, tmp_path, line, message):
    path = tmp_path / "run.toml"
    task = "" if line.startswith("task") else 'task = "digits-mlp"\n'
    path.write_text(f'{task}strategy = "sync_sgd"\n{line}\n')
    refused(["run", str(path)], f"{path}: {message}")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["nosync(1+1)"], "'strategy' must be a strategy such as"),
        (["sync_sgd(codec=[1])"], "'strategy' must be a strategy such as"),
        (
            ["sync_sgd", "--lr", "9" * 400],
            f"'--lr' must be a number that fits into a float (got {'9' * 150}…{'9' * 150})",
        ),
        (
            ["sync_sgd", "--seed", "0x" + "f" * 4000],
            "'seed' must be below 2**63 (got one of too many digits)",
        ),
        (["sync_sgd", "--look-every", "5e-324 s"], "'look_every' must be an interval such as"),
        (["sync_sgd", "--compute", "compute(seconds=-1)"], "'seconds' of compute must be at least"),
        (
            ["sync_sgd", "--workers", "2", "--faults", "faults({0: '1s', 1: '1 step'})"],
            "'deaths' must leave one of 2 workers alive",
        ),
        (
            ["sync_sgd", "--faults", "faults(pauses=3)"],
            "'pauses' must be",
        ),
        (
            ["sync_sgd", "--backend", "local", "--faults", "faults(death_rate=1)"],
            "'faults' must be left out with a backend other than 'sim'",
        ),
        (
            ["sync_sgd", "--compute", "compute(slow={1: 2, 1: 3})"],
            "'--compute' must be a time such as 20ms or 0.02, measured",
        ),
    ],
)
def test_odd_calls_are_one_clear_line(refused, call, message):
    refused(["run", "digits-mlp", *call], message)


@pytest.mark.parametrize("task", [":x", ".a:x", "a b:x", "a:"])
def test_a_task_that_no_module_can_have_is_one_clear_line(refused, task):
    refused(["run", task, "sync_sgd"], "'task' must be a name, or package.module:task (got ")


def test_a_folder_that_takes_no_result_is_refused_before_the_run(refused, monkeypatch, tmp_path):
    module = sys.modules["flockstep.cli.run"]  # whose name is that of the command, too
    monkeypatch.setattr(module, "train", lambda *_, **__: pytest.fail("it was run"))
    (tmp_path / "file").write_text("")
    for out, reason in (
        ("/dev/null/x", "Not a directory"),
        (tmp_path / "file", "File exists"),
        (tmp_path / "new" / ("x" * 300), "File name too long"),
    ):
        message = f"'out' must be a folder that takes files (got '{out}': {reason})"
        refused(["run", "digits-mlp", "sync_sgd", "--out", str(out)], message)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_asking_for_a_folder_leaves_it_as_it_was(tmp_path):
    for folder in (tmp_path, tmp_path / "a" / "b"):
        require_result_folder(folder)
        assert not list(tmp_path.iterdir())
