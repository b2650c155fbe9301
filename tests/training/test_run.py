"""A whole job in one call, its result, and what is said of bad input."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

import flockstep as fs


@pytest.fixture(scope="module")
def result():
    return fs.run("digits-mlp", fs.LocalSGD(period=8), workers=4, epochs=3, seed=1)


def test_a_run_gives_model_metrics_history_and_replicas(result):
    assert isinstance(result.model, nn.Module)
    assert set(result.metrics) == {
        "test_accuracy", "test_loss", "train_loss", "seconds", "wall_seconds", "bytes_sent",
        "exchanges", "steps", "samples", "workers", "lost",
    }  # fmt: skip
    assert result.metrics["test_accuracy"] > 0.8
    assert result.metrics["steps"] == 3 * 23
    assert result.metrics["samples"] == 3 * 1437
    assert [row["epoch"] for row in result.history] == [1, 2, 3]
    assert [row["step"] for row in result.history] == [23, 46, 69]
    assert all(
        set(row)
        == {
            "step", "epoch", "samples", "seconds", "bytes_sent", "train_loss", "loss", "accuracy",
        }
        for row in result.history
    )  # fmt: skip
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert [replica.shape for replica in result.replicas] == [(64 * 128 + 128 + 128 * 10 + 10,)] * 4
    assert json.loads(json.dumps(result.metrics)) == result.metrics


def test_replicas_are_as_they_stood_before_finish(result):
    state = torch.cat([parameter.detach().flatten() for parameter in result.model.parameters()])
    assert not torch.equal(result.replicas[0], result.replicas[1])
    assert torch.allclose(torch.stack(result.replicas).mean(0), state, atol=1e-6)


def test_the_metrics_are_those_of_the_model(result):
    from flockstep.data.datasets import digits

    x, y = digits()[1].tensors
    accuracy = (result.model(x).argmax(1) == y).double().mean()
    assert result.metrics["test_accuracy"] == pytest.approx(float(accuracy), abs=1e-12)


def test_a_result_comes_back_from_its_folder(result, tmp_path):
    folder = result.save(tmp_path / "deep" / "result")
    loaded = fs.load_result(folder)
    assert loaded.metrics == result.metrics
    assert loaded.history == result.history
    assert loaded.config == result.config
    assert (
        "Network(latency_seconds=0.0001, bytes_per_second=125000000.0" in loaded.config["settings"]
    )
    assert all(torch.equal(a, b) for a, b in zip(loaded.replicas, result.replicas, strict=True))
    for name, value in result.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.safetensors", "replicas.safetensors", "result.json",
    ]  # fmt: skip
    again = loaded.save(tmp_path / "again")
    assert fs.load_result(again).metrics == result.metrics


def test_the_record_of_a_task_of_a_script_says_what_was_run(tmp_path):
    def plain_sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    own = dataclasses.replace(fs.task("digits-mlp"), name="mine", optimizer=plain_sgd)
    fields = {
        "lr": 0.5,
        "target": 0.99,
        "look_every": "2 steps",
        "measure": "spread",
        "on_failure": "continue",
        "device": "auto",
    }
    result = fs.run(own, "sync_sgd", 2, steps=3, **fields)
    assert result.config["spec"] is None
    assert {name: result.config[name] for name in fields} == fields | {"measure": ["spread"]}
    assert fs.load_result(result.save(tmp_path), own).config == result.config


def test_a_copy_of_a_result_leaves_saving_to_the_process_that_leads(result, tmp_path):
    copy = dataclasses.replace(result, _is_copy=True)
    assert copy.save(tmp_path / "run") == tmp_path / "run"
    assert list(tmp_path.iterdir()) == []


class Follower(fs.Simulator):
    """Launches as a process under torchrun that does not lead: its own worker's report, and
    nobody else's.
    """

    is_lead = False

    def run(self, launch):
        own, *others = super().run(launch)[::-1]
        return [None for _ in others] + [own]


def test_a_process_that_does_not_lead_gets_the_same_figures_and_model(result):
    followed = fs.run("digits-mlp", fs.LocalSGD(period=8), 4, Follower(), epochs=3, seed=1)
    wall = {"wall_seconds": 0}
    assert followed.metrics | wall == result.metrics | wall
    assert followed.history == result.history
    assert torch.equal(followed.replicas[0], result.replicas[3])
    for name, value in result.model.state_dict().items():
        assert torch.equal(followed.model.state_dict()[name], value)


def test_a_process_whose_worker_is_lost_and_that_does_not_lead_has_no_model():
    class Bereft(Follower):
        def run(self, launch):
            return [None, fs.WorkerLost("gone", 1, -9, 3, 0.5)]

    result = fs.run("digits-mlp", fs.SyncSGD(), 2, Bereft(), on_failure="continue")
    assert result.lost == [{"rank": 1, "step": 3, "seconds": 0.5, "exit_code": -9}]
    assert (result.metrics["workers"], result.metrics["lost"]) == (2, 1)
    with pytest.raises(fs.ResultError, match="the process of rank 0 has the model"):
        _ = result.model


def test_reports_are_plain_values(result):
    """Backends that cross a network carry nothing else."""
    seen = []

    class Watching(fs.Simulator):
        def run(self, launch):
            seen.extend(super().run(launch))
            return seen

    fs.run("digits-mlp", fs.SyncSGD(), 2, Watching(), epochs=1, on_failure="continue")

    def is_plain(value):
        if type(value) is dict:
            return all(type(key) is str and is_plain(part) for key, part in value.items())
        if type(value) is list:
            return all(map(is_plain, value))
        return type(value) in (type(None), bool, int, float, str, torch.Tensor)

    assert len(seen) == 2
    assert all(map(is_plain, seen))


def test_a_run_leaves_the_callers_random_stream_as_it_was():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fs.run("digits-mlp", fs.SyncSGD(), workers=2, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_folder_that_is_no_result_is_one_clear_line(result, tmp_path):
    with pytest.raises(fs.ResultError, match="is not a result folder: it has no result.json"):
        fs.load_result(tmp_path)
    folder = result.save(tmp_path / "result")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(fs.ResultError, match="damaged"):
        fs.load_result(folder)
    (folder / "result.json").write_text("{}")
    with pytest.raises(fs.ResultError, match="damaged"):
        fs.load_result(folder)
    (folder / "result.json").write_text('{"format": 99}')
    with pytest.raises(fs.ResultError, match="format 99, this version reads 1"):
        fs.load_result(folder)


def own_task(**changes):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    task = fs.Task(
        "own",
        model=lambda: nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2)
        ),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02),
        loss=fs.classification_loss,
        train=(x, y),
        test=(x, y),
        metric=fs.classification_accuracy,
    )
    return dataclasses.replace(task, **changes)


def test_a_task_of_ones_own_runs_on_every_backend(backend):
    result = fs.run(own_task(), fs.EAWild(), workers=3, backend=backend, epochs=5, batch_size=4)
    assert result.metrics["test_accuracy"] > 0.6


def test_a_task_made_in_a_script_must_be_given_to_load_its_model(tmp_path):
    task = own_task()
    folder = fs.run(task, fs.SyncSGD(), workers=2, epochs=1).save(tmp_path / "r")
    with pytest.raises(fs.UnknownName, match="unknown task 'own'"):
        _ = fs.load_result(folder).model
    assert isinstance(fs.load_result(folder, task=task).model, nn.Module)
    with pytest.raises(fs.ResultError, match="does not fit task"):
        fs.load_result(folder, task=own_task(model=lambda: nn.Linear(4, 2)))


def test_a_task_can_be_named_by_module_and_attribute(tmp_path, monkeypatch):
    (tmp_path / "mytasks_for_test.py").write_text(
        "import dataclasses\nfrom flockstep.tasks import TASKS\n"
        "mine = dataclasses.replace(TASKS['digits-mlp'], epochs=1)\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = fs.run("mytasks_for_test:mine", fs.SyncSGD(), workers=2)
    assert result.config["task"] == "mytasks_for_test:mine"
    assert result.metrics["steps"] == 45
    with pytest.raises(fs.UnknownName, match="cannot load task 'mytasks_for_test:other'"):
        fs.run("mytasks_for_test:other", fs.SyncSGD())
    with pytest.raises(fs.UnknownName, match="cannot load task 'no_such_module:x'"):
        fs.run("no_such_module:x", fs.SyncSGD())
    with pytest.raises(fs.InvalidField, match="'task' must name an fs.Task"):
        fs.run("mytasks_for_test:number", fs.SyncSGD())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fs.run("digits-mpl", fs.SyncSGD()),
         r"unknown task 'digits-mpl'; did you mean 'digits-mlp'. known: cifar10"),
        (lambda: fs.run("digits-mlp", fs.SyncSGD(), backend="slurm"),
         r"unknown backend 'slurm'; known: local, ray"),
        (lambda: fs.run("digits-mlp"),
         r"'strategy' must be a strategy such as fs.LocalSGD\(period=8\)"),
        (lambda: fs.run("digits-mlp", "local_sgd"), r"'period' of local_sgd must be given"),
        (lambda: fs.run("digits-mlp", fs.SyncSGD(), workres=3),
         r"unknown field of a run 'workres'; did you mean 'workers'. known: "),
        (lambda: fs.run("digits-mlp", fs.SyncSGD(), workers=0),
         r"'workers' must be at least 1 \(got 0\)"),
        (lambda: fs.run("digits-mlp", fs.SyncSGD(), epochs=0),
         r"'epochs' must be at least 1 \(got 0\)"),
        (lambda: fs.run("digits-mlp", fs.SyncSGD(), batch_size=-3),
         r"'batch_size' must be at least 1 \(got -3\)"),
        (lambda: fs.run("digits-mlp", fs.SyncSGD(), seed=-1),
         r"'seed' must be at least 0 \(got -1\)"),
        (
            lambda: fs.run(own_task(), fs.SyncSGD(), workers=61),
            r"'samples' must be at least the number of workers, 61 \(got 60\)",
        ),
        (
            lambda: fs.run("digits-mlp", fs.SyncSGD(), backend="local", lanes=2),
            r"'lanes' must be left out with a backend other than 'sim' \(got 2\)",
        ),
        (
            lambda: fs.run("digits-mlp", fs.SyncSGD(), backend=fs.Simulator(), lanes=2),
            r"'lanes' must be set on the backend object",
        ),
        (lambda: fs.run("digits-mlp", fs.SyncSGD(), on_failure="panic"),
         r"'on_failure' must be one of"),
        (lambda: fs.run("digits-mlp", fs.SyncSGD(), lanes=0),
         r"'lanes' must be at least 1 \(got 0\)"),
        (lambda: fs.Network.preset("lan-2g"),
         r"unknown network 'lan-2g'; did you mean 'lan-1g'. known: home-uplinks"),
        (lambda: fs.Network(-1, 1), r"'latency_seconds' must be at least 0 and finite \(got -1\)"),
        (lambda: fs.Network(0, 0), r"'bytes_per_second' must be above 0 \(got 0\)"),
        (lambda: fs.Network(0, 1, household_size=2),
         r"'household_size' must be given together with 'inside'"),
        (lambda: fs.Compute(-1), r"'seconds' must be at least 0 and finite \(got -1\)"),
        (lambda: fs.Compute(slow={1: 0}), r"'slow' must map ranks to factors above 0"),
        (lambda: own_task(loss=None), r"'loss' must be callable \(got None\)"),
        (lambda: own_task(train=(torch.zeros(3), torch.zeros(4))).loaded() and fs.run(
            own_task(train=(torch.zeros(3, 4), torch.zeros(4))), fs.SyncSGD(), workers=2
        ), r"'dataset' must have parts of equal length \(got \[3, 4\]\)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert isinstance(raised.value, fs.FlockstepError)
    assert "\n" not in str(raised.value)


def test_a_spec_says_where_it_runs_and_a_backend_object_may_be_the_place(local):
    spec = fs.RunSpec("digits-mlp", fs.LocalSGD(8), workers=2, backend="local", epochs=1)
    result = fs.run(spec, backend=local)
    assert result.spec == spec
    assert result.metrics["test_accuracy"] > 0.4
    for other in ("local", "slurm", fs.Simulator(), fs.Ray()):
        with pytest.raises(fs.InvalidField, match=r"'backend' must be in the spec: spec.replace"):
            fs.run(spec, backend=other)


def test_a_diverging_run_stops_and_says_where(backend):
    task = own_task(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30))
    with pytest.raises(
        fs.NonFiniteLoss, match=r"rank \d: the loss is (nan|inf) at step \d+ with SyncSGD"
    ):
        fs.run(task, fs.SyncSGD(), workers=2, backend=backend, epochs=20)


def test_progress_is_drawn_on_stderr_when_asked(capsys):
    fs.run("digits-mlp", fs.SyncSGD(), workers=2, epochs=1, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "digits-mlp sync_sgd" in err


def test_a_watcher_sees_the_steps(backend):
    seen = []

    def program(comm):
        import time

        for _ in range(5):
            comm.elapse()
            time.sleep(0.05)

    fs.launch(program, 2, backend, watch=lambda steps: seen.append(list(steps)))
    assert seen[-1] == [5, 5]
    assert all(len(steps) == 2 for steps in seen)


def test_a_watcher_that_fails_stops_the_run(backend):
    def watch(steps):
        raise RuntimeError("no more")

    def program(comm):
        import time

        while True:
            comm.elapse()
            time.sleep(0.01)

    with pytest.raises(RuntimeError, match="no more"):
        fs.launch(program, 2, backend, watch=watch)


def test_a_strategy_that_ranks_by_accuracy_gets_the_metric_of_every_batch():
    """And others do not: it costs another pass, which leaves no trace in the statistics of batch
    normalisation.
    """
    asked = []

    def metric(model, batch):
        asked.append(model.training)
        return 0.5

    x, y = torch.randn(64, 4), torch.randint(2, (64,))
    task = fs.Task(
        "ranked", lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
        lambda p: torch.optim.SGD(p, lr=0.1), fs.classification_loss, (x, y), (x, y), metric,
        batch_size=8, epochs=1,
    )  # fmt: skip
    result = fs.run(task, fs.NoSync(pull=1.0, best=1, score="accuracy"), workers=2)
    assert asked.count(False) >= 2 * result.metrics["steps"]
    assert result.model[1].num_batches_tracked == result.metrics["steps"]
    before = len(asked)
    fs.run(task, fs.NoSync(pull=1.0, best=1), workers=2)
    assert len(asked) - before < result.metrics["steps"]
