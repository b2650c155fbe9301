"""The command line, one file per command. Flags derive from the dataclasses."""

from __future__ import annotations

import signal
import sys
import warnings
from typing import NoReturn, TextIO

import click
from click.exceptions import NoArgsIsHelpError

from flockstep.backends import one_interrupt
from flockstep.cli.commands import usage_line
from flockstep.cli.compare import compare
from flockstep.cli.data import data
from flockstep.cli.demo import demo
from flockstep.cli.failures import Commands, debug_option, one_line
from flockstep.cli.flatness import flatness
from flockstep.cli.inspect import inspect
from flockstep.cli.list import list_names
from flockstep.cli.report import pack, report
from flockstep.cli.retest import retest
from flockstep.cli.run import run
from flockstep.cli.show import show
from flockstep.cli.study import study


@debug_option
@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="flockstep")
def cli() -> None:
    """Train one PyTorch model on many workers that do not march in lockstep."""


for command in (
    run,
    compare,
    study,
    report,
    retest,
    pack,
    show,
    flatness,
    demo,
    inspect,
    list_names,
    data,
):
    cli.add_command(command if command is run else debug_option(command))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """As all that is said besides the outcome: a line on stderr."""
    click.echo(f"flockstep: {message}", err=True)


@one_interrupt()
def main() -> NoReturn:
    """Run the command; what goes wrong on purpose, or in the user's own code, is one line on
    stderr.
    """
    warnings.showwarning = _show_warning
    try:
        cli.main(prog_name="flockstep", standalone_mode=False)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"flockstep: {usage_line(error)}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # for good: Python itself has to end, too
        click.echo("flockstep: interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        click.echo(f"flockstep: {line}", err=True)
        sys.exit(1)
    sys.exit(0)
