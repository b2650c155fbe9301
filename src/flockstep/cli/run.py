"""`flockstep run`: train a task with a strategy."""

from __future__ import annotations

import math
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from flockstep.data import ORDERS, SHUFFLES, Sampling
from flockstep.device import DEVICES
from flockstep.errors import InvalidField, NonFiniteLoss, UnknownName, WorkerError
from flockstep.launch import BACKENDS, make_backend
from flockstep.notation import as_spec, read_settings, read_value, read_with_settings, written
from flockstep.result import Result, as_json, require_result_folder
from flockstep.spec import MEASURES, RunSpec, load_table, overridden
from flockstep.strategies import Strategy
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
    "assignment": "Which worker sees which samples.  [default: disjoint]",
    "network": "The simulator's links, by preset or network(…).  [default: lan-1g]",
    "compute": "The simulator's step times, such as compute(seconds=0.02, jitter=0.1).",
    "lanes": "Simulated workers that compute side by side.  [default: one per core]",
    "look_every": "How often the model is evaluated: '1 epoch', '50 steps', '0.5 seconds'.",
    "measure": f"What looks show besides, of {','.join(MEASURES)}.",
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
    for name, shown in reversed((FLAGS | SAMPLING_FLAGS).items()):
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, metavar=name.upper(), help=shown)(command)
    return command


@click.command()
@click.argument("task", metavar="TASK|SPEC.toml")
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
    "--patience",
    metavar="SECONDS",
    help="A worker whose process does not run at all for so long is lost; none: wait for ever.  "
    "[default: 300]",
)
@click.option("--print-spec", is_flag=True, help="Print the run as TOML in place of running it.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a trace of the run there.")
@click.option("--out", type=click.Path(path_type=Path), help="Save the result in this folder.")
@click.option(
    "--json",
    "for_machines",
    is_flag=True,
    help="Print one JSON object on stdout and nothing else there.",
)
def run(
    task: str,
    strategy: str | None,
    settings: tuple[str, ...],
    patience: str | None,
    print_spec: bool,
    trace: Path | None,
    out: Path | None,
    for_machines: bool,
    **flags: str | None,
) -> None:
    """Train TASK with STRATEGY, or what SPEC.toml says, and print what came of it.

    \b
    flockstep run digits-mlp local_sgd --workers 8 --set period=8
    flockstep run digits-mlp 'easgd(period=4)' --backend local --workers 4 --json
    flockstep run digits-mlp sync_sgd --set 'codec=top_k(ratio=0.01)' --lr 0.1
    flockstep run digits-cnn sync_sgd --assignment 'coarse(4)' --schedule 'warmup(1) * cosine'
    flockstep run mypackage.tasks:mine sync_sgd --network wan-100m --seed 3 --out results/mine
    flockstep run digits-mlp 'nosync(0.1)' --print-spec > spec.toml
    flockstep run spec.toml --seed 1
    torchrun --nproc-per-node 4 -m flockstep run digits-mlp ea_wild --backend torchrun
    """
    if "" not in sys.path:  # for a task of one's own in this folder, as `python -m` would find it
        sys.path.insert(0, "")
    given = {name: text for name, text in flags.items() if text is not None}
    spec = make_run_spec(task, strategy, settings, given)
    if print_spec:
        click.echo(spec.to_json() if for_machines else spec.to_toml(), nl=for_machines)
        return

    place = None
    if patience is not None:
        place = make_backend(spec.backend, read_value("--patience", patience, float | None))
    is_lead = (place or make_backend(spec.backend)).is_lead
    if out and is_lead:
        require_result_folder(out)  # before the run, whose result would be lost
    try:
        result = train(spec, backend=place, trace=trace)
    except (InvalidField, UnknownName) as error:  # what shows only where it meets the data
        if not _is_file(task) or isinstance(error, WorkerError):
            raise
        raise type(error)(f"{task}: {error}") from error
    if not is_lead:
        return
    if out:
        result.save(out)
    if for_machines:
        figures = {"metrics": result.metrics, "history": result.history, "lost": result.lost}
        click.echo(as_json(result.config | figures))
    else:
        _show(spec, result)
    _require_finite(result)


def _require_finite(result: Result) -> None:
    """What a run has come to is shown and kept, whatever it is; who goes by the exit code must
    hear of it.
    """
    for name in ("test_loss", "test_accuracy"):
        value = result.metrics.get(name)
        if isinstance(value, float) and not math.isfinite(value):
            steps = result.metrics["steps"]
            raise NonFiniteLoss(f"'{name}' of the trained model is {value} after {steps} steps")


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

    chosen = strategy or before.get("strategy")
    if chosen is None:
        raise click.UsageError("Missing argument 'STRATEGY'.")
    if strategy or settings:  # else that of the file stands
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


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def _show(spec: RunSpec, result: Result) -> None:
    """The metrics as a table for a terminal."""
    place = f"{result.metrics['workers']} workers, {spec.backend}"
    table = Table("metric", "value", title=f"{spec.task}, {written(spec.strategy)}, {place}")
    for name, value in result.metrics.items():
        table.add_row(name, _shown(value))
    Console().print(table)
    for lost in result.lost:
        Console().print(
            f"rank {lost['rank']} was lost after step {lost['step']}, at {lost['seconds']:.1f} s"
        )
