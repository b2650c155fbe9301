"""Tables of all that has a name on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from flockstep.cli.inspect import summary
from flockstep.codecs import CODECS
from flockstep.data import ASSIGNMENTS, DATASETS
from flockstep.errors import unknown_name
from flockstep.launch import BACKENDS
from flockstep.network import PRESETS
from flockstep.schedules import SCHEDULES
from flockstep.strategies import STRATEGIES
from flockstep.tasks import TASKS

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
    "backends": lambda: {name: first_paragraph(each) for name, each in BACKENDS.items()},
    "networks": lambda: {
        name: f"{link.latency_seconds:g} s latency, {link.bytes_per_second:g} bytes/s"
        for name, link in PRESETS.items()
    },
}


def drawn(title: str, rows: Rows) -> Table:
    """A table for a terminal."""
    first = next(iter(rows.values()))
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


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def usage(spec: Any) -> str:
    """`local_sgd period momentum=keep`."""
    parts = [spec.name]
    for field in dataclasses.fields(spec):
        required = field.default is dataclasses.MISSING
        parts.append(field.name if required else f"{field.name}={_default(field.default)}")
    return " ".join(parts)


def _default(value: Any) -> str:
    name = getattr(value, "name", None)  # of a spec within a spec
    return name or str(value).replace(" ", "").lower()


def first_paragraph(documented: Any) -> str:
    """The first paragraph of the docstring, in one line."""
    return " ".join((documented.__doc__ or "").strip().split("\n\n")[0].split())


@click.command(name="list")
@click.argument("what", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_names(what: str | None, as_json: bool) -> None:
    """List strategies, codecs, tasks, datasets, assignments, schedules, backends or networks; all
    by default.

    \b
    flockstep list
    flockstep list tasks
    """
    if what is not None and what not in TABLES:
        raise unknown_name("list", what, TABLES)
    chosen = {name: rows() for name, rows in TABLES.items() if what in (None, name)}
    if as_json:
        click.echo(json.dumps(chosen))
        return
    for name, rows in chosen.items():
        Console().print(drawn(name, rows))
