"""A progress bar on stderr for what takes longer than a few seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
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
    if not _is_shown(show):
        yield None
        return
    with _bars("steps", show) as progress:
        bar = progress.add_task(title, total=steps)

        def watch(done: Sequence[int]) -> None:
            progress.update(bar, completed=round(fmean(done)))

        yield watch


@contextmanager
def counting_bar(
    title: str, total: int, unit: str, show: bool | None
) -> Iterator[Callable[[], None]]:
    """What draws one more of `total`, each time it is called. `show` None: only on a terminal."""
    if not _is_shown(show):
        yield lambda: None
        return
    with _bars(unit, show) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda: progress.advance(bar)


def _is_shown(show: bool | None) -> bool:
    return sys.stderr.isatty() if show is None else show


def _bars(unit: str, show: bool | None) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=show is None)
