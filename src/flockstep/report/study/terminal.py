"""What a study has found, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flockstep.study import Outcome, shown_duration, shown_figure
from flockstep.units import shown_number

if TYPE_CHECKING:
    from flockstep.study import Plan

MOST_LISTED = 200


def cells_table(outcome: Outcome) -> Table:
    """A row for each cell: n, mean, deviation and interval of the metric, and what it cost."""
    study = outcome.study
    table = Table(
        title=Text(f"{study.question}\n{study.metric}, {_better(outcome)}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("cell", overflow="fold")
    names = ("n", "mean", "±", "95 % interval", "seconds", "MB sent")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for each in outcome.cells:
        records = outcome.records_of(each.cell)

        def shown(value: float | None) -> str:
            if value is None:
                return "–"
            return shown_figure(value, study.metric, outcome.is_percent)

        deviation = None if each.sample is None else each.sample.deviation
        interval = "–" if each.interval is None else " – ".join(map(shown, each.interval))
        count = f"{each.n}" if each.n == each.planned else f"{each.n} of {each.planned}"
        table.add_row(
            Text(each.cell.label),  # not as rich's markup
            count,
            shown(each.mean),
            shown(deviation),
            interval,
            _mean([record.metrics.get("seconds") for record in records]),
            _mean([record.metrics.get("bytes_sent") for record in records], 1e6),
        )
    return table


def _better(outcome: Outcome) -> str:
    return f"{'higher' if outcome.study.higher_is_better else 'lower'} is better"


def _mean(values: list[float | None], unit: float = 1.0) -> str:
    known = [value for value in values if value is not None]
    return shown_number(sum(known) / len(known) / unit) if known else "–"


def verdict_lines(outcome: Outcome) -> list[str]:
    """What can be said, line by line; then the rates that were picked, and what failed."""
    lines = [f"- {each.words}" for each in outcome.comparisons]
    for label, pick in outcome.picks.items():
        edge = ", at the edge of what was tried" if pick.is_at_the_edge else ""
        missing = "no rate worked" if pick.is_complete else "not all rates are tried yet"
        rate = missing if pick.lr is None else f"lr={pick.lr:g}{edge}"
        cost = f"{pick.tries} tries, {shown_number(pick.wall_seconds)} s"
        lines.append(f"- tuned: {label}: {rate} ({cost})")
    for run, record in [*outcome.failed_tries, *outcome.failures]:
        error = record.error or {}
        lines.append(f"- failed: {run.label}: {error.get('type')}: {error.get('message')}")
    return lines


def planned_table(plan: Plan, jobs: int) -> Group:
    """The runs that there are, and how long they take."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("run", "id", "seconds", ""):
        table.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for run, is_done, seconds in plan.rows[:MOST_LISTED]:
        told = "?" if seconds is None else shown_number(seconds)
        table.add_row(Text(run.label), run.id, told, "done" if is_done else "")
    missing = len([1 for _, is_done, _ in plan.rows if not is_done])
    whole = plan.seconds(jobs)
    told = "nobody can tell how long" if whole is None else f"about {shown_duration(whole)}"
    if plan.may_end_early and whole is not None:
        told = f"at most {told}, as runs end at their target,"
    lines = [Text(f"{len(plan.rows)} runs, {missing} of them to do: {told} with {jobs} jobs")]
    if len(plan.rows) > MOST_LISTED:
        lines.insert(0, Text(f"and {len(plan.rows) - MOST_LISTED} more runs"))
    if plan.unknown:
        lines.append(Text(f"Tuning will tell of {plan.unknown} more runs; they are counted in."))
    return Group(table, *lines)
