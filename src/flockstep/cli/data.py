"""`flockstep data`: fetch data sets, and see who would hold which samples."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from flockstep.cli.commands import CommandGroup, json_option
from flockstep.data import Assignment, Overlap, find_dataset, folders, overlap_of
from flockstep.data import fetch as download
from flockstep.notation import read_settings, read_with_settings
from flockstep.report import draw, sketch

SAMPLES_A_WORKER = 60
MOST_SAMPLES = 20_000


@click.group(cls=CommandGroup)
def data() -> None:
    """Fetch data sets, and see which worker would hold which samples."""


@data.command()
@click.argument("name")
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path),
    help="Where to.  [default: FLOCKSTEP_DATA, or the cache]",
)
@click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    metavar="URL",
    help="Where from, in place of the public ones.",
)
def fetch(name: str, folder: Path | None, mirrors: tuple[str, ...]) -> None:
    """Download data set NAME, verify it and put it in place; what was begun goes on where it
    stopped.

    \b
    flockstep data fetch mnist
    flockstep data fetch cifar10 --to data
    flockstep data fetch mnist --mirror http://localhost:8000/mnist/
    """
    dataset = find_dataset(name)
    if dataset.pictures is not None:
        place = dataset.pictures.find()
        if place is None:
            raise dataset.pictures.missing()
        click.echo(f"{name} is your own and in {place}: there is nothing to fetch")
        return
    if not dataset.files.forms:
        click.echo(f"{name} is embedded: there is nothing to fetch")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        bars = {}

        def watch(file: str, done: int, total: int | None) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file, total=total)
            progress.update(bars[file], completed=done, total=total)

        paths = download(dataset, folder or folders()[0], mirrors=mirrors or None, watch=watch)
    click.echo(f"{name} is verified and in {paths[0].parent}")


@data.command()
@click.argument("scheme")
@click.option("--workers", default=8, show_default=True, help="How many workers.")
@click.option("--samples", type=int, help="How many samples.  [default: 60 a worker]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the scheme; repeatable.",
)
@click.option("--seed", default=0, show_default=True, help="Decides everything random.")
@click.option("--out", type=click.Path(path_type=Path), help="A picture: .png, .svg or .pdf.")
@json_option()
def show(
    scheme: str,
    workers: int,
    samples: int | None,
    settings: tuple[str, ...],
    seed: int,
    out: Path | None,
    for_machines: bool,
) -> None:
    """Show which worker holds which samples under an assignment SCHEME.

    \b
    flockstep data show MediumCoarse --workers 8 --set copies=2
    flockstep data show MediumCoarse --workers 8 --set copies=2 --out scheme.png
    flockstep data show household_shards --workers 16 --set households=4 --set shards=2 --json
    """
    assignment: Assignment = read_with_settings(
        Assignment, scheme, read_settings(settings), "SCHEME"
    )
    if samples is None:
        samples = max(workers, min(SAMPLES_A_WORKER * workers, MOST_SAMPLES))
    overlap = overlap_of(assignment, samples, workers, seed)
    figures = _figures(assignment, overlap)
    title = (
        f"{assignment!r}, {workers:,} workers, {samples:,} samples, "
        f"{figures['copies']:,} copies of each"
    )
    if out:
        draw(overlap, title, out)
    if for_machines:
        click.echo(
            json.dumps(
                {"assignment": repr(assignment), "workers": workers, "samples": samples, **figures}
            )
        )
        return
    console = Console()
    console.print(title)
    console.print(sketch(overlap, console.width))
    console.print(
        f"A worker holds {_between(figures['fewest_a_worker'], figures['most_a_worker'])} samples; "
        f"two have {_between(figures['fewest_a_pair'], figures['most_a_pair'])} in common."
    )
    if out:
        console.print(f"The picture is in {out}")


def _between(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _figures(assignment: Assignment, overlap: Overlap) -> dict[str, int]:
    workers = len(overlap.held)
    sizes, pairs = overlap.common.diagonal(), overlap.pairs
    return {
        "copies": assignment.copies_among(workers),
        "fewest_a_worker": int(sizes.min()),
        "most_a_worker": int(sizes.max()),
        "fewest_a_pair": int(pairs.min()) if len(pairs) else 0,
        "most_a_pair": int(pairs.max(initial=0)),
    }
