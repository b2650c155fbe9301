"""A run is a value: it prints and reads back, has an id, and says in one line what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import operator
import os
import pickle
import subprocess
import sys
from functools import partial

import cloudpickle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.core_only import CoreOnly
from tests.support.specs import EVERY_CLASS, PLACES, run_specs, specs_of

import flockstep as fs
from flockstep.errors import InvalidField, SpecError, UnknownName
from flockstep.notation import written
from flockstep.spec import BUDGETS

LAW = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def digits(strategy="sync_sgd", **fields):
    return fs.RunSpec("digits-mlp", strategy, **fields)


def reads_back(spec):
    """Whether a spec survives TOML and JSON, and its id with it."""
    copies = [fs.RunSpec.from_toml(spec.to_toml()), fs.RunSpec.from_json(spec.to_json())]
    return all(copy == spec and copy.id == spec.id and copy.lanes == spec.lanes for copy in copies)


# ---- Laws


@pytest.mark.parametrize(("kind", "name"), EVERY_CLASS, ids=lambda each: str(each))
@LAW
@given(data=st.data())
def test_a_run_with_any_spec_of_every_class_reads_back(kind, name, data):
    fields = {"strategy": "sync_sgd", **PLACES[kind](data.draw(specs_of(kind, name)))}
    assert reads_back(fs.RunSpec("digits-mlp", **fields))


@settings(LAW, max_examples=100)
@given(spec=run_specs())
def test_a_run_with_everything_at_random_reads_back(spec):
    assert reads_back(spec)
    assert spec.resolved().id == spec.id
    assert spec.replace() == spec
    assert hash(spec) == hash(spec.replace())


# ---- The id


def test_ids_tell_codecs_apart():
    """As the records of runs once did not."""
    codecs = [fs.TopK(0.01), fs.RandomK(0.01), fs.OneBit(), fs.Float16(), None]
    assert len({digits(fs.SyncSGD(codec=codec)).id for codec in codecs}) == len(codecs)


def test_spelled_out_defaults_and_the_tasks_own_make_no_difference_to_the_id():
    bare = digits()
    assert bare.id == "5029ba3e17c633cd"  # whatever the process, the day and the version of Python
    for fields in (
        {"workers": 8, "backend": "sim", "seed": 0, "device": "cpu", "on_failure": "stop"},
        {"assignment": fs.Disjoint(), "sampling": fs.Sampling(), "look_every": "1 epoch"},
        {"network": "lan-1g", "compute": fs.Compute()},
        {"backend": fs.Simulator(lanes=2)},
        {"epochs": 10, "batch_size": 16, "schedule": "constant"},
        {"lr": 0.05},
        {"optimizer": "sgd(lr=0.05, momentum=0.9)"},
        {"optimizer": "sgd(momentum=0.9, dampening=0)", "lr": 0.05},
        {"lanes": 1, "measure": []},
        {"look_at": "due", "recalibrate": False},
        {"strategy": "sync_sgd(all_reduce=flat, codec=none)"},
    ):
        assert digits(**fields).id == bare.id, fields
    shared = fs.RunSpec("fashion-lenet", "sync_sgd", workers=4)
    assert shared.id == shared.replace(batch_size=16, schedule="polynomial(power=1)").id
    gpt = fs.RunSpec("shakespeare-gpt", "sync_sgd")
    assert gpt.id == gpt.replace(lr=1e-3).id


def test_any_other_difference_is_one_of_the_id():
    specs = [
        digits(),
        fs.RunSpec("digits-cnn", "sync_sgd"),
        digits("local_sgd(8)"),
        digits("local_sgd(9)"),
        digits("post_local_sgd(1, 4)"),
        digits("post_local_sgd(1.0, 4)"),
        *[
            digits(**{field: value})
            for field, value in {
                "workers": 9,
                "backend": "local",
                "epochs": 9,
                "steps": 9,
                "seconds": 9,
                "bytes": 9,
                "target": 0.5,
                "batch_size": 9,
                "lr": 0.5,
                "optimizer": "sgd",
                "schedule": "cosine",
                "assignment": "full_overlap",
                "sampling": "sampling(order=with_replacement)",
                "validation": 0.1,
                "network": "wifi",
                "compute": "measured",
                "faults": "faults(deaths={1: 0.5})",
                "look_every": "2 epochs",
                "look_at": "synchronisation",
                "drop_last": True,
                "train_samples": 9,
                "batch_norm_group": 2,
                "weight_decay_schedule": "cosine",
                "measure": "spread",
                "recalibrate": True,
                "seed": 1,
                "on_failure": "continue",
                "device": "auto",
            }.items()
        ],
        digits(batch_size=fs.BatchGrowth(16)),
        digits(seconds=0.1 + 0.2),
        digits(seconds=0.3),
    ]
    assert len({spec.id for spec in specs}) == len(specs)
    tried = {field.name for field in dataclasses.fields(fs.RunSpec)} - {"lanes"}
    differing = [
        {name for name in tried if getattr(spec, name) != getattr(specs[0], name)} for spec in specs
    ]
    assert set.union(*differing) == tried


def test_the_id_is_that_of_another_process_with_other_hashes():
    spec = digits(fs.SyncSGD(codec=fs.TopK(0.01)), compute=fs.Compute(slow={3: 2.0, 1: 1.5}))
    code = "import sys, flockstep; print(flockstep.RunSpec.from_json(sys.argv[1]).id)"
    done = subprocess.run(
        [sys.executable, "-c", code, spec.to_json()],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.strip() == spec.id


def test_the_order_of_fields_makes_no_difference():
    lines = digits(seed=3, workers=4, lr=0.1).to_toml().splitlines()
    spec = fs.RunSpec.from_toml("\n".join(reversed(lines)))
    assert spec == digits(lr=0.1, workers=4, seed=3)
    assert spec.id == digits(lr=0.1, workers=4, seed=3).id


# ---- What is printed


def test_toml_has_the_version_first_and_what_differs_from_defaults():
    spec = fs.RunSpec(
        "cifar10-resnet20",
        fs.Households(8, world_period=128),
        workers=16,
        lr=1,
        optimizer="sgd(momentum=0.9, weight_decay=1e-4)",
        epochs=182,
        batch_size=61,
        assignment=fs.HouseholdShards(8, shards=2),
        look_every="50 steps",
        measure="time, replicas",
        network="wan-100m",
        compute=fs.Compute(0.02, jitter=0.1),
        lanes=2,
    )
    assert spec.to_toml() == (
        "version = 1\n"
        'task = "cifar10-resnet20"\n'
        'strategy = "households(count=8, world_period=128)"\n'
        "workers = 16\n"
        "epochs = 182\n"
        "batch_size = 61\n"
        "lr = 1.0\n"
        'optimizer = "sgd(momentum=0.9, weight_decay=0.0001)"\n'
        'assignment = "household_shards(households=8, shards=2)"\n'
        'network = "wan-100m"\n'
        'compute = "compute(seconds=0.02, jitter=0.1)"\n'
        'look_every = "50 steps"\n'
        'measure = ["replicas", "time"]\n'
        "lanes = 2\n"
    )
    assert digits().to_json() == '{"version": 1, "task": "digits-mlp", "strategy": "sync_sgd"}'


def test_a_file_of_either_form_is_loaded(tmp_path):
    spec = digits("local_sgd(8)", seed=2**63 - 1)
    (tmp_path / "run.toml").write_text(spec.to_toml())
    (tmp_path / "run.json").write_text(spec.to_json())
    assert fs.RunSpec.load(tmp_path / "run.toml") == spec
    assert fs.RunSpec.load(str(tmp_path / "run.json")) == spec


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("epoch = 3", "unknown field 'epoch'; did you mean 'epochs'? known: task, strategy, "),
        ("colour = 3", "unknown field 'colour'; known: task, strategy, "),
        ("version = 2", "'version' must be 1: no other can be read here (got 2)"),
        ('workers = "8"', "'workers' must be a whole number or none (got '8')"),
        ("workers = 8.0", "'workers' must be a whole number or none (got 8.0)"),
        ("workers = true", "'workers' must be a whole number or none (got True)"),
        ("workers = 0", "'workers' must be at least 1 (got 0)"),
        ("epochs = 1\nsteps = 2", "'epochs' and 'steps' must not be given together: one budget"),
        ("seconds = 0", "'seconds' must be above 0 and finite (got 0.0)"),
        ("seconds = inf", "'seconds' must be above 0 and finite (got inf)"),
        ("target = nan", "'target' must be finite (got nan)"),
        ("lr = -1", "'lr' must be at least 0 and finite (got -1.0)"),
        ("lr = [1]", "'lr' must be a number or none (got [1])"),
        ("seed = -1", "'seed' must be at least 0 (got -1)"),
        (f"seed = {2**63}", "'seed' must be below 2**63 (got 9223372036854775808)"),
        ("batch_size = 2.5", "'batch_size' must be a whole number, or one such as fs.BatchGrowth"),
        ('batch_size = "lots"', "unknown batch size 'lots'; known: batch_growth"),
        ('optimizer = "sgd(lr=0.1)"\nlr = 1', "'lr' must not be given twice, here and in 'optim"),
        ('optimizer = "sgd(lr=0.001)"\nlr = 1', "'lr' must not be given twice, here and in 'opti"),
        ('optimizer = "lars"', "'lr' of lars must be given: lars(lr=…)"),
        ('optimizer = "two_stage(sgd, adam, 1)"\nlr = 1', "'lr' must be set in the parts of two"),
        ('optimizer = "lbfgs"', "'optimizer' must not be lbfgs: it needs a closure"),
        ('schedule = "cosin"', "unknown schedule 'cosin'; did you mean 'cosine'? known: "),
        ("schedule = 0.1", "'schedule' must be one such as fs.Cosine() (got 0.1)"),
        ("assignment = 3", "'assignment' must be one such as fs.Disjoint() (got 3)"),
        ("strategy = 3", "'strategy' must be a strategy such as fs.LocalSGD(period=8) (got 3)"),
        ('task = "digits"', "unknown task 'digits'; did you mean 'digits-mlp'? known: "),
        ("task = 3", "'task' must be a name, or an fs.Task (got 3)"),
        ('backend = "moon"', "unknown backend 'moon'; known: local, ray, sim, torchrun"),
        ("backend = 3", "'backend' must be a text (got 3)"),
        (
            'backend = "local"\nnetwork = "wifi"',
            "'network' must be left out with a backend other than 'sim' (got Network(",
        ),
        (
            'backend = "local"\nlanes = 2',
            "'lanes' must be left out with a backend other than 'sim' (got 2)",
        ),
        ("lanes = 0", "'lanes' must be at least 1 (got 0)"),
        ('look_every = "2 weeks"', "'look_every' must be an interval such as '1 epoch', "),
        (
            'measure = "spred"',
            "'measure' must be some of replicas, spread, distance, staleness, time, positions, "
            "flatness, training (",
        ),
        (
            "measure = 3",
            "'measure' must be some of replicas, spread, distance, staleness, time, positions, "
            "flatness, training (g",
        ),
        ('on_failure = "hope"', "'on_failure' must be one of 'stop', 'continue' (got 'hope')"),
        ('device = "moon"', "'device' must be one of 'cpu', 'cuda', 'auto' (got 'moon')"),
        ("task", "not TOML: "),
        ("seed = 0x" + "f" * 4000, "'seed' must be below 2**63 (got one of too many digits)"),
        (f'schedule = "{"*".join(["cosine"] * 2500)}"', "'schedule' must be a schedule such as"),
        (
            f'schedule = "{"*".join(["cosine"] * 101)}"',
            "'schedule' must be a product of at most 100 factors (got 101)",
        ),
        (f"lr = {'9' * 400}", f"'lr' must be a number that fits into a float (got {'9' * 150}…9"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_name(tmp_path, lines, message):
    given = lines.splitlines()
    for key, value in (("task", '"digits-mlp"'), ("strategy", '"sync_sgd"')):
        if not lines.startswith(f"{key} ="):
            given.append(f"{key} = {value}")
    path = tmp_path / "run.toml"
    path.write_text("\n".join(given))
    with pytest.raises((InvalidField, UnknownName, SpecError)) as caught:
        fs.RunSpec.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < len(str(path)) + 600


def test_files_that_are_no_specs_say_so(tmp_path):
    for name, text, message in (
        ("a.json", "[1]", "not a JSON object, but a list"),
        ("b.json", "{", "not JSON: Expecting property name"),
        ("c.yaml", "", "'file' must end in .toml or .json (got 'c.yaml')"),
        ("d.toml", 'strategy = "sync_sgd"', "'task' must be given (got None)"),
        ("e.toml", 'task = "digits-mlp"', "'strategy' must be given (got None)"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(fs.FlockstepError) as caught:
            fs.RunSpec.load(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: {message}")
    (tmp_path / "f.toml").write_bytes(b"\xff")
    with pytest.raises(SpecError, match="cannot be read: 'utf-8' codec"):
        fs.RunSpec.load(tmp_path / "f.toml")
    with pytest.raises(SpecError, match=r"none.toml: cannot be read: No such file"):
        fs.RunSpec.load(tmp_path / "none.toml")


# ---- Tasks, strategies and backends of one's own


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a task, and a strategy that it offers as an entry point."""
    (tmp_path / "elsewhere_tasks.py").write_text(
        "import flockstep as fs\nfrom dataclasses import replace\n"
        "mine = replace(fs.task('digits-mlp'), name='mine', epochs=1)\n"
    )
    (tmp_path / "elsewhere_strategy.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "import flockstep as fs\n\n"
        "@dataclass(frozen=True)\n"
        "class Elsewhere(fs.Strategy[None]):\n"
        "    name: ClassVar[str] = 'elsewhere'\n"
        "    strength: float\n"
        "    note: str = 'two words'\n"
        "    codec: fs.Codec | None = None\n"
    )
    metadata = tmp_path / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[flockstep.strategies]\nelsewhere = elsewhere_strategy:Elsewhere\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in ("elsewhere_tasks", "elsewhere_strategy"):
        sys.modules.pop(module, None)


