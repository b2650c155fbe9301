"""`flockstep show`: what a saved result says."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from flockstep.cli.commands import json_option
from flockstep.report import (
    AXES,
    draw_history,
    heading,
    how_trained,
    lost_lines,
    metrics_table,
    sketch_history,
)
from flockstep.result import Result, as_json, load_figures


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--by",
    type=click.Choice([*AXES]),
    default="seconds",
    show_default=True,
    help="What its history is drawn by.",
)
@click.option(
    "--plot",
    "--png",
    "picture",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw its history as a picture: .png, .svg or .pdf.",
)
@json_option()
def show(folder: Path, by: str, picture: Path | None, for_machines: bool) -> None:
    """Show the result that `flockstep run --out FOLDER` or `result.save(FOLDER)` has left.

    \b
    flockstep show results/mine
    flockstep show results/mine --by bytes --plot mine.png
    """
    result = load_figures(folder)
    if picture:
        draw_history(result, by, picture)
    if for_machines:
        click.echo(result_as_json(result))
        return
    console = Console()
    console.print(heading(result.config))
    console.print(how_trained(result.config))
    console.print(metrics_table(result.config, result.metrics))
    for line in lost_lines(result):
        console.print(line)
    console.print(sketch_history(result, by, console.width))
    if picture:
        click.echo(f"The picture is in {picture}")


def result_as_json(result: Result) -> str:
    """Config, metrics, history and who was lost, as one object."""
    figures = {"metrics": result.metrics, "history": result.history, "lost": result.lost}
    return as_json(result.config | figures)
