"""`flockstep run`: train a task with a strategy."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flockstep.backends import Compute
from flockstep.cli.commands import json_option
from flockstep.cli.failures import debug_option
from flockstep.cli.show import result_as_json
from flockstep.data import ORDERS, SHUFFLES, Sampling
from flockstep.device import DEVICES
from flockstep.errors import InvalidField, NonFiniteLoss, ResultError, UnknownName, WorkerError
from flockstep.fields import require, shown
from flockstep.launch import BACKENDS, make_backend
from flockstep.network import PRESETS
from flockstep.notation import as_spec, read_settings, read_value, read_with_settings
from flockstep.report import LOGGERS, heading, lost_lines, metrics_table, open_logger
from flockstep.result import Look, Result, has_result, require_result_folder, write_result
from flockstep.spec import (
    LOOK_AT,
    MEASURES,
    RECALIBRATION_SAMPLES,
    RunSpec,
    load_table,
    overridden,
)
from flockstep.strategies import Strategy
from flockstep.training import resume, saved_spec
from flockstep.training import run as train

# Each field of a spec that has a flag of its own name, and what `--help` says of it.
FLAGS = {
    "workers": "How many workers.  [default: 8; under torchrun as many as it started]",
    "backend": f"Where they run: {', '.join(BACKENDS)}.  [default: sim]",
    "epochs": "Passes of all workers together over the data.  [default: the task's]",
    "steps": "In place of --epochs, optimizer steps of each worker.",
    "seconds": "In place of --epochs, seconds of the run's clock.",
    "bytes": "In place of --epochs, bytes that all workers send.",
    "target": "End at the look at which the score reaches this.",
    "batch_size": "Samples of one worker's step, or batch_growth(…).  [default: the task's]",
    "lr": "The learning rate.  [default: the optimizer's]",
    "optimizer": "Such as adam or sgd(momentum=0.9).  [default: the task's]",
    "schedule": "Of the learning rate.  [default: the task's]",
    "weight_decay_schedule": "Of the optimizer's weight decay.  [default: none]",
    "batch_norm_group": "Neighbours in rank that normalise batches together.  [default: none]",
    "assignment": "Which worker sees which samples.  [default: disjoint]",
    "drop_last": "Leave out the last, smaller batch of each pass over the data.",
    "train_samples": "Train on the first so many samples.  [default: on all]",
    "validation": "The share of the training data that looks are scored on.  [default: the task's]",
    "network": "The simulator's links: a preset, latency=20ms,bandwidth=100Mbit/s, or network(…).  "
    "[default: lan-1g]",
    "compute": "The simulator's step times: 20ms, measured, or compute(seconds=0.02, jitter=0.1).  "
    "[default: 10ms]",
    "faults": "The simulator's workers that die or pause: faults(deaths={3: '100 steps'}).",
    "lanes": "Simulated workers that compute side by side.  [default: one per core]",
    "look_every": "How often the model is evaluated: '1 epoch', '50 steps', '0.5 seconds'.",
    "look_at": f"When looks take place: {', '.join(LOOK_AT)}.  [default: due]",
    "measure": f"What is measured besides, of {','.join(MEASURES)}.",
    "recalibrate": "Statistics of batch normalisation anew, on so many training samples; true: "
    f"{RECALIBRATION_SAMPLES}.  [default: false]",
    "seed": "Decides everything random.  [default: 0]",
    "on_failure": "When a worker is lost: stop, or continue.  [default: stop]",
    "device": f"Where models are: {', '.join(DEVICES)}.  [default: cpu]",
}
SAMPLING_FLAGS = {
    "order": f"Of a worker's samples: {', '.join(ORDERS)}.  [default: reshuffle]",
    "shuffle": f"Who shuffles: {', '.join(SHUFFLES)}.  [default: local]",
}
TEXTS = ("look_every", "measure")  # which the spec itself reads from text
HINTS = typing.get_type_hints(RunSpec)


def _spec_flags(command: Callable[..., None]) -> Callable[..., None]:
    """All flags that say a part of the spec. Their texts are read as the fields' types say."""
    for name, text in reversed((FLAGS | SAMPLING_FLAGS).items()):
        flag = name.replace("_", "-")
        if HINTS.get(name) is bool:
            option = click.option(f"--{flag}/--no-{flag}", default=None, help=text)
        else:
            option = click.option(f"--{flag}", metavar=name.upper(), help=text)
        command = option(command)
    return command


