"""Looks written down for TensorBoard, MLflow and Weights & Biases: read back by their own tools."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

import flockstep as fs
from flockstep.report import LOGGERS


def looks_of(log):
    seen = []

    def on_look(look):
        seen.append(look)
        log(look)

    fs.run("digits-mlp", fs.SyncSGD(), 2, steps=6, look_every="2 steps", measure="time",
           on_look=on_look)  # fmt: skip
    assert len(seen) == 3
    return seen


def numbers(look):
    return {name: value for name, value in look.items() if not isinstance(value, list)}


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with fs.TensorBoard(tmp_path / "runs", {"lr": 0.1}) as log:
        looks = looks_of(log)
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    assert set(events.Tags()["scalars"]) == set(numbers(looks[0]))
    for name in ("loss", "accuracy", "bytes_sent", "train_loss"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(look.step, pytest.approx(look[name])) for look in looks]
    assert "| lr | 0.1 |" in str(events.Tensors("config/text_summary")[0].tensor_proto)


LOGGED = """
import json, sys
import flockstep as fs

looks, (name, folder, rate) = [], sys.argv[1:]
with getattr(fs, name)(folder, {"lr": rate}) as log:
    fs.run("digits-mlp", fs.SyncSGD(), 2, steps=6, look_every="2 steps",
           on_look=lambda look: (looks.append(dict(look)), log(look)))
print(json.dumps(looks))
"""


def logged(name, folder, rate):
    """In a process of its own: these leave threads and connections in theirs."""
    package = LOGGERS[name.lower()].package
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", LOGGED, name, str(folder), rate],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TMPDIR": str(folder.parent)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_mlflow(tmp_path):
    for rate in ("0.1", "0.2"):  # two runs in one folder
        looks = logged("MLflow", tmp_path / "store", rate)
    with closing(sqlite3.connect(tmp_path / "store" / "mlflow.db")) as store:
        assert {*store.execute("select status from runs")} == {("FINISHED",)}
        (run,) = store.execute("select run_uuid from params where value = '0.2'").fetchone()
        rows = store.execute("select key, step, value from metrics where run_uuid = ?", [run])
        found = {(name, step): value for name, step, value in rows}
    assert found == {(name, look["step"]): look[name] for look in looks for name in look}


def test_weights_and_biases(tmp_path, monkeypatch):
    looks = logged("WandB", tmp_path / "runs", "0.1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where it makes folders when imported
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (tmp_path / "runs" / "wandb").glob("offline-run-*/*.wandb")
    found = [Record.FromString(data) for data in records(path.read_bytes())]
    rows = [
        {item.key or item.nested_key[0]: item.value_json for item in each.history.item}
        for each in found
        if each.WhichOneof("record_type") == "history"
    ]
    assert [float(row["loss"]) for row in rows] == [look["loss"] for look in looks]
    assert [int(row["_step"]) for row in rows] == [look["step"] for look in looks]


def records(raw):
    """Of the log of an offline run: a header, then pieces of records in blocks of 32 KB."""
    place, whole, block = 7, b"", 1 << 15
    while place < len(raw):
        left = block - place % block
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", raw, place + 4)
        place += 7 + length
        whole += raw[place - length : place]
        if kind in (1, 4):  # all of it, or the last piece
            yield whole
            whole = b""


def test_the_command_line_logs_as_it_runs(flockstep, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = [tmp_path / "first", tmp_path / "second"]
    flags = [flag for each in folders for flag in ("--log", f"tensorboard:{each}")]
    done = flockstep("run", "digits-mlp", "local_sgd(2)", "--steps", "4", "--look-every", "2 steps",
                     "--workers", "2", "--seed", "7", *flags)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for folder in folders:
        events = EventAccumulator(str(folder)).Reload()
        assert [event.step for event in events.Scalars("accuracy")] == [2, 4]
        assert "| seed | 7 |" in str(events.Tensors("config/text_summary")[0].tensor_proto)


@pytest.mark.parametrize("name", LOGGERS)
def test_what_is_not_installed_says_what_to_install(refused, name, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "flockstep.report.loggers.find_spec", lambda each: None if each == name else real(each)
    )
    kind = LOGGERS[name].__name__
    refused(
        ["run", "digits-mlp", "sync_sgd", "--log", f"{name}:{tmp_path / 'runs'}"],
        f"{kind} needs {name}: pip install 'flockstep[{name}]'",
    )
    assert not (tmp_path / "runs").exists()
    assert name in extras()


def extras():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    return project["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("tensorboard", "'--log' must be LOGGER:FOLDER, such as tensorboard:runs/first (got 'ten"),
        ("comet:runs", "unknown logger 'comet'; known: mlflow, tensorboard, wandb"),
    ],
)
def test_loggers_that_are_not_there(refused, log, message):
    refused(["run", "digits-mlp", "sync_sgd", "--log", log], message)


class Written(fs.Logger):
    """A logger of one's own."""

    package, extra = "sys", "none"

    def _open(self, config):
        self.config, self.rows, self.went_well = config, [], None

    def _write(self, step, numbers):
        self.rows.append((step, numbers))

    def _close(self, went_well):
        self.went_well = went_well


def test_a_logger_gets_all_numbers_and_hears_how_it_ended(tmp_path):
    with Written(tmp_path / "a" / "b", {"lr": 0.1, "seed": None}) as log:
        looks = looks_of(log)
    assert log.config == {"lr": "0.1", "seed": "None"}
    assert log.rows == [(look.step, numbers(look)) for look in looks]
    assert all(math.isfinite(value) for _, row in log.rows for value in row.values())
    assert log.went_well
    with pytest.raises(OSError, match="own"), Written(tmp_path) as log:
        raise OSError("own")
    assert log.went_well is False
    (tmp_path / "file").write_text("")
    with pytest.raises(fs.InvalidField, match="'folder' of Written must be one that takes files"):
        Written(tmp_path / "file")
