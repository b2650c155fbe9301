"""`flockstep compare`: strategies side by side, over several seeds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flockstep.cli.commands import json_option
from flockstep.cli.run import FLAGS, HINTS, TEXTS
from flockstep.cli.study import running_options, show_outcome
from flockstep.errors import InvalidField
from flockstep.notation import read_value
from flockstep.study import Tuning, comparison, require_report_path, run_study

# Fields of a run that all strategies have alike.
SHARED = {name: text for name, text in FLAGS.items() if name not in ("seed", "lanes")}


def _shared_flags(command: Callable[..., None]) -> Callable[..., None]:
    for name, text in reversed(SHARED.items()):
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, metavar=name.upper(), help=text)(command)
    return command


@click.command()
@click.argument("task")
@click.argument("strategies", nargs=-1, metavar="STRATEGY STRATEGY …")
@click.option("--seeds", default=5, show_default=True, help="Runs of each strategy.")
@click.option("--metric", default="test_accuracy", show_default=True, help="What is compared.")
@click.option("--margin", type=float, help="A difference that would not matter, for equivalence.")
@click.option(
    "--tune",
    metavar="RATES",
    help="Give each strategy these learning rates: 0.01,0.03,0.1, or LOW:HIGH:TRIES.",
)
@_shared_flags
@click.option("--test", type=click.Choice(["welch", "paired"]), default="welch", show_default=True)
@running_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Keep the records there, and go on from what is there.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a report: .html, .md, .csv, .png.",
)
@json_option()
def compare(
    task: str,
    strategies: tuple[str, ...],
    seeds: int,
    metric: str,
    margin: float | None,
    tune: str | None,
    test: str,
    jobs: int | None,
    on: str,
    retry_failed: bool,
    out: Path | None,
    report: Path | None,
    for_machines: bool,
    **flags: str | None,
) -> None:
    """Train TASK with each STRATEGY and several seeds, and compare them with the first.

    \b
    flockstep compare digits-mlp sync_sgd 'local_sgd(period=8)' 'nosync(pull=0.1)' --report out.html
    flockstep compare digits-mlp sync_sgd 'diloco(8)' --seeds 10 --network wan-100m --margin 0.005
    flockstep compare digits-cnn sync_sgd ea_wild --tune 0.01,0.03,0.1 --workers 4 --epochs 4
    """
    if "" not in sys.path:  # for a task of one's own in this folder
        sys.path.insert(0, "")
    if report is not None:
        require_report_path(report)
    fields: dict[str, Any] = {}
    for name, text in flags.items():
        if text is not None and name in TEXTS:
            fields[name] = text
        elif text is not None:
            fields[name] = read_value(f"--{name.replace('_', '-')}", text, HINTS[name])
    rates = None if tune is None else read_rates(tune)
    study = comparison(
        task,
        strategies,
        seeds=seeds,
        tune=rates,
        metric=metric,
        margin=margin,
        test=test,
        **fields,
    )
    outcome = run_study(
        study,
        out,
        jobs=jobs,
        on=on,
        retry_failed=retry_failed,
        progress=None if sys.stderr.isatty() else not for_machines,
        report=report,
    )
    show_outcome(outcome, for_machines)
    if not for_machines:
        told = f"The report: {report}" if report else "Add --report FILE.html for figures."
        click.echo(told)
    if outcome.failures:
        sys.exit(1)


def read_rates(text: str) -> Tuning:
    """`0.01,0.03,0.1`, or `0.001:1:6` for six rates drawn between two."""
    try:
        if ":" in text:
            low, high, tries = text.split(":")
            return Tuning({"low": float(low), "high": float(high), "tries": int(tries)})
        return Tuning([float(each) for each in text.split(",")])
    except InvalidField:
        raise
    except ValueError as error:
        rule = "be rates such as 0.01,0.03,0.1, or LOW:HIGH:TRIES"
        raise InvalidField(f"'--tune' must {rule} (got {text!r})") from error
