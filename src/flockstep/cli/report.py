"""`flockstep report` and `flockstep pack`: what is made of the records of a study."""

from __future__ import annotations

from pathlib import Path

import click

from flockstep.report import write_map, write_short_page
from flockstep.study import load_outcome, pack_records

CHOICES = ["html", "md", "csv", "png", "svg", "pdf", "page"]


@click.command()
@click.argument("folders", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--format",
    "form",
    type=click.Choice(CHOICES),
    help="An interactive page, Markdown, a row per run, a picture; or page: a short page.md with "
    "its picture.  [default: html]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write it.  [default: report.html, report.md, … in FOLDER]",
)
@click.option(
    "--map",
    "picture",
    type=click.Path(path_type=Path),
    metavar="FILE.png",
    help="One picture of all FOLDERS in place of reports: which method wins under which condition.",
)
def report(
    folders: tuple[Path, ...], form: str | None, out: Path | None, picture: Path | None
) -> None:
    """Write the report of the study whose records are in each of FOLDERS.

    \b
    flockstep report studies/results/period
    flockstep report studies/results/period --format md --out period.md
    flockstep report studies/results/period --out period.png
    flockstep report studies/results/c4_rates studies/results/c4_workers --format page
    flockstep report studies/results/asynchrony_* --map who-wins.png
    """
    if picture is not None:
        write_map([load_outcome(folder) for folder in folders], picture)
        click.echo(f"The map: {picture}")
        return
    if out is not None and (len(folders) > 1 or form == "page"):
        raise click.UsageError("--out takes one FOLDER, and no --format page")
    for folder in folders:
        click.echo(f"The report: {_written(folder, form, out)}")


def _written(folder: Path, form: str | None, out: Path | None) -> Path:
    outcome = load_outcome(folder)
    if form == "page":
        return write_short_page(outcome, folder)
    path = out or folder / f"report.{form or 'html'}"
    if form is not None and path.suffix != f".{form}":
        raise click.UsageError(f"--out must end in .{form} with --format {form}")
    return outcome.report(path)


@click.command()
@click.argument("folders", type=click.Path(path_type=Path), nargs=-1, required=True)
def pack(folders: tuple[Path, ...]) -> None:
    """Put the records in each of FOLDERS into one compressed file, a tenth of their size.

    Studies go on from it, and reports are made of it, as from single records.

    \b
    flockstep pack studies/results/period
    """
    for folder in folders:
        packed = pack_records(folder)
        click.echo(f"{packed}: {packed.stat().st_size:,} bytes")