@settings(LAW, max_examples=8, suppress_health_check=list(HealthCheck))
@given(strength=st.floats(allow_nan=False), note=st.text(), codec=specs_of(fs.Codec, "qsgd"))
def test_a_strategy_and_a_task_of_another_package_read_back(package, strength, note, codec):
    from elsewhere_strategy import Elsewhere

    strategy = Elsewhere(strength, note, codec)
    spec = fs.RunSpec("elsewhere_tasks:mine", strategy)
    assert reads_back(spec)
    assert spec.strategy is strategy
    assert f"elsewhere(strength={strength!r}" in spec.to_toml()


def test_they_can_be_said_on_the_command_line_too(package, flockstep):
    call = ["elsewhere_tasks:mine", "elsewhere(0.5, note='a, b')", "--set", "codec=qsgd(4)"]
    done = flockstep("run", *call, "--print-spec")
    assert done.returncode == 0, done.stderr
    assert (
        fs.RunSpec.from_toml(done.stdout).to_toml()
        == done.stdout
        == (
            'version = 1\ntask = "elsewhere_tasks:mine"\n'
            "strategy = \"elsewhere(strength=0.5, note='a, b', codec=qsgd(levels=4))\"\n"
        )
    )


def test_a_task_of_a_module_is_known_by_what_its_name_gives(package):
    task = fs.task("elsewhere_tasks:mine")
    assert fs.RunSpec(task, "sync_sgd") == fs.RunSpec("elsewhere_tasks:mine", "sync_sgd")
    assert fs.RunSpec(task, "sync_sgd").replace(epochs=1).id == fs.RunSpec(task, "sync_sgd").id
    other = dataclasses.replace(task, epochs=2)
    assert fs.RunSpec(other, "sync_sgd").task is other


