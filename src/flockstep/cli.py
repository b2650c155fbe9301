"""The command line. Strategies' flags derive from their dataclasses: `--set field=value`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from flockstep import demo as demonstration
from flockstep.data import Assignment, Sampling
from flockstep.data.sampling import ORDERS, SHUFFLES
from flockstep.data_commands import data
from flockstep.errors import FlockstepError, unknown_name
from flockstep.inspection import inspect_task
from flockstep.launch import BACKENDS, make_backend
from flockstep.listing import TABLES, drawn
from flockstep.network import Network
from flockstep.recipes import Schedule
from flockstep.specs import make_spec, read_batch_size, read_settings, read_spec
from flockstep.strategies import Strategy, find_strategy
from flockstep.task import find_task
from flockstep.tasks import TASKS
from flockstep.training import run as train


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="flockstep")
def cli() -> None:
    """Train one PyTorch model on many workers that do not march in lockstep."""


@cli.command()
@click.argument("task")
@click.argument("strategy")
@click.option("--workers", type=int, help="How many workers.  [default: 8; under torchrun as many as it started]")
@click.option("--backend", default="sim", show_default=True, help="Where they run: " + ", ".join(BACKENDS) + ".")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="A field of the strategy; repeatable.")
@click.option("--epochs", type=int, help="Passes of all workers together over the data.  [default: the task's]")
@click.option("--batch-size", help="Samples of one worker's step, or batch_growth(…).  [default: the task's]")
@click.option("--assignment", default="disjoint", show_default=True, help="Which worker sees which samples.")
@click.option("--order", default="reshuffle", show_default=True, help="Of its samples: " + ", ".join(ORDERS) + ".")
@click.option("--shuffle", default="local", show_default=True, help="Who shuffles: " + ", ".join(SHUFFLES) + ".")
@click.option("--schedule", help="Of the learning rate.  [default: the task's]")
@click.option("--network", help="The simulator's links, by preset name.  [default: lan-1g]")
@click.option("--lanes", type=int, help="Simulated workers that compute side by side.  [default: one a core]")
@click.option("--seed", default=0, show_default=True, help="Decides everything random.")
@click.option("--on-failure", default="stop", show_default=True, help="When a worker is lost: stop, or continue.")
@click.option("--out", type=click.Path(path_type=Path), help="Save the result in this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else there.")
def run(
    task: str,
    strategy: str,
    workers: int | None,
    backend: str,
    settings: tuple[str, ...],
    epochs: int | None,
    batch_size: str | None,
    assignment: str,
    order: str,
    shuffle: str,
    schedule: str | None,
    network: str | None,
    lanes: int | None,
    seed: int,
    on_failure: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train TASK with STRATEGY and print what came of it.

    \b
    flockstep run digits-mlp local_sgd --workers 8 --set period=8
    flockstep run digits-mlp easgd --set period=4 --backend local --workers 4 --json
    flockstep run digits-mlp sync_sgd --set "codec=top_k(ratio=0.01)"
    flockstep run digits-cnn sync_sgd --assignment "medium_coarse(copies=2)" --schedule "warmup(1) * cosine"
    flockstep run mypackage.tasks:mine sync_sgd --network wan-100m --seed 3 --out results/mine
    torchrun --nproc-per-node 4 -m flockstep run digits-mlp ea_wild --backend torchrun --on-failure continue
    """
    sys.path.insert(0, "")  # a task of one's own in the current folder, as `python -m` would find it
    result = train(
        task,
        make_strategy(strategy, settings),
        workers,
        backend,
        epochs=epochs,
        batch_size=None if batch_size is None else read_batch_size("--batch-size", batch_size),
        assignment=read_spec("--assignment", assignment, Assignment),
        sampling=None if (order, shuffle) == ("reshuffle", "local") else Sampling(order, shuffle),
        schedule=read_spec("--schedule", schedule, Schedule) if schedule else None,
        network=Network.preset(network) if network else None,
        lanes=lanes,
        seed=seed,
        on_failure=on_failure,
    )
    if not make_backend(backend).is_lead:
        return
    if out:
        result.save(out)
    if as_json:
        figures = {"metrics": result.metrics, "history": result.history, "lost": result.lost}
        click.echo(json.dumps({**result.config, **figures}))
        return
    table = Table("metric", "value", title=f"{task}, {strategy}, {result.config['workers']} workers, {backend}")
    for name, value in result.metrics.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    for lost in result.lost:
        Console().print(f"rank {lost['rank']} was lost after step {lost['step']}, at {lost['seconds']:.1f} s")


@cli.command()
@click.option("--workers", default=8, show_default=True, help="Simulated workers.")
@click.option("--processes", default=2, show_default=True, help="Local processes.")
@click.option("--epochs", default=10, show_default=True, help="Passes over the data.")
@click.option("--seed", default=0, show_default=True, help="Decides everything random.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a run on stdout and nothing else there.")
def demo(workers: int, processes: int, epochs: int, seed: int, as_json: bool) -> None:
    """Train handwritten digits with every strategy, simulated and on local processes, and compare.

    \b
    flockstep demo
    flockstep demo --workers 64 --epochs 5 --json
    """
    demonstration.run(workers, processes, epochs, seed, as_json)


@cli.command()
@click.argument("task")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else there.")
def inspect(task: str, as_json: bool) -> None:
    """Print TASK's parameters, their bytes, its FLOPs and the ratio of computing to communicating.

    \b
    flockstep inspect digits-mlp
    flockstep inspect mypackage.tasks:mine --json
    """
    sys.path.insert(0, "")
    figures = inspect_task(find_task(task, TASKS))
    if as_json:
        click.echo(json.dumps(figures))
        return
    table = Table("what", "figure", title=f"{task}: {figures['model']}")
    table.add_row("parameters", f"{figures['parameters']:,}")
    if figures["trained"] != figures["parameters"]:
        table.add_row("of them trained", f"{figures['trained']:,}")
    table.add_row("bytes", f"{figures['bytes']:,}")
    table.add_row("FLOPs of a sample, forward", f"{figures['flops_per_sample']:,.0f}")
    table.add_row("FLOPs ÷ parameters", f"{figures['cc_ratio']:,.1f}")
    Console().print(table)


@cli.command(name="list")
@click.argument("what", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_names(what: str | None, as_json: bool) -> None:
    """List strategies, codecs, tasks, datasets, assignments, schedules, backends or networks; all by default.

    \b
    flockstep list
    flockstep list tasks
    """
    if what is not None and what not in TABLES:
        raise unknown_name("list", what, TABLES)
    chosen = {name: rows() for name, rows in TABLES.items() if what in (None, name)}
    if as_json:
        click.echo(json.dumps(chosen))
        return
    for name, rows in chosen.items():
        Console().print(drawn(name, rows))


def make_strategy(name: str, settings: Sequence[str]) -> Strategy[Any]:
    """`local_sgd` and `["period=8"]` give `LocalSGD(period=8)`."""
    made: Strategy[Any] = make_spec(find_strategy(name), name, read_settings(settings), "--set {}=…")
    return made


cli.add_command(data)


def main() -> NoReturn:
    """Run the command; what goes wrong on purpose is one line on stderr."""
    try:
        cli.main(standalone_mode=False)
    except FlockstepError as error:
        click.echo(f"flockstep: {error}", err=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("flockstep: interrupted", err=True)
        sys.exit(130)
    sys.exit(0)
