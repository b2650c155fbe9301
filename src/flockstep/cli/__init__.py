"""The command line, one file per command. Flags derive from the dataclasses."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

import click

from flockstep.backends import one_interrupt
from flockstep.cli.data import data
from flockstep.cli.demo import demo
from flockstep.cli.inspect import inspect
from flockstep.cli.list import list_names
from flockstep.cli.run import run
from flockstep.errors import FlockstepError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="flockstep")
def cli() -> None:
    """Train one PyTorch model on many workers that do not march in lockstep."""


for command in (run, demo, inspect, list_names, data):
    cli.add_command(command)


@one_interrupt()
def main() -> NoReturn:
    """Run the command; what goes wrong on purpose is one line on stderr."""
    try:
        cli.main(standalone_mode=False)
    except FlockstepError as error:
        click.echo(f"flockstep: {error}", err=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # for good: Python itself has to end, too
        click.echo("flockstep: interrupted", err=True)
        sys.exit(130)
    sys.exit(0)