@click.command()
@debug_option
@click.argument("task", required=False, metavar="TASK|SPEC.toml")
@click.argument("strategy", required=False)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the strategy; repeatable.",
)
@_spec_flags
@click.option(
    "--slow",
    "slow",
    multiple=True,
    metavar="RANK=FACTOR",
    help="A rank whose steps take so many times as long in the simulator; repeatable.",
)
@click.option(
    "--patience",
    metavar="SECONDS",
    help="A worker whose process does not run at all for so long is lost; none: wait for ever.  "
    "[default: 300]",
)
@click.option("--print-spec", is_flag=True, help="Print the run as TOML in place of running it.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a trace of the run there.")
@click.option(
    "--log",
    multiple=True,
    metavar="LOGGER:FOLDER",
    help=f"Write every look there as it is taken, by {', '.join(LOGGERS)}; repeatable.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Keep the run in this folder as it goes, so that it can be resumed.",
)
@click.option(
    "--every",
    metavar="INTERVAL",
    help="How often: '5 min' of the wall's clock, '1000 steps', '1 epoch'.  [default: 5 min]",
)
@click.option(
    "--keep", metavar="COUNT", help="How many of the last checkpoints stay.  [default: 2]"
)
@click.option(
    "--resume",
    "resumed",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Go on with the run that was kept in this folder.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Save the result in this folder.")
@json_option()
def run(
    task: str | None,
    strategy: str | None,
    settings: tuple[str, ...],
    slow: tuple[str, ...],
    patience: str | None,
    print_spec: bool,
    trace: Path | None,
    log: tuple[str, ...],
    checkpoint: Path | None,
    every: str | None,
    keep: str | None,
    resumed: Path | None,
    out: Path | None,
    for_machines: bool,
    **flags: str | bool | None,
) -> None:
    """Train TASK with STRATEGY, or what SPEC.toml says, and print what came of it.

    \b
    flockstep run digits-mlp local_sgd --workers 8 --set period=8
    flockstep run digits-mlp 'easgd(period=4)' --backend local --workers 4 --json
    flockstep run digits-mlp sync_sgd --set 'codec=top_k(ratio=0.01)' --lr 0.1
    flockstep run digits-cnn sync_sgd --assignment 'coarse(4)' --schedule 'warmup(1) * cosine'
    flockstep run mypackage.tasks:mine sync_sgd --network wan-100m --seed 3 --out results/mine
    flockstep run digits-mlp ea_wild --network latency=20ms,bandwidth=100Mbit/s --slow 3=2.0
    flockstep run digits-mlp 'easgd(4)' --look-every '10 steps' --log tensorboard:runs/easgd
    flockstep run digits-mlp 'nosync(0.1)' --print-spec > spec.toml
    flockstep run spec.toml --seed 1 --checkpoint runs/mine --every '1 epoch'
    flockstep run --resume runs/mine --out results/mine
    torchrun --nproc-per-node 4 -m flockstep run digits-mlp ea_wild --backend torchrun
    """
    if "" not in sys.path:  # for a task of one's own in this folder, as `python -m` would find it
        sys.path.insert(0, "")
    given = {name: str(value) for name, value in flags.items() if value is not None}
    if resumed is not None:
        _require_alone(task, strategy, settings, slow, checkpoint, every, keep, given)
        spec = saved_spec(resumed)
    elif task is None:
        raise click.UsageError("Missing argument 'TASK|SPEC.toml'.")
    else:
        spec = with_slow_ranks(make_run_spec(task, strategy, settings, given), slow)
    how = _checkpoints(checkpoint, every, keep)
    if print_spec:
        click.echo(spec.to_json() if for_machines else spec.to_toml(), nl=for_machines)
        return

    place = None
    if patience is not None:
        place = make_backend(spec.backend, read_value("--patience", patience, float | None))
    is_lead = (place or make_backend(spec.backend)).is_lead
    if out and is_lead:
        _prepare_folder(out)
    try:
        with logged(log if is_lead else (), spec) as on_look:
            if resumed is None:
                result = train(spec, backend=place, trace=trace, on_look=on_look, **how)
            else:
                workers = read_value("--workers", given["workers"], int) if given else None
                result = resume(resumed, workers, backend=place, trace=trace, on_look=on_look)
    except (InvalidField, UnknownName) as error:  # what shows only where it meets the data
        if task is None or not _is_file(task) or isinstance(error, WorkerError):
            raise
        raise type(error)(f"{task}: {error}") from error
    if not is_lead:
        return
    saved = _kept(result, out) if out else None
    if for_machines:
        click.echo(result_as_json(result))
    else:
        _show(result)
        _say_what_next(spec, saved)
    if out and saved != out:
        raise ResultError(f"{str(out)!r} took no result: it is in {str(saved)!r}")
    _require_finite(result)


def _require_alone(
    task: str | None,
    strategy: str | None,
    settings: Sequence[str],
    slow: Sequence[str],
    checkpoint: Path | None,
    every: str | None,
    keep: str | None,
    flags: Mapping[str, str],
) -> None:
    """A run that goes on is what it was, but for the number of its workers."""
    said = {
        "TASK": task,
        "STRATEGY": strategy,
        "--set": settings,
        "--slow": slow,
        "--checkpoint": checkpoint,
        "--every": every,
        "--keep": keep,
        **{f"--{name.replace('_', '-')}": text for name, text in flags.items()},
    }
    for name, value in said.items():
        rule = "be left out with --resume: the run is what it was"
        require(name == "--workers" or not value, name, rule, value)


def _checkpoints(folder: Path | None, every: str | None, keep: str | None) -> dict[str, Any]:
    """What `train` is told of checkpoints."""
    if folder is None:
        for name, value in (("--every", every), ("--keep", keep)):
            require(value is None, name, "be left out without --checkpoint", value)
        return {}
    how: dict[str, Any] = {"checkpoint": folder}
    if every is not None:
        how["every"] = every
    if keep is not None:
        how["keep"] = read_value("--keep", keep, int)
    return how


@contextmanager
def logged(loggers: Sequence[str], spec: RunSpec) -> Iterator[Callable[[Look], None] | None]:
    """What writes looks down in all these ways; None: nobody wants it."""
    config = json.loads(spec.to_json()) if loggers else None
    with ExitStack() as stack:
        opened = [stack.enter_context(open_logger(each, config)) for each in loggers]

        def on_look(look: Look) -> None:
            for logger in opened:
                logger(look)

        yield on_look if opened else None


def _require_finite(result: Result) -> None:
    """What a run has come to is shown and kept, whatever it is; who goes by the exit code must
    hear of it.
    """
    names = {"test_loss": "loss", "test_accuracy": result.config["metric_name"]}
    for key, name in names.items():
        value = result.metrics.get(key)
        if isinstance(value, float) and not math.isfinite(value):
            steps = result.metrics["steps"]
            raise NonFiniteLoss(
                f"'test_{name}' of the trained model is {value} after {steps} steps"
            )


def make_run_spec(
    task: str, strategy: str | None, settings: Sequence[str], flags: Mapping[str, str]
) -> RunSpec:
    """The spec that the arguments say: all of it, or what differs from a file."""
    before = load_table(task) if _is_file(task) else {"task": task}
    changes: dict[str, Any] = {}
    for name in FLAGS:
        if name in TEXTS and name in flags:
            changes[name] = flags[name]
        elif name in flags:
            changes[name] = read_value(f"--{name.replace('_', '-')}", flags[name], HINTS[name])

    chosen = before.get("strategy") if strategy is None else strategy
    if chosen is None:
        raise click.UsageError("Missing argument 'STRATEGY'.")
    if strategy is not None or settings:  # else that of the file stands
        changes["strategy"] = make_strategy(chosen, settings)

    sampling = {name: flags[name] for name in SAMPLING_FLAGS if name in flags}
    if sampling:
        base = as_spec("sampling", before.get("sampling", Sampling()), Sampling)
        changes["sampling"] = replace(base, **sampling)
    return RunSpec(**overridden(before, changes))


def _is_file(task: str) -> bool:
    return task.endswith((".toml", ".json"))


def make_strategy(text: str, settings: Sequence[str]) -> Strategy[Any]:
    """`local_sgd` and `["period=8"]` give `LocalSGD(period=8)`, and so does `local_sgd(8)`."""
    made: Strategy[Any] = read_with_settings(Strategy, text, read_settings(settings), "strategy")
    return made


def with_slow_ranks(spec: RunSpec, slow: Sequence[str]) -> RunSpec:
    """The same run, but for ranks that take longer over a step: `3=2.0` is twice as long."""
    factors: dict[int, float] = {}
    if slow:
        rule = "be left out with a backend other than 'sim'"
        require(spec.backend == "sim", "--slow", rule, slow[0])
    for text in slow:
        rank, _, factor = text.partition("=")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            rule = "be RANK=FACTOR such as 3=2.0"
            raise InvalidField(f"'--slow' must {rule} (got {shown(text)})") from None
        if number in factors:
            raise InvalidField(f"'--slow' must not name a rank twice (got {shown(text)})")
        factors[number] = times
    if not factors:
        return spec
    compute = spec.compute or Compute()
    if compute.is_measured:
        rule = "be left out where step times are measured"
        raise InvalidField(f"'--slow' must {rule} (got {shown(slow[0])})")
    return spec.replace(compute=replace(compute, slow={**compute.slow, **factors}))


def _prepare_folder(out: Path) -> None:
    """Before the run, whose result would be lost: refuse a folder that takes no files, and say
    what will be overwritten.
    """
    require_result_folder(out)
    if has_result(out):
        click.echo(f"flockstep: the earlier result in {out} will be overwritten", err=True)


def _kept(result: Result, out: Path) -> Path:
    """Where the result was saved: in `out`, or, where that has become a folder that takes no
    files, in a new one here or among the temporary ones.
    """
    try:
        write_result(result, out)
        return out
    except ResultError as error:
        failures = [str(error)]
    for place in (Path.cwd(), Path(tempfile.gettempdir())):
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{out.resolve().name}-", dir=place))
            write_result(result, folder)
            return folder
        except (ResultError, OSError) as error:
            failures.append(str(error))
    raise ResultError("; ".join(failures))


def _show(result: Result) -> None:
    """What was run and what came of it, for a terminal."""
    console = Console()
    console.print(heading(result.config))
    console.print(metrics_table(result.config, result.metrics))
    for line in lost_lines(result):
        console.print(line)


def _say_what_next(spec: RunSpec, saved: Path | None) -> None:
    """Where the result is, and a command or two that go on from here."""
    if saved:
        click.echo(f"Saved in {saved}. Its history: flockstep show {saved}")
    else:
        click.echo("Add --out FOLDER to keep the result; flockstep show FOLDER draws its history.")

    other = "sync_sgd" if spec.strategy.name != "sync_sgd" else "'local_sgd(8)'"
    if spec.backend == "sim" and spec.network != PRESETS["wan-100m"]:
        click.echo(f"To compare: {other} in place of the strategy, or --network wan-100m.")
    else:
        click.echo(f"To compare: {other} in place of the strategy, or another --seed.")
