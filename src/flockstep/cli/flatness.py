"""`flockstep flatness`: what noise on the parameters does to trained models."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flockstep.cli.commands import json_option
from flockstep.errors import InvalidField
from flockstep.report import draw_flatness, require_picture_path
from flockstep.result import Result, as_json, load_result, shown_score, strategy_text
from flockstep.tasks import TASKS, Task, find_task
from flockstep.training import NOISES, SCALES, AtScale, Flatness
from flockstep.training import flatness as measure
from flockstep.units import shown_number


@click.command()
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    metavar="RESULT [RESULT …]",
)
@click.option(
    "--scales",
    default=",".join(f"{scale:g}" for scale in SCALES),
    show_default=True,
    help="How much noise.",
)
@click.option("--draws", default=5, show_default=True, help="Of noise, for each scale.")
@click.option(
    "--noise",
    type=click.Choice(NOISES),
    default=NOISES[0],
    show_default=True,
    help="In units of the root mean square of each tensor, or as it is.",
)
@click.option(
    "--data",
    type=click.Choice(["test", "validation", "train"]),
    default="test",
    show_default=True,
    help="What models are scored on.",
)
@click.option("--seed", default=0, show_default=True, help="Decides what is drawn.")
@click.option(
    "--out",
    "picture",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw it as a picture: .png, .svg or .pdf.",
)
@json_option("per RESULT, a line each,")
def flatness(
    folders: tuple[Path, ...],
    scales: str,
    draws: int,
    noise: str,
    data: str,
    seed: int,
    picture: Path | None,
    for_machines: bool,
) -> None:
    """Add noise to the parameters of the models in saved RESULTs, and show what they score then: a
    broad optimum loses little.

    \b
    flockstep run digits-mlp 'nosync(0.1)' --out results/nosync
    flockstep run digits-mlp sync_sgd --out results/sync
    flockstep flatness results/nosync results/sync --out flatness.png
    flockstep flatness results/sync --scales 0,0.1,0.5 --draws 20 --noise absolute --json
    """
    if "" not in sys.path:  # for a task of one's own in this folder
        sys.path.insert(0, "")
    if picture is not None:
        require_picture_path(picture, "--out")
    results = [load_result(folder) for folder in folders]
    chosen = read_scales(scales)
    found: list[Flatness] = []
    for folder, result in zip(folders, results, strict=True):
        one = measure(result.model, task_of(result), chosen, draws, noise, data, seed)
        found.append(one)
        if for_machines:
            click.echo(as_json(_told(folder, result, one)))
    if picture is not None:
        draw_flatness([*zip(map(str, folders), found, strict=True)], picture)
    if for_machines:
        return
    _show(folders, results, found)
    if picture is not None:
        click.echo(f"The picture is in {picture}")


def read_scales(text: str) -> list[float]:
    """`0,0.01,0.1`."""
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        rule = "be numbers such as 0,0.01,0.1"
        raise InvalidField(f"'--scales' must {rule} (got {text!r})") from None


def task_of(result: Result) -> Task:
    """With the validation data that the run has held out, if it has."""
    if result.spec is not None:
        return result.spec.find_task()
    return find_task(result.config["task"], TASKS)


def _told(folder: Path, result: Result, found: Flatness) -> dict[str, Any]:
    return {
        "result": str(folder),
        "task": result.config["task"],
        "strategy": strategy_text(result.config),
        "metric_name": found.metric_name,
        "noise": found.noise,
        "data": found.data,
        "seed": found.seed,
        "scales": [asdict(each) for each in found.by_scale],
        "draws": [asdict(each) for each in found.draws],
    }


def _show(folders: tuple[Path, ...], results: list[Result], found: list[Flatness]) -> None:
    """All results side by side, a row for each scale."""
    for folder, result in zip(folders, results, strict=True):
        config = result.config
        about = f"{config['task']}, {strategy_text(config)}, {config['workers']} workers"
        click.echo(f"{folder}: {about}")
    first = found[0]
    unit = (
        "root mean squares of each tensor" if first.noise == "relative" else "the parameters' own"
    )
    click.echo(f"{first.noise} noise, in units of {unit}, on the {first.data} data")

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("scale", justify="right", no_wrap=True)
    for folder, each in zip(folders, found, strict=True):
        name = folder.name or str(folder)
        table.add_column(Text(f"{name}\n{each.metric_name}"), justify="right", no_wrap=True)
        table.add_column(Text(f"{name}\nloss"), justify="right", no_wrap=True)
    for rows in zip(*(each.by_scale for each in found), strict=True):
        cells = [
            cell
            for row, each in zip(rows, found, strict=True)
            for cell in _cells(row, each.metric_name)
        ]
        table.add_row(shown_number(rows[0].scale), *map(Text, cells))
    Console().print(table)


def _cells(row: AtScale, name: str) -> tuple[str, str]:
    """Score and loss, with their deviations over the draws."""

    def shown(metric: str, mean: float, deviation: float | None) -> str:
        told = shown_score(metric, mean)
        if deviation is None:
            return told
        return f"{told} ± {100 * deviation if metric == 'accuracy' else deviation:.2g}"

    return (
        shown(name, row.accuracy, row.accuracy_deviation),
        shown("loss", row.loss, row.loss_deviation),
    )