def test_a_built_in_task_is_known_by_its_parts():
    task = fs.task("digits-mlp")
    assert fs.RunSpec(task, "sync_sgd") == digits()
    assert (
        fs.RunSpec(dataclasses.replace(task, loss=lambda model, batch: 0), "sync_sgd") != digits()
    )


def test_a_task_of_a_script_runs_and_says_why_it_cannot_be_printed():
    spec = fs.RunSpec(
        dataclasses.replace(fs.task("digits-mlp"), name="mine"), "sync_sgd", workers=2, epochs=1
    )
    assert fs.run(spec).metrics["test_accuracy"] > 0.5
    for printed in (spec.to_toml, spec.to_json, lambda: spec.id):
        with pytest.raises(SpecError) as caught:
            printed()
        assert str(caught.value) == (
            "task 'mine' cannot be written as text: it was made in a script; "
            "put it in a module and name it 'package.module:task'"
        )


def test_a_module_is_not_loaded_before_it_is_needed():
    spec = fs.RunSpec("no.such.module:task", "sync_sgd")
    assert fs.RunSpec.from_toml(spec.to_toml()) == spec
    with pytest.raises(UnknownName, match="cannot load task 'no.such.module:task'"):
        spec.find_task()


def test_backends_become_their_names_and_a_simulators_settings_the_specs():
    simulator = fs.Simulator(fs.Network.preset("wifi"), fs.Compute(0.5), lanes=2)
    assert digits(backend=simulator) == digits(network="wifi", compute="compute(0.5)", lanes=2)
    faults = fs.Faults({1: 2}, pause_rate=0.1)
    assert digits(backend=fs.Simulator(faults=faults)).faults == faults
    assert digits(backend=fs.LocalProcesses()).backend == "local"
    assert digits(backend=fs.Torchrun()).workers is None
    with pytest.raises(InvalidField, match="'lanes' must be set on the backend object"):
        digits(backend=simulator, lanes=1)
    own = digits(backend=CoreOnly())
    assert isinstance(own.backend, CoreOnly)
    with pytest.raises(SpecError, match=r"^backend CoreOnly cannot be written as text"):
        own.to_toml()


