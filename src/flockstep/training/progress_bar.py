"""A progress bar on stderr for what takes longer than a few seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flockstep.backends import Watcher


@contextmanager
def steps_bar(title: str, steps: int | None, show: bool | None) -> Iterator[Watcher | None]:
    """A watcher that draws the mean of the workers' steps, of `steps` if known. `show` None:
    only on a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=show is None) as progress:
        bar = progress.add_task(title, total=steps)

        def watch(done: Sequence[int]) -> None:
            progress.update(bar, completed=round(fmean(done)))

        yield watch
