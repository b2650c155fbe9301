"""One live display of a study that runs: how far it is, what failed, and the table so far."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from flockstep.study.declaration import Study
from flockstep.study.figures import shown_duration
from flockstep.study.metrics import is_score, value_of
from flockstep.study.planning import PlannedRun
from flockstep.study.records import Record

REFRESH_SECONDS = 0.5
LINE_SECONDS = 30.0  # between two lines, where there is no terminal
MOST_ROWS = 20


class Display:
    """Shows how far a study is, on stderr. None: only where that is a terminal; True: elsewhere a
    line every half a minute.
    """

    def __init__(self, study: Study, progress: bool | None) -> None:
        self._study = study
        self._console = Console(stderr=True)
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._is_shown = is_terminal if progress is None else progress
        self._is_live = self._is_shown and is_terminal
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
        )
        self._task = self._bar.add_task(study.name, told="")
        self._score_name = study.cells[0].spec(0).find_task().score_name
        self._runs: dict[str, PlannedRun] = {}
        self._values: dict[str, list[float]] = {}
        self._failed: list[str] = []
        self._done = 0
        self._began = time.monotonic()
        self._seconds: list[float] = []
        self._said = 0.0

    def __enter__(self) -> Display:
        if self._is_live:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                get_renderable=self._drawn,
            )
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(
        self,
        planned: Sequence[PlannedRun],
        records: Mapping[str, Record],
        missing: Sequence[PlannedRun],
    ) -> None:
        """What there is to do, and what is done already."""
        self._runs = {run.id: run for run in planned}
        to_do = {run.id for run in missing}
        self._values, self._failed = {}, []
        for run in planned:
            if run.id in records and run.id not in to_do:
                self._take(records[run.id])
        self._done = len(planned) - len(missing)
        self._bar.update(self._task, total=len(planned), completed=self._done)

    def add(self, record: Record) -> None:
        """A run has ended."""
        self._done += 1
        self._seconds.append(time.monotonic())
        self._take(record)
        self._bar.update(self._task, completed=self._done, told=self._told())

    def _take(self, record: Record) -> None:
        run = self._runs[record.id]
        if not record.is_done:
            error = record.error or {}
            self._failed.append(f"{run.label}: {error.get('type')}: {error.get('message')}")
        elif run.rate is None:
            value = value_of(self._study.metric, record.metrics, record.history)
            if value is not None:
                self._values.setdefault(run.cell.label, []).append(value)

    def _told(self) -> str:
        """Rate, time left, failures."""
        elapsed = time.monotonic() - self._began
        count = len(self._seconds)
        left = len(self._runs) - self._done
        told = f"{60 * count / elapsed:.1f} runs/min, {shown_duration(elapsed / count * left)} left"
        return told + (f", {len(self._failed)} failed" if self._failed else "")

    def tick(self) -> None:
        now = time.monotonic()
        if not self._is_shown or now - self._said < (
            REFRESH_SECONDS if self._is_live else LINE_SECONDS
        ):
            return
        self._said = now
        if self._live is not None:
            self._live.refresh()
        elif self._seconds:
            line = f"{self._study.name}: {self._done} of {len(self._runs)} runs, {self._told()}"
            self._console.print(line, highlight=False)

    def _drawn(self) -> Any:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for name in ("cell", "n", f"mean {self._study.metric}", "±"):
            table.add_column(name, justify="left" if name == "cell" else "right", overflow="fold")
        for label, values in [*self._values.items()][:MOST_ROWS]:
            mean = sum(values) / len(values)
            spread = (
                (sum((each - mean) ** 2 for each in values) / (len(values) - 1)) ** 0.5
                if len(values) > 1
                else None
            )
            table.add_row(
                Text(label),
                str(len(values)),
                self._shown(mean),
                "–" if spread is None else self._shown(spread),
            )
        rest = len(self._values) - MOST_ROWS
        lines: list[Any] = [self._bar, table]
        if rest > 0:
            lines.append(Text(f"and {rest} more cells", style="dim"))
        lines += [
            Text(f"failed: {line}", style="red", no_wrap=True, overflow="ellipsis")
            for line in self._failed[-3:]
        ]
        return Group(*lines)

    def _shown(self, value: float) -> str:
        is_share = is_score(self._study.metric) and self._score_name == "accuracy"
        return f"{value:.2%}" if is_share else f"{value:.4g}"
