"""What the command line shows of an error: one line, with the place in the user's own code where
there is one; with --debug the whole traceback before it.
"""

from __future__ import annotations

import re
import site
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import click

from flockstep.cli.commands import Command, CommandGroup
from flockstep.errors import FlockstepError, WorkerError

DEBUG = "flockstep.debug"  # in the context that all commands of a call share
FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
PACKAGE = Path(__file__).parents[1]
# Code that is nobody's own.
INSTALLED = [
    PACKAGE,
    *map(Path, {*sysconfig.get_paths().values(), *site.getsitepackages()} - {sys.prefix}),
]


def debug_option(command: Command) -> Command:
    def note(context: click.Context, _: click.Parameter, is_set: bool) -> None:
        context.meta[DEBUG] = context.meta.get(DEBUG, False) or is_set

    option = click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=note,
        help="Show the whole traceback of an error.",
    )
    return option(command)


class Commands(CommandGroup):
    """Commands whose errors are shown in full with --debug."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except Exception:
            if context.meta.get(DEBUG):
                traceback.print_exc()
            raise


def one_line(error: Exception) -> str | None:
    """What to show of it; None of an error that is neither on purpose nor in the user's own code,
    but here.
    """
    is_on_purpose = isinstance(error, FlockstepError) and not isinstance(error, WorkerError)
    if is_on_purpose and error.__cause__ is None:
        return str(error)
    place = own_place(error)
    if is_on_purpose:  # it may be about what the user's own code has raised
        return str(error) if place is None else f"{place}: {error}"
    if place is None:
        return str(error) if isinstance(error, WorkerError) else None
    text = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
    first, *rest = text.strip().splitlines()
    return f"{place}: {first}{' …' if rest else ''} (--debug shows the whole traceback)"


def own_place(error: Exception) -> str | None:
    """`my_task.py:12 in loss`: the innermost line of the user's own code in the traceback."""
    # What was raised in another process has its traceback as a text, in a note.
    cause = error.__cause__ or error
    if isinstance(cause, SyntaxError) and cause.filename is not None:
        return f"{_from_here(Path(cause.filename))}:{cause.lineno}"
    told = "".join(traceback.format_exception(cause))
    for frame in reversed([*FRAME.finditer(told)]):
        path = Path(frame["file"])
        if frame["file"].startswith("<") or any(map(path.is_relative_to, INSTALLED)):
            continue
        return f"{_from_here(path)}:{frame['line']} in {frame['name']}"
    return None


def _from_here(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
