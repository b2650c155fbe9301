"""The main job on embedded data: a small study of a strategy of each kind, simulated and on local
processes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from flockstep.backends import Compute
from flockstep.cli.commands import json_option
from flockstep.fields import require_integer
from flockstep.notation import written
from flockstep.randomness import require_seed
from flockstep.result import as_json
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
from flockstep.study import CellSummary, Outcome, Study, require_report_path, run_study

TASK = "digits-mlp"
NETWORK = "lan-1g"
COMPUTE = Compute(seconds=0.01, jitter=0.3)
REPORT = "flockstep-demo.html"
STRATEGIES: tuple[Strategy[Any], ...] = (
    SyncSGD(),
    LocalSGD(period=8),
    # The published momentum, 0.9, is for hundreds of steps between exchanges: after 8 steps the
    # outer optimizer goes 0.7 / (1 - 0.9) = 7 times as far as the workers have gone.
    DiLoCo(period=8, outer_momentum=0.5),
    NoSync(pull=0.1),
    EASGD(period=4),
    EAWild(period=4),
    AsyncSGD(staleness_aware=True),
    ADPSGD(),
    # Teachers may be old where training is long. Here it takes 120 steps: those of 8 steps ago are
    # so much worse that they hold their pupils back.
    Codistillation(groups=2, exchange_period=1, burn_in=16),
    Independent(),
)


def demo_study(workers: int, processes: int, epochs: int, seeds: tuple[int, ...]) -> Study:
    """A strategy of each kind, on simulated workers and on real ones."""
    places = {
        f"{workers} sim": {
            "backend": "sim",
            "workers": workers,
            "network": NETWORK,
            "compute": written(COMPUTE),
        },
        f"{processes} local": {"backend": "local", "workers": processes},
    }
    return Study(
        "How do strategies of each kind compare on handwritten digits?",
        base={"task": TASK, "epochs": epochs},
        axes={"place": places, "strategy": {written(each): each for each in STRATEGIES}},
        seeds=seeds,
        name="flockstep-demo",
    )


def print_table(outcome: Outcome, epochs: int) -> None:
    study = outcome.study
    table = Table(
        title=f"{TASK}, {epochs} epochs, mean of {len(study.seed_list)} seeds",
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
    for each in outcome.cells:
        place = each.cell.labels["place"]
        if previous not in (None, place):
            table.add_section()
        previous = place
        table.add_row(
            place,
            each.cell.labels["strategy"],
            _accuracy(each),
            _mean(outcome, each.cell, "seconds", "{:.3f}"),
            _mean(outcome, each.cell, "bytes_sent", "{:.2f}", 1e6),
            _mean(outcome, each.cell, "exchanges", "{:.0f}"),
        )
    console = Console()
    console.print(table)
    console.print(
        "Accuracy on the test set in %, ± its deviation over seeds. MB of all workers,\n"
        "exchanges of one. Seconds: wall-clock for local; virtual for sim, where a step\n"
        f"takes {COMPUTE.seconds * 1000:g} ms give or take {COMPUTE.jitter:.0%} "
        f"and the network is {NETWORK}.",
        highlight=False,
    )


def _accuracy(each: CellSummary) -> str:
    """`95.6±0.8`, in per cent."""
    if each.mean is None:
        return "failed"
    mean = f"{100 * each.mean:.1f}"
    if each.sample is None or each.sample.deviation is None:
        return mean
    return f"{mean}±{100 * each.sample.deviation:.1f}"


def _mean(outcome: Outcome, cell: Any, metric: str, form: str, unit: float = 1.0) -> str:
    values = [record.metrics[metric] for record in outcome.records_of(cell)]
    return form.format(sum(values) / len(values) / unit) if values else "–"


@click.command()
@click.option("--workers", default=8, show_default=True, help="Simulated workers.")
@click.option("--processes", default=2, show_default=True, help="Local processes.")
@click.option("--epochs", default=10, show_default=True, help="Passes over the data.")
@click.option("--seeds", default=3, show_default=True, help="Runs of each strategy.")
@click.option("--seed", default=0, show_default=True, help="The first seed.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    default=REPORT,
    show_default=True,
    metavar="FILE",
    help="Where the report goes.",
)
@json_option("per run")
def demo(
    workers: int,
    processes: int,
    epochs: int,
    seeds: int,
    seed: int,
    report: Path,
    for_machines: bool,
) -> None:
    """Train handwritten digits with a strategy of each kind, simulated and for real, and compare.

    \b
    flockstep demo
    flockstep demo --workers 64 --epochs 5 --json
    """
    # Before the first of many runs, and by the names that were typed.
    counts = {"--workers": workers, "--processes": processes, "--epochs": epochs, "--seeds": seeds}
    for flag, value in counts.items():
        require_integer(flag, value, 1)
    require_seed(seed)
    require_report_path(report)
    study = demo_study(workers, processes, epochs, tuple(range(seed, seed + seeds)))
    outcome = run_study(study, report=report)
    if for_machines:
        for _, record in outcome.finished:
            click.echo(as_json({**record.config, "metrics": record.metrics}))
    else:
        print_table(outcome, epochs)
        click.echo(f"What differs, by how much and how sure that is: open {report}")
    if outcome.failures:
        run, record = outcome.failures[0]
        click.echo(
            f"flockstep: {run.label} failed: {(record.error or {}).get('message')}", err=True
        )
        sys.exit(1)