def test_faults_are_part_of_a_run_unless_nothing_can_happen():
    faults = fs.Faults({1: "3 steps"}, [fs.Pause(0, seconds=2)])
    spec = digits(faults=faults)
    assert fs.RunSpec.from_toml(spec.to_toml()) == fs.RunSpec.from_json(spec.to_json()) == spec
    assert digits(faults="faults({1: '3 steps'}, [pause(0, seconds=2)])") == spec
    assert spec.id != digits().id == digits(faults=fs.Faults()).id
    with pytest.raises(InvalidField, match="'faults' must be left out with a backend other than"):
        digits(faults=faults, backend="local")


# ---- What a run makes of it


def test_a_change_takes_the_place_of_what_says_the_same():
    spec = digits(epochs=3, optimizer="sgd(lr=0.1, momentum=0.9)")
    assert spec.replace(steps=4).epochs is None
    assert spec.replace(lr=0.2) == digits(epochs=3, optimizer="sgd(momentum=0.9)", lr=0.2)
    assert spec.replace(lr=0.2).replace(optimizer="adam(lr=1e-2)").lr is None
    assert spec.replace(lr=0.2).replace(optimizer="adam").lr == 0.2
    with pytest.raises(UnknownName, match="unknown field 'epoch'; did you mean 'epochs'"):
        spec.replace(epoch=3)
    with pytest.raises(InvalidField, match="'epochs' and 'bytes' must not be given together"):
        spec.replace(epochs=3, bytes=3)
    assert {name for name in BUDGETS if getattr(spec.replace(bytes=1), name)} == {"bytes"}


