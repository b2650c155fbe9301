"""Studies in processes of their own: side by side, killed, interrupted, on real workers, on Ray."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import flockstep as fs
from flockstep.study import jobs as study_jobs
from flockstep.study.one_run import Order

BASE = {"task": "digits-mlp", "workers": 2, "steps": 4}
STUDY = fs.Study("Which?", base=BASE, axes={"strategy": ["sync_sgd", "gosgd"]}, seeds=3)


def test_two_jobs_carry_out_all_runs_as_one_would(tmp_path):
    outcome = STUDY.run(folder=tmp_path, jobs=2)
    assert len(outcome.table()) == 6
    for run, record in outcome.finished:
        alone = fs.run(run.spec)
        assert record.metrics["test_loss"] == alone.metrics["test_loss"]  # bit for bit
        assert record.host["threads"] == 1


def test_a_job_that_is_killed_loses_its_run_and_no_other(tmp_path, monkeypatch):
    """Of six runs one never ends by itself; its process is killed from outside."""
    study = STUDY.replace(base={**BASE, "steps": 30_000}, seeds=1, axes={"strategy": ["sync_sgd"]})
    (cell,) = study.cells
    endless = cell.spec(0)
    quick = [STUDY.cells[0].spec(seed) for seed in range(3)]
    orders = [Order(spec.id, spec) for spec in (endless, *quick)]
    with study_jobs.Jobs(2) as jobs:
        records = []
        for record in jobs.run(orders, [], lambda: None):
            records.append(record)
            if len(records) == 3:
                (busy,) = [job for job in jobs._jobs if job.order and job.order.id == endless.id]
                busy._process.kill()
    failed = [record for record in records if not record.is_done]
    assert [record.id for record in failed] == [endless.id]
    assert failed[0].error["message"].startswith("the process of the run ended with SIGKILL")
    assert {record.id for record in records if record.is_done} == {spec.id for spec in quick}


def test_a_job_that_dies_with_nothing_to_do_is_replaced():
    specs = [STUDY.cells[0].spec(seed) for seed in range(2)]
    first, second = (Order(spec.id, spec) for spec in specs)
    with study_jobs.Jobs(1) as jobs:
        (record,) = jobs.run([first], [], lambda: None)
        (idle,) = jobs._jobs
        idle._process.kill()
        idle._process.wait()
        (again,) = jobs.run([second], [], lambda: None)
    assert record.is_done
    assert again.is_done


def test_runs_by_the_wall_have_the_machine_for_themselves(tmp_path):
    places = {"sim": {"backend": "sim"}, "local": {"backend": "local"}}
    base = {**BASE, "strategy": "local_sgd(2)"}
    study = fs.Study("?", base=base, axes={"place": places}, seeds=2)
    outcome = study.run(folder=tmp_path, jobs=2)
    sim, local = (outcome.values(cell, "test_loss") for cell in study.cells)
    assert sim == local  # a synchronous method: bit for bit
    clocks = {run.cell.label: record.config["clock"] for run, record in outcome.finished}
    assert clocks == {"sim": "virtual", "local": "wall"}


SCRIPT = """
import flockstep as fs
base = {"task": "digits-mlp", "workers": 4, "epochs": 3}
study = fs.Study("Which?", base=base, axes={"strategy": ["sync_sgd", "gosgd"]}, seeds=6)
study.run(folder="records", jobs=2)
print("done", flush=True)
"""


def started(folder: Path) -> subprocess.Popen[str]:
    """The study in a process of its own, and not in `if __name__ == "__main__"`, on purpose."""
    path = folder / "study.py"
    path.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(path)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_records(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("records/*.json"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=20)
    return not alive


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_study_that_is_ended_in_any_way_goes_on_where_it_was(number, tmp_path):
    first = started(tmp_path)
    wait_for_records(tmp_path, 3)
    children = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, number)
    first.communicate(timeout=30)
    assert first.returncode != 0
    assert ended(children)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("records/*.json")}
    assert 3 <= len(before) < 12

    second = started(tmp_path)
    told, complaints = second.communicate(timeout=120)
    assert (second.returncode, told) == (0, "done\n"), complaints
    records = list(tmp_path.glob("records/*.json"))
    assert len(records) == 12
    assert not list(tmp_path.glob("records/*.part"))
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    assert all(json.loads(path.read_text())["status"] == "done" for path in records)


def test_the_same_runs_as_tasks_of_ray(ray, tmp_path):
    there = STUDY.run(folder=tmp_path, on="ray", jobs=2)
    alone = fs.run(there.runs[0].spec)
    (record,) = [record for run, record in there.finished if run.id == alone.spec.id]
    assert len(there.table()) == 6
    assert record.metrics["test_loss"] == alone.metrics["test_loss"]


def test_a_run_that_fails_on_ray_is_recorded(ray, tmp_path):
    axes = {"lr": [0.1, 1e30]}
    study = fs.Study("?", base={**BASE, "strategy": "sync_sgd"}, axes=axes, seeds=1)
    outcome = study.run(folder=tmp_path, on="ray", jobs=2)
    assert [record.error["type"] for _, record in outcome.failures] == ["NonFiniteLoss"]
    assert len(outcome.finished) == 1


def usable_cores_here(model, batch):
    return float(len(os.sched_getaffinity(0)))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_one_job_goes_where_no_other_program_stays():
    """As two studies with one job each that run side by side."""
    first, *others = sorted(os.sched_getaffinity(0))
    stays = f"import os; os.sched_setaffinity(0, {{{first}}}); print(flush=True); input()"
    crowd = []
    try:
        for _ in range(5):  # more than whatever else may stay on a core
            arguments = [sys.executable, "-c", stays]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            crowd.append(subprocess.Popen(arguments, **pipes))
            crowd[-1].stdout.readline()
        assert study_jobs.least_taken([first, *others])[-1] == first
        with study_jobs.Jobs(1) as jobs:
            list(jobs.run([Order("a", STUDY.cells[0].spec(0))], [], lambda: None))
            assert jobs._jobs[0].core in others
    finally:
        for each in crowd:
            each.communicate(b"\n")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_simulated_runs_stay_on_one_core_and_others_have_all():
    digits = fs.task("digits-mlp")
    task = dataclasses.replace(digits, name="cores", metric=usable_cores_here)
    simulated = fs.RunSpec(task, fs.SyncSGD(), workers=2, steps=2)
    orders = [Order(str(seed), simulated.replace(seed=seed)) for seed in range(3)]
    real = Order("real", fs.RunSpec(task, fs.SyncSGD(), workers=2, steps=2, backend="local"))
    with study_jobs.Jobs(2) as jobs:
        records = {each.id: each for each in jobs.run(orders, [real], lambda: None)}
    cores = {name: each.metrics["test_accuracy"] for name, each in records.items()}
    assert cores == {"0": 1, "1": 1, "2": 1, "real": len(os.sched_getaffinity(0))}
