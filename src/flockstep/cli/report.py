"""`flockstep report`: the report of a study from the folder of its records."""

from __future__ import annotations

from pathlib import Path

import click

from flockstep.study import load_outcome

CHOICES = ["html", "md", "csv", "png", "svg", "pdf"]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(CHOICES),
    help="An interactive page, Markdown, a row per run, or a picture.  [default: html]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write it.  [default: report.html, report.md, … in FOLDER]",
)
def report(folder: Path, form: str | None, out: Path | None) -> None:
    """Write the report of the study whose records are in FOLDER.

    \b
    flockstep report studies/results/period
    flockstep report studies/results/period --format md --out period.md
    flockstep report studies/results/period --out period.png
    """
    outcome = load_outcome(folder)
    path = out or folder / f"report.{form or 'html'}"
    if form is not None and path.suffix != f".{form}":
        raise click.UsageError(f"--out must end in .{form} with --format {form}")
    written = outcome.report(path)
    click.echo(f"The report: {written}")
