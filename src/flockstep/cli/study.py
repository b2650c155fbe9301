"""`flockstep study`: run what is missing of a declared study, and say what it has found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flockstep.backends import usable_cores
from flockstep.cli.commands import Command, json_option
from flockstep.errors import InvalidField
from flockstep.fields import require_integer
from flockstep.report import cells_table, planned_table, verdict_lines
from flockstep.result import as_json
from flockstep.study import Outcome, Study, default_folder, planned, run_study

REPORT = "report.html"


def running_options(command: Command) -> Command:
    """How runs are carried out: `--jobs`, `--on`, `--retry-failed`."""
    options = (
        click.option("--jobs", type=int, help="Runs side by side.  [default: one per core]"),
        click.option(
            "--on",
            type=click.Choice(["here", "ray"]),
            default="here",
            show_default=True,
            help="Where: on this machine, or on a Ray cluster (RAY_ADDRESS, or one started here).",
        ),
        click.option("--retry-failed", is_flag=True, help="Try runs again that failed before."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument(
    "files", type=click.Path(path_type=Path), metavar="FILE.toml …", nargs=-1, required=True
)
@click.option("--full", is_flag=True, help="With the settings of [full], the published scale.")
@running_options
@click.option("--seeds", type=int, help="How many seeds, in place of the study's.")
@click.option(
    "--only",
    multiple=True,
    metavar="AXIS=VALUE",
    help="Run the cells of this level alone; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="List the runs and how long they will take.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Keep the records there, of several studies in a folder each.  "
    "[default: results/NAME beside the file]",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Write the report there.  [default: {REPORT} in the folder of the records]",
)
@json_option()
def study(
    files: tuple[Path, ...],
    full: bool,
    jobs: int | None,
    seeds: int | None,
    only: tuple[str, ...],
    dry_run: bool,
    on: str,
    retry_failed: bool,
    out: Path | None,
    report: Path | None,
    for_machines: bool,
) -> None:
    """Run what is missing of the study in each FILE.toml, compare, and write a report.

    Stopped at any moment and started again it goes on where it was.

    \b
    flockstep study studies/period.toml --dry-run
    flockstep study studies/period.toml --seeds 3 --jobs 2
    flockstep study studies/period.toml --only period=8 --only workers=4
    flockstep study studies/period.toml --full --on ray
    flockstep study studies/*.toml --out again
    """
    if "" not in sys.path:  # for a task of one's own in this folder
        sys.path.insert(0, "")
    if report is not None and len(files) > 1:
        raise click.UsageError("--report takes one FILE.toml")
    studies = [_declared(file, full, seeds) for file in files]  # errors of all, before any runs
    levels = read_levels(only)
    if jobs is not None:
        require_integer("--jobs", jobs, 1)
    has_failures = False
    for declared in studies:
        place = out / declared.name if out is not None and len(files) > 1 else out
        folder = place or default_folder(declared)
        if dry_run:
            _list(declared, folder, levels, jobs, for_machines)
            continue
        page = report or (None if folder is None else folder / REPORT)
        outcome = run_study(
            declared,
            folder,
            jobs=jobs,
            on=on,
            only=levels,
            retry_failed=retry_failed,
            progress=None if sys.stderr.isatty() else not for_machines,
            report=page,
        )
        show_outcome(outcome, for_machines)
        if not for_machines and page is not None:
            click.echo(f"The report: {page}")
        has_failures = has_failures or bool(outcome.failures)
    if has_failures:
        sys.exit(1)


def _declared(file: Path, full: bool, seeds: int | None) -> Study:
    declared = Study.from_toml(file)
    if full:
        declared = declared.at_full_scale()
    return declared if seeds is None else declared.with_seeds(seeds)


def read_levels(texts: Sequence[str]) -> dict[str, str] | None:
    """`["period=8"]` gives `{"period": "8"}`."""
    levels: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidField(f"'--only' must be AXIS=VALUE (got {text!r})")
        if name in levels:
            raise InvalidField(f"'--only {name}' must not be given twice (got {text!r})")
        levels[name] = value
    return levels or None


def show_outcome(outcome: Outcome, for_machines: bool) -> None:
    """The table and the verdicts, or one JSON object."""
    if for_machines:
        click.echo(as_json(outcome_as_table(outcome)))
        return
    console = Console()
    console.print(cells_table(outcome))
    for line in verdict_lines(outcome):
        console.print(line, highlight=False, markup=False)


def outcome_as_table(outcome: Outcome) -> dict[str, Any]:
    """What a machine wants to know of a study."""
    return {
        "study": outcome.study.name,
        "question": outcome.study.question,
        "metric": outcome.study.metric,
        "cells": [
            {
                "cell": each.cell.label,
                "levels": dict(each.cell.labels),
                "n": each.n,
                "planned": each.planned,
                "failed": each.failed,
                "mean": each.mean,
                "deviation": None if each.sample is None else each.sample.deviation,
                "interval": each.interval,
                "bootstrap": each.bootstrap,
                "values": each.values,
            }
            for each in outcome.cells
        ],
        "comparisons": [each.row() for each in outcome.comparisons],
        "picks": {
            label: {
                "lr": pick.lr,
                "tries": pick.tries,
                "wall_seconds": pick.wall_seconds,
                "scores": {f"{rate:g}": score for rate, score in pick.scores.items()},
            }
            for label, pick in outcome.picks.items()
        },
        "failures": [
            {"run": run.label, "id": record.id, "error": dict(record.error or {})}
            for run, record in outcome.failures
        ],
    }


def _list(
    declared: Study,
    folder: Path | None,
    only: dict[str, str] | None,
    jobs: int | None,
    for_machines: bool,
) -> None:
    """What would be run, and how long it would take."""
    plan = planned(declared, folder, only)
    side_by_side = jobs or usable_cores()
    if for_machines:
        runs = [
            {"id": run.id, "run": run.label, "done": is_done, "seconds": seconds}
            for run, is_done, seconds in plan.rows
        ]
        click.echo(as_json({"runs": runs, "seconds": plan.seconds(side_by_side)}))
        return
    Console().print(planned_table(plan, side_by_side))