def test_specs_of_a_run_are_resolved_by_its_task():
    spec = fs.RunSpec("fashion-lenet", "sync_sgd", workers=4, lr=0.5).resolved()
    assert (spec.epochs, spec.batch_size, spec.schedule) == (10, 16, fs.Polynomial())
    assert written(spec.optimizer) == "sgd(lr=0.5, momentum=0.9, weight_decay=0.0005)"
    assert (spec.network, spec.compute) == (fs.Network.preset("lan-1g"), fs.Compute())
    assert fs.RunSpec("fashion-lenet", "sync_sgd", backend="torchrun").resolved().batch_size is None
    assert fs.RunSpec("digits-mlp", "sync_sgd", backend="torchrun").resolved().batch_size == 16
    assert digits(steps=3).resolved().epochs is None


def parameters():
    return [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]


def rates(spec, task=None):
    groups = spec.make_optimizer(task or spec.find_task(), parameters()).param_groups
    return [float(group["lr"]) for group in groups]


def two_groups(given, lr):
    first, second = given
    groups = [{"params": [first]}, {"params": [second], "lr": lr / 10, "initial_lr": lr / 10}]
    return torch.optim.SGD(groups, lr=lr)


def test_the_rate_of_any_optimizer_can_be_set():
    assert rates(digits()) == [0.05]
    assert rates(digits(lr=0.3)) == [0.3]
    assert rates(digits(lr=0.3, optimizer="adam")) == [0.3]
    assert rates(digits(optimizer="adam(lr=0.4)")) == [0.4]
    assert rates(fs.RunSpec("shakespeare-gpt", "sync_sgd", lr=0.3)) == [0.3, 0.3]
    own = dataclasses.replace(
        fs.task("digits-mlp"), name="mine", optimizer=partial(two_groups, lr=0.1)
    )
    assert rates(fs.RunSpec(own, "sync_sgd")) == [0.1, 0.01]
    scaled = fs.RunSpec(own, "sync_sgd", lr=0.5).make_optimizer(own, parameters())
    assert [group["lr"] for group in scaled.param_groups] == pytest.approx([0.5, 0.05])
    assert scaled.param_groups[1]["initial_lr"] == pytest.approx(0.05)
    assert "initial_lr" not in scaled.param_groups[0]
    tensors = dataclasses.replace(own, optimizer=partial(two_groups, lr=torch.tensor(0.1)))
    assert rates(fs.RunSpec(tensors, "sync_sgd", lr=0.5), tensors) == pytest.approx([0.5, 0.05])
    still = dataclasses.replace(own, optimizer=partial(two_groups, lr=0.0))
    with pytest.raises(InvalidField, match="'lr' must be set in the optimizer itself"):
        rates(fs.RunSpec(still, "sync_sgd", lr=0.5), still)


