"""`flockstep run`: train a task with a strategy."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from flockstep.data import ORDERS, SHUFFLES, Assignment, Sampling
from flockstep.launch import BACKENDS, make_backend
from flockstep.network import Network
from flockstep.notation import make_spec, read_batch_size, read_settings, read_spec
from flockstep.schedules import Schedule
from flockstep.strategies import Strategy, find_strategy
from flockstep.training import run as train


@click.command()
@click.argument("task")
@click.argument("strategy")
@click.option(
    "--workers",
    type=int,
    help="How many workers.  [default: 8; under torchrun as many as it started]",
)
@click.option(
    "--backend",
    default="sim",
    show_default=True,
    help="Where they run: " + ", ".join(BACKENDS) + ".",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the strategy; repeatable.",
)
@click.option(
    "--epochs",
    type=int,
    help="Passes of all workers together over the data.  [default: the task's]",
)
@click.option(
    "--batch-size", help="Samples of one worker's step, or batch_growth(…).  [default: the task's]"
)
@click.option(
    "--assignment", default="disjoint", show_default=True, help="Which worker sees which samples."
)
@click.option(
    "--order",
    default="reshuffle",
    show_default=True,
    help="Of its samples: " + ", ".join(ORDERS) + ".",
)
@click.option(
    "--shuffle",
    default="local",
    show_default=True,
    help="Who shuffles: " + ", ".join(SHUFFLES) + ".",
)
@click.option("--schedule", help="Of the learning rate.  [default: the task's]")
@click.option("--network", help="The simulator's links, by preset name.  [default: lan-1g]")
@click.option(
    "--lanes", type=int, help="Simulated workers that compute side by side.  [default: one a core]"
)
@click.option("--seed", default=0, show_default=True, help="Decides everything random.")
@click.option(
    "--on-failure",
    default="stop",
    show_default=True,
    help="When a worker is lost: stop, or continue.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Save the result in this folder.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object on stdout and nothing else there.",
)
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
    flockstep run digits-cnn sync_sgd --assignment "medium_coarse(copies=2)" --schedule cosine
    flockstep run mypackage.tasks:mine sync_sgd --network wan-100m --seed 3 --out results/mine
    torchrun --nproc-per-node 4 -m flockstep run digits-mlp ea_wild --backend torchrun
    """
    # A task of one's own in the current folder, as `python -m` would find it.
    sys.path.insert(0, "")
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
    table = Table(
        "metric",
        "value",
        title=f"{task}, {strategy}, {result.config['workers']} workers, {backend}",
    )
    for name, value in result.metrics.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    for lost in result.lost:
        Console().print(
            f"rank {lost['rank']} was lost after step {lost['step']}, at {lost['seconds']:.1f} s"
        )


def make_strategy(name: str, settings: Sequence[str]) -> Strategy[Any]:
    """`local_sgd` and `["period=8"]` give `LocalSGD(period=8)`."""
    made: Strategy[Any] = make_spec(
        find_strategy(name), name, read_settings(settings), "--set {}=…"
    )
    return made
