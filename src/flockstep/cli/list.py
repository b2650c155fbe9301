"""Tables of all that has a name on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import track
from rich.table import Table
from rich.text import Text

from flockstep.cli.commands import json_option
from flockstep.cli.inspect import summary
from flockstep.codecs import CODECS
from flockstep.data import ASSIGNMENTS, DATASETS
from flockstep.errors import FlockstepError
from flockstep.fields import require_name
from flockstep.launch import BACKENDS
from flockstep.network import PRESETS
from flockstep.notation import written
from flockstep.optimizers import NEEDED, OPTIMIZERS, fields_of
from flockstep.schedules import SCHEDULES
from flockstep.strategies import STRATEGIES
from flockstep.study import DECLARATION, Study, default_folder, load_outcome
from flockstep.tasks import TASKS
from flockstep.units import shown_seconds, shown_speed

# What stands beside each name: a text, or a value for each of several columns.
Rows = dict[str, Any]


def _specs(table: dict[str, Any]) -> Callable[[], Rows]:
    return lambda: {usage(each): first_paragraph(each) for each in table.values()}


TABLES: dict[str, Callable[[], Rows]] = {
    "strategies": _specs(STRATEGIES),
    "codecs": _specs(CODECS),
    "tasks": lambda: {task.name: summary(task) for task in TASKS.values()},
    "datasets": lambda: {
        each.name: {
            "download": each.nbytes,
            "there": each.is_there(),
            "what": first_paragraph(each.load),
        }
        for each in DATASETS.values()
    },
    "assignments": _specs(ASSIGNMENTS),
    "schedules": _specs(SCHEDULES),
    "optimizers": lambda: {
        optimizer_usage(name): first_paragraph(each) for name, each in OPTIMIZERS.items()
    },
    "backends": lambda: {name: first_paragraph(each) for name, each in BACKENDS.items()},
    "networks": lambda: {
        name: {
            "bandwidth": shown_speed(link.bytes_per_second),
            "latency": shown_seconds(link.latency_seconds),
            "besides": "; ".join(link.besides()),
        }
        for name, link in PRESETS.items()
    },
    "studies": lambda: {path.stem: _study(path) for path in _with_a_bar(_declared())},
}
MOST_STUDIES = 12  # whose names are told in the overview
# What else can be said in place of a name.
ALSO = {
    "networks": "Or one of your own: --network latency=20ms,bandwidth=100Mbit/s,loss=0.01",
    "studies": "Those in the folder 'studies' here. To run one: flockstep study studies/NAME.toml",
}


def _declared() -> list[Path]:
    return sorted(Path("studies").glob("*.toml"))


def _with_a_bar(paths: Sequence[Path]) -> Iterable[Path]:
    """Verdicts are worked out from the records, some of which take a second or two."""
    console = Console(stderr=True)
    shown = console.is_terminal
    return track(paths, "Reading studies", console=console, transient=True, disable=not shown)


def _study(path: Path) -> Rows:
    """A declared study, and what its records say, as far as there are some."""
    try:
        study = Study.from_toml(path)
    except FlockstepError as error:  # the others are to be listed all the same
        return {"question": str(error), "published": "", "verdict": "–", "n": 0, "date": ""}
    sources = [each.source for each in study.claims] + [each.source for each in study.printed]
    told = study.published_claim or "; ".join(dict.fromkeys(filter(None, sources)))
    folder = default_folder(study)
    row: Rows = {"question": study.question, "published": told}
    if folder is None or not (folder / DECLARATION).exists():
        return row | {"verdict": "not run", "n": 0, "date": ""}
    outcome = load_outcome(folder)
    dates = [record.started[:10] for _, record in outcome.finished]
    return row | {
        "verdict": outcome.verdict,
        "n": min((len(each.values) for each in outcome.cells), default=0),
        "date": max(dates, default=""),
    }


def drawn(title: str, rows: Rows) -> Table:
    """A table for a terminal."""
    first = next(iter(rows.values()), "")
    columns = first if isinstance(first, dict) else {"what it is": first}
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("name", no_wrap=len(columns) > 1, overflow="fold")
    for column, value in columns.items():
        table.add_column(column, justify="right" if type(value) is int else "left", overflow="fold")
    for name, row in rows.items():
        table.add_row(name, *map(_shown, row.values() if isinstance(row, dict) else [row]))
    return table


def in_paragraphs(studies: Rows) -> Table:
    """Studies, a paragraph each: their questions and claims are too long for columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column("study", overflow="fold")

    for name, row in studies.items():
        made = f" n = {row['n']}, {row['date']}" if row["date"] else ""
        table.add_row(Text.assemble((name, "bold"), f": {row['question']}"))
        if row["published"]:
            table.add_row(Padding(Text(f"Published: {row['published']}"), (0, 0, 0, 4)))
        table.add_row(Padding(Text(f"Verdict: {row['verdict']}{made}"), (0, 0, 1, 4)))
    return table