def test_a_run_of_a_spec_is_the_run_of_its_parts():
    spec = digits("local_sgd(4)", workers=2, epochs=1, network="wifi", seed=3)
    whole = fs.run(spec)
    parts = fs.run(
        "digits-mlp",
        fs.LocalSGD(4),
        workers=2,
        epochs=1,
        network=fs.Network.preset("wifi"),
        seed=3,
    )
    assert torch.equal(whole.replicas[0], parts.replicas[0])
    assert whole.metrics["seconds"] == parts.metrics["seconds"]
    faster = fs.run(spec.replace(lr=0.2))
    adam = fs.run(spec.replace(optimizer="adam(lr=0.002)"))
    assert len({float(each.replicas[0].sum()) for each in (whole, faster, adam)}) == 3
    assert adam.metrics["test_accuracy"] > 0.5


# ---- Intervals, and parts for loops of one's own


@pytest.mark.parametrize(
    ("value", "count", "unit", "printed"),
    [
        ("1 epoch", 1, "epochs", "1 epoch"),
        ("3 Epochs", 3, "epochs", "3 epochs"),
        (50, 50, "steps", "50 steps"),
        ("50", 50, "steps", "50 steps"),
        ("1steps", 1, "steps", "1 step"),
        ("0.5 seconds", 0.5, "seconds", "0.5 seconds"),
        ("1e-3 s", 0.001, "seconds", "0.001 seconds"),
        ("1 sec", 1.0, "seconds", "1 second"),
        ("5 min", 300.0, "seconds", "300 seconds"),
        ("2h", 7200.0, "seconds", "7200 seconds"),
    ],
)
def test_intervals_are_read_and_printed(value, count, unit, printed):
    interval = fs.Interval.read(value)
    assert (interval.count, interval.unit, str(interval)) == (count, unit, printed)
    assert fs.Interval.read(printed) == interval == fs.Interval(count, unit)


