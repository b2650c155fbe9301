"""Careless input: one line that names field, rule and value, before workers start where that can
be known.
"""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import flockstep as fs
from flockstep.agreement import agreed
from flockstep.backends import pickling
from flockstep.cli.inspect import inspect_task
from flockstep.errors import plain_spelling
from flockstep.notation import read

X, Y = torch.randn(40, 4), torch.arange(40) % 3
ONE_HOT = nn.functional.one_hot(Y, 3)
HOUSES_OF_2 = fs.Network(1e-2, 1e7, inside="lan-10g", household_size=2)


class Bare(nn.Module):
    """Without parameters."""

    def forward(self, inputs):
        return inputs[:, :3]


def linear():
    return nn.Linear(4, 3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def task(**changes):
    fields = {
        "name": "careless",
        "model": linear,
        "optimizer": sgd,
        "loss": fs.classification_loss,
        "metric": fs.classification_accuracy,
        "train": (X, Y),
        "test": (X, Y),
        "batch_size": 4,
        "epochs": 1,
    }
    return fs.Task(**fields | changes)


def unevaluated(**changes):
    """A task of a loss that is fine where it is only evaluated."""

    def loss(model, batch):
        value = fs.classification_loss(model, batch)
        return changes["training"](value) if model.training else value

    return task(loss=loss)


PAIRS = TensorDataset(torch.zeros(10, 4), torch.zeros(10))


def run(of=None, strategy="sync_sgd", workers=2, **fields):
    return fs.run(task() if of is None else of, strategy, workers, **fields)


def launch(program=lambda comm: comm.rank, workers=2, **options):
    return fs.launch(program, workers, **options)


def worker(**changes):
    def program(comm):
        model = linear()
        parts = {
            "comm": comm,
            "model": model,
            "optimizer": sgd(model.parameters()),
            "strategy": fs.SyncSGD(),
        }
        return fs.Worker(**parts | changes)

    return launch(program)


def batches(dataset, batch_size=4):
    def program(comm):
        model = linear()
        made = fs.Worker(comm, model, sgd(model.parameters()), fs.SyncSGD())
        return list(made.batches(dataset, batch_size))

    return launch(program)


def step(loss):
    def program(comm):
        model = linear()
        made = fs.Worker(comm, model, sgd(model.parameters()), fs.SyncSGD())
        made.step(loss)

    return launch(program)


def unpicklable():
    lock = threading.Lock()

    def loss(model, batch):
        with lock:
            return fs.classification_loss(model, batch)

    return functools.partial(run, of=task(loss=loss))


REFUSED = {
    # --- tasks
    "task-no-module": (
        lambda: run(":good"),
        "'task' must be a name, or package.module:task (got ':good')",
    ),
    "task-no-module-in-a-spec": (lambda: fs.RunSpec(":good", "sync_sgd"), "'task' must be a name"),
    "task-number": (lambda: run(42), "'task' must be a name, or an fs.Task (got 42)"),
    "task-none": (
        lambda: fs.run(None, "sync_sgd"),
        "'task' must be a name, or an fs.Task (got None)",
    ),
    "task-class": (lambda: run(fs.Task), "'task' must be a name, or an fs.Task (got <class "),
    "task-empty-name": (lambda: task(name=""), "'name' must be a text that is not empty (got '')"),
    "task-both-batches": (
        lambda: task(global_batch=8),
        "'batch_size' must be None where 'global_batch' is given, 8 (got 4)",
    ),
    "model-instance": (
        lambda: task(model=linear()),
        "'model' must be a function that makes one, not the model itself",
    ),
    "model-none": (lambda: run(task(model=lambda: None)), "'model' must be an nn.Module"),
    "model-bare": (
        lambda: run(task(model=Bare)),
        "'model' must have a trainable parameter (got 'Bare')",
    ),
    "model-bare-inspected": (
        lambda: inspect_task(task(model=Bare)),
        "'model' must have parameters (got 'Bare')",
    ),
    "model-lazy": (
        lambda: run(task(model=lambda: nn.LazyLinear(3))),
        "'model' must have parameters with shapes: ",
    ),
    "model-lazy-inspected": (
        lambda: inspect_task(task(model=lambda: nn.LazyLinear(3))),
        "(got 'LazyLinear with weight, bias')",
    ),
    "optimizer-instance": (
        lambda: task(optimizer=sgd(linear().parameters())),
        "'optimizer' must be a function that makes one, not the optimizer itself",
    ),
    "optimizer-none": (
        lambda: run(task(optimizer=lambda parameters: None)),
        "'optimizer' must be a torch optimizer, made of the parameters (got None)",
    ),
    # --- labels, losses, metrics
    "labels-float": (
        lambda: run(task(train=(X, Y.float()))),
        "'train' must have a whole number per sample as label: ",
    ),
    "labels-one-hot": (
        lambda: run(task(train=(X, ONE_HOT))),
        "(got 'torch.int64 of shape (3,)')",
    ),
    "labels-one-hot-float": (
        lambda: run(task(test=(X, ONE_HOT.float()))),
        "'test' must have a whole number per sample as label: ",
    ),
    "labels-column": (
        lambda: run(task(train=(X, Y[:, None]))),
        "(got 'torch.int64 of shape (1,)')",
    ),
    "labels-int32": (
        lambda: run(task(train=(X, Y.int()))),
        "'train' must have labels of torch.int64: labels.long()",
    ),
    "loss-none": (
        lambda: run(task(loss=lambda model, batch: None)),
        "'loss' must be one number (got None)",
    ),
    "loss-vector": (
        lambda: run(task(loss=lambda model, batch: model(batch[0]).sum(1))),
        "'loss' must be one number (got 'a tensor of shape (40,)')",
    ),
    "loss-float": (
        lambda: run(unevaluated(training=lambda loss: 1.0)),
        "'loss' must be a tensor of one number, computed from the model's parameters (got 1.0)",
    ),
    "loss-detached": (
        lambda: run(unevaluated(training=lambda loss: loss.detach())),
        "'loss' must be a tensor of one number, computed from the model's parameters",
    ),
    "loss-none-of-a-loop": (lambda: step(None), "'loss' must be one number (got None)"),
    "loss-vector-of-a-loop": (lambda: step(torch.ones(3)), "'loss' must be one number"),
    "metric-vector": (
        lambda: run(task(metric=lambda model, batch: batch[1] == 0)),
        "'metric' must be one number (got 'a tensor of shape (40,)')",
    ),
    "metric-text": (
        lambda: run(task(metric=lambda model, batch: "good")),
        "'metric' must be one number (got 'good')",
    ),
    # --- data
    "in-memory-numbers": (lambda: fs.InMemory(1, 2), "'tensors' must be tensors (got 1)"),
    "in-memory-scalar": (
        lambda: fs.InMemory(torch.tensor(1)),
        "'tensors' must have samples along the first dimension (got tensor(1))",
    ),
    "batches-of-a-name": (
        lambda: batches("mnist"),
        "'dataset' must be tensors or arrays, a tuple, list or dict of these, or a torch Dataset, "
        "such as fs.dataset('mnist')[0] (got 'mnist')",
    ),
    "batch-too-large": (
        lambda: run(batch_size=41),
        "'batch_size' must be at most the number of samples, 40 (got 41)",
    ),
    "batch-too-large-in-a-loop": (
        lambda: batches((X, Y), 41),
        "'batch_size' must be at most the number of samples, 40 (got 41)",
    ),
    "batch-of-all-too-large": (
        lambda: run(batch_size=fs.GlobalBatch(41)),
        "'global_batch' must be at most the number of samples, 40 (got 41)",
    ),
    "batch-too-large-to-grow": (
        lambda: run(batch_size=fs.BatchGrowth(41)),
        "'initial' must be at most the number of samples, 40 (got 41)",
    ),
    "recalibrate-none": (lambda: fs.recalibrate(linear(), None), "'dataset' must be tensors"),
    "recalibrate-a-class": (lambda: fs.recalibrate(nn.Linear, X), "'model' must be an nn.Module"),
    # --- the simulator
    "network-number": (lambda: launch(network=3), "'network' must be one such as "),
    "network-list": (
        lambda: fs.Network.preset([]),
        "'network' must be a name such as 'home-uplinks' (got [])",
    ),
    "compute-negative": (
        lambda: run(compute=-1),
        "'compute' must be at least 0 and finite (got -1)",
    ),
    "compute-text": (lambda: launch(compute="fast"), "'compute' must be seconds, or one such as "),
    "slow-list": (lambda: fs.Compute(slow=[1, 2]), "'slow' must map ranks to factors above 0"),
    "slow-nobody": (
        lambda: run(compute=fs.Compute(slow={99: 2})),
        "'slow' must name ranks below the number of workers, 2 (got 99)",
    ),
    "slow-nobody-of-a-launch": (
        lambda: fs.Simulator(compute=fs.Compute(slow={2: 2})).run(fs.Launch(print, 2)),
        "'slow' must name ranks below the number of workers, 2 (got 2)",
    ),
    "households-uneven": (
        lambda: launch(workers=5, network=HOUSES_OF_2),
        "'household_size' must divide the number of workers, 5 (got 2)",
    ),
    # --- launches and workers
    "program-number": (lambda: fs.launch(42), "'program' must be callable (got 42)"),
    "program-unpicklable": (
        lambda: pickling.dump(unpicklable(), "program"),
        "'program.of.loss.lock' must be picklable, to travel to another process (got <unlocked",
    ),
    "watch-number": (lambda: launch(watch=3), "'watch' must be callable (got 3)"),
    "backend-number": (lambda: launch(backend=3), "'backend' must be a name such as 'local'"),
    "worker-strategy-name": (
        lambda: worker(strategy="local"),
        "'strategy' must be a strategy such as fs.LocalSGD(period=8) (got 'local')",
    ),
    "worker-strategy-class": (
        lambda: worker(strategy=fs.SyncSGD),
        "'strategy' must be a strategy such as fs.LocalSGD(period=8) (got <class ",
    ),
    "worker-comm": (
        lambda: worker(comm=3),
        "'comm' must be what a launched program is given (got 3)",
    ),
    "worker-model-class": (lambda: worker(model=nn.Linear), "'model' must be an nn.Module"),
    "worker-model-lazy": (
        lambda: worker(model=nn.LazyLinear(3)),
        "'model' must have parameters with shapes: ",
    ),
    "worker-optimizer": (lambda: worker(optimizer=sgd), "'optimizer' must be a torch optimizer"),
    "all-reduce-number": (
        lambda: launch(lambda comm: comm.all_reduce(3)),
        "'tensor' must be a tensor (got 3)",
    ),
    # --- runs and results
    "progress-text": (lambda: run(progress="yes"), "'progress' must be True or False (got 'yes')"),
    "trace-number": (lambda: run(trace=3), "'trace' must be a path (got 3)"),
    "save-nowhere": (
        lambda: fs.Result({}, {}, [], []).save(None),
        "'folder' must be a path (got None)",
    ),
    "load-from-nowhere": (lambda: fs.load_result(None), "'folder' must be a path (got None)"),
    "load-with-no-task": (
        lambda: fs.load_result("anywhere", 42),
        "'task' must be a name, or an fs.Task (got 42)",
    ),
    "spec-from-nowhere": (lambda: fs.RunSpec.load(None), "'path' must be a path (got None)"),
    "schedule-empty": (lambda: run(schedule=""), "'schedule' must be a schedule such as cosine"),
    "hear-number": (lambda: launch(hear=42), "'hear' must be callable (got 42)"),
    "agree-on-two": (
        lambda: launch(lambda comm: agreed(comm, torch.zeros(2), "any")),
        "'value' must be one number",
    ),
    "patience-in-virtual-time": (
        lambda: run(patience=5.0), "'patience' must be left out with backend 'sim' (got 5.0)",
    ),
    "all-are-too-few": (
        lambda: run(task(global_batch=4096, batch_size=None)),
        "'global_batch' must be at most the number of samples, ",
    ),
    "loader-draws-less": (
        lambda: batches(DataLoader(PAIRS, 4, sampler=RandomSampler(PAIRS, num_samples=5)), None),
        "'sampler' must draw as many samples as there are, 10 (got 5)",
    ),
    "checkpoint-number": (lambda: run(checkpoint=3), "'checkpoint' must be a path (got 3)"),
    "resume-nowhere": (lambda: fs.resume(None), "'folder' must be a path (got None)"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_careless_input_is_refused_in_one_line(call, words):
    with pytest.raises(fs.InvalidField) as refused:
        call()
    message = str(refused.value)
    assert words in message
    assert "\n" not in message


def test_a_result_of_another_task_is_refused_in_one_line(tmp_path):
    run().save(tmp_path)
    other = task(name="other", model=lambda: nn.Linear(5, 3))
    with pytest.raises(
        fs.ResultError, match="does not fit task 'other': .* size mismatch"
    ) as refused:
        fs.load_result(tmp_path, other)
    assert "\n" not in str(refused.value)
    assert fs.load_result(tmp_path, task()).model(X).shape == (40, 3)


def test_a_bug_in_a_metric_is_found_before_workers_start():
    began = []

    def model():
        began.append(threading.current_thread().name)
        return linear()

    def metric(model, batch):
        raise ZeroDivisionError("no samples")

    with pytest.raises(ZeroDivisionError, match="task 'careless' raised ZeroDivisionError") as bug:
        run(task(model=model, metric=metric))
    assert isinstance(bug.value, fs.FlockstepError)
    assert began == ["MainThread"]


# --- what a user would expect ---------------------------------------------------------------------


def test_a_preset_is_taken_by_name_wherever_a_network_is():
    wan = fs.Network.preset("wan-100m")
    seconds = [run(network=each).metrics["seconds"] for each in (wan, "wan-100m", "lan-1g")]
    assert seconds[0] == seconds[1] > seconds[2]
    assert launch(network="wan-100m") == [0, 1]
    assert fs.Simulator(network="wan-100m").network == wan
    assert fs.RunSpec("digits-mlp", "sync_sgd", network="wan-100m").network == wan
    assert HOUSES_OF_2.inside == fs.Network.preset("lan-10g")


def test_a_number_is_the_seconds_of_a_step():
    expected = fs.Compute(seconds=0.02)
    assert fs.Simulator(compute=0.02).compute == expected
    assert fs.RunSpec("digits-mlp", "sync_sgd", compute=0.02).compute == expected
    assert fs.RunSpec("digits-mlp", "sync_sgd", compute="0.02").compute == expected
    run_ = run(compute=0.02, network="ideal")
    assert run_.metrics["seconds"] == pytest.approx(0.02 * run_.metrics["steps"])


def test_a_worker_that_is_alone_needs_no_household():
    assert launch(workers=1, network=HOUSES_OF_2) == [0]


@pytest.mark.parametrize(
    ("kind", "text", "same"),
    [
        (fs.Strategy, "LocalSGD(8)", fs.LocalSGD(8)),
        (fs.Strategy, "SyncSGD(codec=TopK(0.01))", fs.SyncSGD(codec=fs.TopK(0.01))),
        (fs.Codec, "OneBit", fs.OneBit()),
        (fs.Schedule, "Warmup(1) * StepDecay", fs.Warmup(1) * fs.StepDecay()),
        (fs.Assignment, "MediumCoarse(2)", fs.MediumCoarse(2)),
        (fs.OptimizerSpec, "AdamW(lr=0.1)", fs.OptimizerSpec("adamw", lr=0.1)),
        (fs.Network, "Network(0.1, 1e6)", fs.Network(0.1, 1e6)),
        (fs.Compute, "Compute(0.1)", fs.Compute(0.1)),
    ],
)
def test_the_name_of_a_class_is_understood(kind, text, same):
    assert read(kind, text) == same


def test_no_two_names_are_alike_but_for_their_spelling():
    from flockstep.codecs import CODECS
    from flockstep.data import ASSIGNMENTS
    from flockstep.optimizers import OPTIMIZERS
    from flockstep.schedules import SCHEDULES
    from flockstep.strategies import STRATEGIES

    for table in (STRATEGIES, CODECS, SCHEDULES, ASSIGNMENTS):
        for name, each in table.items():
            assert plain_spelling(each.__name__) == plain_spelling(name)
    for names in (STRATEGIES, CODECS, SCHEDULES, ASSIGNMENTS, OPTIMIZERS):
        assert len({plain_spelling(name) for name in names}) == len(names)


# --- names that do not exist ----------------------------------------------------------------------

NEAREST = {
    "task": (lambda: run("digit-mlp"), "digits-mlp"),
    "strategy": (lambda: run(strategy="lokal_sgd"), "local_sgd"),
    "strategy-class": (lambda: run(strategy="LokalSGD"), "local_sgd"),
    "strategy-field": (lambda: run(strategy="local_sgd(periode=8)"), "period"),
    "codec": (lambda: run(strategy="sync_sgd(codec=top_kk(1))"), "top_k"),
    "schedule": (lambda: run(schedule="cosin"), "cosine"),
    "optimizer": (lambda: run(optimizer="adem"), "adam"),
    "optimizer-field": (lambda: fs.OptimizerSpec("sgd", momentun=0.9), "momentum"),
    "assignment": (lambda: run(assignment="medum_coarse"), "medium_coarse"),
    "network": (lambda: launch(network="wan100m"), "wan-100m"),
    "network-in-a-run": (lambda: run(network="WAN-100m"), "wan-100m"),
    "backend": (lambda: launch(backend="locl"), "local"),
    "data-set": (lambda: fs.dataset("mnst"), "mnist"),
    "field-of-a-run": (lambda: run(sede=3), "seed"),
    "field-of-a-file": (lambda: fs.RunSpec.from_toml("sede = 3"), "seed"),
}


@pytest.mark.parametrize(("call", "meant"), NEAREST.values(), ids=NEAREST)
def test_an_unknown_name_suggests_the_nearest(call, meant):
    with pytest.raises(fs.UnknownName) as unknown:
        call()
    message = str(unknown.value)
    assert f"; did you mean {meant!r}? known: " in message
    assert "\n" not in message


def test_a_name_like_no_other_lists_the_known_ones():
    with pytest.raises(fs.UnknownName, match=r"^unknown backend 'zzz'; known: local, ray, sim, "):
        launch(backend="zzz")


# --- the command line -----------------------------------------------------------------------------

RUN = ["run", "digits-mlp", "local_sgd(8)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", ":good", "sync_sgd"], "'task' must be a name, or package.module:task (got ':g"),
        ([*RUN, "--schedule", ""], "'--schedule' must be a schedule such as cosine"),
        (["run", "digits-mlp", ""], "'strategy' must be a strategy such as sync_sgd"),
        (
            ["run", "digits-mlp", "local_sgd", "--set", "period=4", "--set", "period=8"],
            "'--set period' must not be given twice (got period=4 and period=8)",
        ),
        (
            ["run", "digits-mlp", "LocalSGD", "--set", "periode=4"],
            "unknown field of LocalSGD 'periode'; did you mean 'period'? known: ",
        ),
        ([*RUN, "--network", "wan100m"], "unknown network 'wan100m'; did you mean 'wan-100m'? "),
        ([*RUN, "--batch-size", "5000"], "'batch_size' must be at most the number of samples, "),
        (["data", "fetch", "mnst"], "unknown data set 'mnst'; did you mean 'mnist'? known: "),
        (["list", "strategy"], "unknown list 'strategy'; did you mean 'strategies'? known: "),
        (
            [*RUN, "--backend", "local", "--slow", "1=2"],
            "'--slow' must be left out with a backend other than 'sim' (got '1=2')",
        ),
        ([*RUN, "--keep", "3"], "'--keep' must be left out without --checkpoint (got '3')"),
        (
            ["run", "digits-mlp", "--resume", "runs"],
            "'TASK' must be left out with --resume: the run is what it was (got 'digits-mlp')",
        ),
        (["run", "--resume", "nothing"], "'nothing' holds no whole checkpoint"),
        (["demo", "--processes", "0"], "'--processes' must be at least 1 (got 0)"),
        (["demo", "--workers", "0"], "'--workers' must be at least 1 (got 0)"),
        (["demo", "--epochs", "0"], "'--epochs' must be at least 1 (got 0)"),
    ],
)  # fmt: skip
def test_careless_arguments_are_refused_in_one_line(refused, arguments, message):
    refused(arguments, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "missing argument 'TASK|SPEC.toml' (see flockstep run --help)"),
        (["run", "digits-mlp"], "missing argument 'STRATEGY' (see flockstep run --help)"),
        ([*RUN, "--sede", "3"], "unknown option '--sede'; did you mean '--seed'? (see flockstep"),
        ([*RUN, "--zzzzzz", "3"], "unknown option '--zzzzzz' (see flockstep run --help)"),
        ([*RUN, "more"], "got unexpected extra argument"),
        ([*RUN, "--seed"], "option '--seed' requires an argument"),
        (["demo", "--workers", "x"], "invalid value for '--workers': 'x' is not a valid integer"),
        (["rnu"], "unknown command 'rnu'; did you mean 'run'? known: compare, data, demo, "),
        (["data", "ftech"], "unknown command 'ftech'; did you mean 'fetch'? known: fetch, show"),
        (["--verison"], "unknown option '--verison'; did you mean '--version'? (see flockstep "),
    ],
)  # fmt: skip
def test_a_wrong_use_is_one_line_too(flockstep, arguments, message):
    done = flockstep(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"flockstep: {message}")
    assert len(done.stderr.splitlines()) == 1


def test_no_arguments_show_the_help(flockstep):
    done = flockstep()
    assert done.returncode == 2
    assert "Commands:" in done.stderr
    assert len(done.stderr.splitlines()) > 5
