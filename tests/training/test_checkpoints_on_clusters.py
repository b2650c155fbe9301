"""Runs under torchrun and on Ray that are saved and go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.training.test_checkpoints import checkpoints, only, outcome, task

import flockstep as fs

CLUSTERS = ["torchrun", "ray"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=CLUSTERS)
def place(request):
    return request.getfixturevalue(request.param)


def test_workers_that_meet_go_on_to_the_bit(place, tmp_path):
    strategy = fs.LocalSGD(3, codec=fs.Int8())
    spec = fs.RunSpec("digits-mlp", strategy, 2, place, epochs=1, schedule=fs.Cosine())
    whole = fs.run(spec, checkpoint=tmp_path / "all", every="10 steps", keep=1000)
    again = fs.resume(only(checkpoints(tmp_path / "all")[0], tmp_path / "one"), spec=spec)
    assert outcome(again)[2:] == outcome(whole)[2:]
    assert again.metrics["bytes_sent"] == whole.metrics["bytes_sent"]
    assert [look.loss for look in again.history] == [look.loss for look in whole.history]


def test_workers_that_never_wait_go_on(torchrun, tmp_path):
    spec = fs.RunSpec("digits-mlp", fs.EAWild(2), 2, torchrun, epochs=3)
    whole = fs.run(spec, checkpoint=tmp_path, every="1 epoch")
    assert checkpoints(tmp_path)
    result = fs.resume(tmp_path, spec=spec)
    assert result.metrics["steps"] == whole.metrics["steps"] and result.history[-1].epoch == 3


LIVES = """
import dataclasses, json, os, sys
import flockstep as fs
from tests.training.test_checkpoints import loss, task

taken = []

def deadly(model, batch):
    taken.append(1)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(taken) == 14:
        os._exit(3)
    return loss(model, batch)

mortal = dataclasses.replace(task(0.2), loss=deadly)
result = fs.run(mortal, fs.LocalSGD(3), backend="torchrun", epochs=4,
                checkpoint=sys.argv[1], every="5 steps")
if os.environ["RANK"] == "0":
    state = {name: value.tolist() for name, value in result.model.state_dict().items()}
    print("TOLD " + json.dumps([result.metrics["steps"], state]))
"""


def test_torchruns_restarts_land_in_the_last_checkpoint(tmp_path):
    (tmp_path / "lives.py").write_text(LIVES)
    command = ["--max-restarts", "1", "--nproc-per-node", "2", tmp_path / "lives.py"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *map(str, command), str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        timeout=200,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(tmp_path),  # torchrun leaves a folder for logs there
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WorkerLost" in done.stderr
    (told,) = [line for line in done.stdout.splitlines() if "TOLD " in line]
    steps, state = json.loads(told.partition("TOLD ")[2])
    whole = fs.run(fs.RunSpec(task(0.2), fs.LocalSGD(3), 2, epochs=4))
    assert steps == whole.metrics["steps"] == 32
    assert state == {name: value.tolist() for name, value in whole.model.state_dict().items()}