@pytest.mark.parametrize(
    "value",
    ["", "epoch", "0 steps", "-1 steps", "1.5 steps", "0 s", "inf s", "1 week", "1 2 s", "e s"],
)
def test_what_is_no_interval_is_refused(value):
    with pytest.raises(InvalidField, match="'interval' must be an interval such as '1 epoch'"):
        fs.Interval.read(value)


def test_the_built_in_parts_are_there_for_loops_of_ones_own():
    task = fs.task("digits-mlp")
    model = task.model()
    assert isinstance(model, fs.models.MLP)
    assert task.optimizer == fs.OptimizerSpec("sgd", lr=0.05, momentum=0.9)
    train, test = fs.dataset("digits")
    assert (len(train), len(test)) == (1437, 360)
    inputs, labels = train[:32]
    assert model(inputs).shape == (32, 10)
    assert labels.shape == (32,)
    with pytest.raises(UnknownName, match="unknown data set 'digit'; did you mean 'digits'"):
        fs.dataset("digit")


def test_a_key_that_stands_twice_is_refused_in_json_too():
    with pytest.raises(fs.SpecError, match="not JSON: 'seed' stands twice"):
        fs.RunSpec.from_json('{"task": "digits-mlp", "strategy": "sync_sgd", "seed": 1, "seed": 2}')


@pytest.mark.parametrize("text", ["seed = " + 5000 * "9", "x = " + 9000 * "[" + 9000 * "]"])
def test_what_no_parser_takes_is_one_clear_line(text):
    with pytest.raises(fs.SpecError, match="not TOML: "):
        fs.RunSpec.from_toml(text)
    with pytest.raises(fs.SpecError, match="not JSON: "):
        fs.RunSpec.from_json('{"seed": ' + text.partition("= ")[2] + "}")


@pytest.mark.parametrize("version", ["true", "1.0", "2", '"1"'])
def test_a_version_is_the_number_itself(version):
    with pytest.raises(ValueError, match="'version' must be 1"):
        fs.RunSpec.from_toml(f'version = {version}\ntask = "digits-mlp"\nstrategy = "sync_sgd"')


def test_what_others_change_later_does_not_change_a_spec():
    slow = {1: 2.0}
    spec = fs.RunSpec("digits-mlp", "sync_sgd", compute=fs.Compute(slow=slow))
    before = spec.id
    slow[1] = 9.0
    assert spec.id == before
    assert hash(spec.compute) == hash(fs.Compute(slow={1: 2.0}))


