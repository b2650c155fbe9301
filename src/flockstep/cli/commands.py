"""What commands have in common: how they are found, what click says of a wrong command line, and
`--json`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from flockstep.errors import did_you_mean, unknown_name

Command = TypeVar("Command", bound=Callable[..., Any])


def json_option(how_many: str = "") -> Callable[[Command], Command]:
    """`--json`, as `for_machines`."""
    objects = f"one JSON object {how_many}".strip()
    return click.option(
        "--json",
        "for_machines",
        is_flag=True,
        help=f"Print {objects} on stdout and nothing else there.",
    )


class CommandGroup(click.Group):
    """Commands of which the nearest is suggested for one that does not exist."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        is_option = name.startswith("-")
        if not is_option and self.get_command(ctx, name) is None:
            raise click.UsageError(str(unknown_name("command", name, self.commands)), ctx)
        return super().resolve_command(ctx, args)


def usage_line(error: click.ClickException) -> str:
    """What was wrong, and where to read what would be right."""
    message = error.format_message()
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption) and context is not None:
        known = [flag for each in context.command.params for flag in each.opts]
        hint = did_you_mean(error.option_name, known)
        message = f"unknown option {error.option_name!r}; {hint}"
    message = " ".join(message.split()).rstrip(".; ")
    where = "" if context is None else f" (see {context.command_path} --help)"
    return message[:1].lower() + message[1:] + where