def overview(tables: dict[str, Rows]) -> Table:
    """The names alone, so that all of them fit a screen."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_header=False,
        show_edge=False,
    )
    table.add_column("list", style="bold", no_wrap=True)
    table.add_column("names", overflow="fold")
    for name, rows in tables.items():
        names = in_families([usage.split()[0] for usage in rows])
        if name == "studies" and len(rows) > MOST_STUDIES:
            names = f"{len(rows)} of them: flockstep list studies"
        table.add_row(name, names)
    return table


def in_families(names: Sequence[str]) -> str:
    """`lstm (-256), full (-1k, -2k)`: of names that go on where another ends only their ends."""
    shown = []
    for name in names:
        longer = [each for each in names if each.startswith(f"{name}-")]
        ends = ", ".join(each.removeprefix(name) for each in longer)
        if not any(name.startswith(f"{each}-") for each in names):
            shown.append(f"{name} ({ends})" if longer else name)
    return ", ".join(shown)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def usage(spec: Any) -> str:
    """`local_sgd period momentum=keep`."""
    fields = dataclasses.fields(spec)
    return _usage(spec.name, {field.name: field.default for field in fields}, dataclasses.MISSING)


def optimizer_usage(name: str) -> str:
    """`lars lr momentum=0.9 …`."""
    return _usage(name, {key: field.default for key, field in fields_of(name).items()}, NEEDED)


def _usage(name: str, defaults: dict[str, Any], needed: object) -> str:
    parts = [
        field if default is needed else f"{field}={written(default).replace(' ', '')}"
        for field, default in defaults.items()
    ]
    return " ".join([name, *parts])


def first_paragraph(documented: Any) -> str:
    """The first paragraph of the docstring, in one line."""
    return " ".join((documented.__doc__ or "").strip().split("\n\n")[0].split())


@click.command(name="list")
@click.argument("what", required=False)
@json_option()
def list_names(what: str | None, for_machines: bool) -> None:
    """List strategies, codecs, tasks, datasets, assignments, schedules, optimizers, backends,
    networks or studies, with their fields and what each is; the names of all by default.

    \b
    flockstep list
    flockstep list tasks
    """
    if what is not None:
        require_name("list", what, TABLES)
    chosen = {name: rows() for name, rows in TABLES.items() if name == what}
    if what is None:  # of studies no more than their names: records may be many
        rest = {name: rows() for name, rows in TABLES.items() if name != "studies"}
        chosen = {**rest, "studies": {path.stem: "" for path in _declared()}}
    if for_machines:
        click.echo(json.dumps(chosen))
        return
    console = Console()
    if what is None:
        console.print(overview(chosen))
        console.print("One of them with fields and what each is: flockstep list strategies, …")
        return
    console.print(in_paragraphs(chosen[what]) if what == "studies" else drawn(what, chosen[what]))
    if what in ALSO:
        console.print(ALSO[what])