def test_specs_of_tasks_that_were_made_in_a_script_can_be_compared():
    task = dataclasses.replace(fs.task("digits-mlp"), name="own", train=torch.zeros(3))
    other = dataclasses.replace(task, train=torch.ones(3))
    spec = fs.RunSpec(task, "sync_sgd")
    assert spec == fs.RunSpec(task, "sync_sgd")
    assert spec != fs.RunSpec(other, "sync_sgd")
    assert isinstance(hash(spec), int)


def test_a_backend_object_takes_the_place_of_the_settings_before():
    spec = fs.RunSpec("digits-mlp", "sync_sgd", network="wan-100m", compute=fs.Compute(0.5))
    other = spec.replace(backend=fs.Simulator(compute=fs.Compute(0.1)))
    assert (other.network, other.compute) == (fs.Simulator().network, fs.Compute(0.1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fs.Compute(slow=[1, 2]), "'slow' must map ranks to factors above 0"),
        (lambda: fs.Compute(slow={1: True}), "'slow' must map ranks to factors above 0"),
        (lambda: fs.Compute(slow={1: 10**400}), "'slow' must map ranks to factors above 0"),
        (lambda: fs.Compute(10**400), "'seconds' must be a number that fits into a float"),
        (lambda: fs.Network(1, 1, inside=3, household_size=2), "'inside' must be a link"),
        (lambda: fs.task(3), "'task' must be a name"),
        (
            lambda: fs.run(fs.RunSpec("digits-mlp", "sync_sgd"), epoch=None),
            "unknown field of a run",
        ),
    ],
)
def test_parts_of_a_spec_are_checked_where_they_are_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_factors_of_slow_ranks_cannot_be_changed():
    compute = digits(compute=fs.Compute(slow={1: 2.0})).compute
    changes = [
        lambda slow: slow.update({1: 9.0}),
        lambda slow: slow.setdefault(2, 9.0),
        lambda slow: slow.pop(1),
        lambda slow: slow.clear(),
        lambda slow: operator.setitem(slow, 1, 9.0),
        lambda slow: operator.delitem(slow, 1),
        lambda slow: operator.ior(slow, {1: 9.0}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="a part of a frozen spec cannot be changed"):
            change(compute.slow)
    assert compute.slow == {1: 2.0}
    assert repr(compute) == "Compute(seconds=0.01, jitter=0.0, slow={1: 2.0}, is_measured=False)"


def test_a_compute_travels_and_is_copied():
    compute = fs.Compute(slow={1: 2.0})
    by_pickle = cloudpickle.loads(cloudpickle.dumps(compute))
    for same in (
        by_pickle,
        copy.copy(compute),
        copy.deepcopy(compute),
        pickle.loads(pickle.dumps(compute)),
    ):
        assert same == compute
        assert type(same.slow) is type(compute.slow)


def test_a_method_that_gives_another_outcome_has_another_id(monkeypatch):
    """So that a study does not take records of before for those of now."""
    spec = fs.RunSpec("digits-mlp", fs.EASGD(4))
    before, other = spec.id, fs.RunSpec("digits-mlp", fs.SyncSGD()).id
    monkeypatch.setattr(fs.EASGD, "revision", fs.EASGD.revision + 1)
    assert spec.id != before
    assert fs.RunSpec("digits-mlp", fs.SyncSGD()).id == other
    assert fs.RunSpec.from_toml(spec.to_toml()) == spec


def test_only_runs_with_a_codec_have_another_id_where_only_they_give_another_outcome(monkeypatch):
    plain = fs.RunSpec("digits-mlp", fs.LocalSGD(4))
    coded = fs.RunSpec("digits-mlp", fs.LocalSGD(4, codec=fs.OneBit()))
    before = plain.id, coded.id
    monkeypatch.setattr(fs.LocalSGD, "codec_revision", fs.LocalSGD.codec_revision + 1)
    assert plain.id == before[0]
    assert coded.id != before[1]
