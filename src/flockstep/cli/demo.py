"""The main job on embedded data: a strategy of each kind, simulated and on local processes, side
by side.
"""

from __future__ import annotations

from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flockstep.backends import Backend, Compute, LocalProcesses, Simulator
from flockstep.cli.commands import json_option
from flockstep.fields import require_integer
from flockstep.network import Network
from flockstep.notation import written
from flockstep.randomness import require_seed
from flockstep.result import Result, as_json
from flockstep.strategies import (
    ADPSGD,
    EASGD,
    AsyncSGD,
    Codistillation,
    DiLoCo,
    EAWild,
    Independent,
    LocalSGD,
    NoSync,
    Strategy,
    SyncSGD,
)
from flockstep.training import run as train

TASK = "digits-mlp"
NETWORK = "lan-1g"
COMPUTE = Compute(seconds=0.01, jitter=0.3)
STRATEGIES: tuple[Strategy[Any], ...] = (
    SyncSGD(),
    LocalSGD(period=8),
    DiLoCo(period=8),
    NoSync(pull=0.1),
    EASGD(period=4),
    EAWild(period=4),
    AsyncSGD(staleness_aware=True),
    ADPSGD(),
    Codistillation(groups=2, exchange_period=8, burn_in=16),
    Independent(),
)


def compare(workers: int, processes: int, epochs: int, seed: int, for_machines: bool) -> None:
    """Train, show progress on stderr, print a table (or a JSON object per run) on stdout."""
    results: list[tuple[str, int, Strategy[Any], Result]] = []
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        LocalProcesses() as local,
    ):
        places: tuple[tuple[str, int, Backend], ...] = (
            ("sim", workers, Simulator(network=Network.preset(NETWORK), compute=COMPUTE)),
            ("local", processes, local),
        )
        bar = progress.add_task("", total=len(places) * len(STRATEGIES))
        for place, count, backend in places:
            for strategy in STRATEGIES:
                progress.update(bar, description=f"{strategy.name} on {count} workers, {place}")
                result = train(
                    TASK, strategy, count, backend, epochs=epochs, seed=seed, progress=False
                )
                results.append((place, count, strategy, result))
                progress.advance(bar)
    if for_machines:
        for place, _, _, result in results:
            click.echo(as_json(result.config | {"backend": place, "metrics": result.metrics}))
        return
    _print(results, epochs)


def _print(results: list[tuple[str, int, Strategy[Any], Result]], epochs: int) -> None:
    table = Table(
        title=f"{TASK}, {epochs} epochs",
        box=box.SIMPLE_HEAD,
        # Close together, so that a strategy with one field keeps to one line of 80 columns.
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("workers", no_wrap=True)
    # A long one takes two lines; figures are never cut.
    table.add_column("strategy", overflow="fold")
    for name in ("accuracy", "seconds", "MB sent", "exchanges"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for place, count, strategy, result in results:
        metrics = result.metrics
        if previous not in (None, place):
            table.add_section()
        previous = place
        table.add_row(
            f"{count} {place}",
            written(strategy),
            f"{metrics['test_accuracy']:.1%}",
            f"{metrics['seconds']:.3f}",
            f"{metrics['bytes_sent'] / 1e6:.2f}",
            f"{metrics['exchanges']:.0f}",
        )
    console = Console()
    console.print(table)
    console.print(
        "Accuracy on the test set. MB of all workers together, exchanges of one.\n"
        "Seconds: wall-clock for local; virtual for sim, where a step takes\n"
        f"{COMPUTE.seconds * 1000:g} ms give or take {COMPUTE.jitter:.0%} "
        f"and the network is {NETWORK}.\n"
        "One seed says little: try --seed before you believe a difference."
    )


@click.command()
@click.option("--workers", default=8, show_default=True, help="Simulated workers.")
@click.option("--processes", default=2, show_default=True, help="Local processes.")
@click.option("--epochs", default=10, show_default=True, help="Passes over the data.")
@click.option("--seed", default=0, show_default=True, help="Decides everything random.")
@json_option("per run")
def demo(workers: int, processes: int, epochs: int, seed: int, for_machines: bool) -> None:
    """Train handwritten digits with a strategy of each kind, simulated and for real, and compare.

    \b
    flockstep demo
    flockstep demo --workers 64 --epochs 5 --json
    """
    # Before the first of many runs, and by the names that were typed.
    for flag, value in (("--workers", workers), ("--processes", processes), ("--epochs", epochs)):
        require_integer(flag, value, 1)
    require_seed(seed)
    compare(workers, processes, epochs, seed, for_machines)
