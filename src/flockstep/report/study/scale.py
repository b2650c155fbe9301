"""What the figures of a study have in common: scales, colours, and rows of cells."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from flockstep.study import Cell, Outcome, is_score

MOST_CURVES = 10  # that are shown at once; others wait in the legend
LINE_CHARACTERS = 30  # of a row's name
BETWEEN = " − "  # the names of two cells
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon")

Trace = dict[str, Any]
Rows = list[list[Any]]


class Scale:
    """A figure of a run, as an axis shows it: its title, its unit and its factor."""

    def __init__(self, outcome: Outcome, metric: str) -> None:
        is_share = is_score(metric) and outcome.score_name == "accuracy"
        name = metric.replace("_", " ").replace(":", " ")
        if is_score(metric) and outcome.score_name != "accuracy":
            name = name.replace("accuracy", outcome.score_name)
        if is_share:
            self.factor, self.title = 100.0, f"{name} (%)"
        elif "bytes" in metric:
            self.factor, self.title = 1e-6, name.replace("bytes", "MB")
        elif metric == "wall_seconds":
            self.factor, self.title = 1.0, "wall seconds"
        elif "seconds" in metric:
            self.factor, self.title = 1.0, f"{name} ({clock_of(outcome)})"
        else:
            self.factor, self.title = 1.0, name

    def of(self, value: float | None) -> float | None:
        return None if value is None else value * self.factor


def clock_of(outcome: Outcome) -> str:
    """Which seconds those of the runs are."""
    clocks = {record.config.get("clock", "virtual") for _, record in outcome.finished}
    names = {"virtual": "virtual", "wall": "of the wall's clock"}
    return " or ".join(names.get(clock, clock) for clock in sorted(clocks)) or "virtual"


def rows_layout(labels: Sequence[str], title: str) -> dict[str, Any]:
    """A figure with one row per label, the first on top."""
    shown = [wrapped(label) for label in labels]
    most_lines = max((text.count("<br>") + 1 for text in shown), default=1)
    return {
        "height": 150 + max(34, 6 + 13 * most_lines) * len(labels),
        "xaxis": {"title": {"text": title}},
        "yaxis": category_axis(labels),
    }


def category_axis(labels: Sequence[str]) -> dict[str, Any]:
    """An axis of names from top to bottom, long ones on several lines."""
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": [*labels][::-1],
        "tickmode": "array",
        "tickvals": [*labels],
        "ticktext": [wrapped(label) for label in labels],
        "automargin": True,
    }


def wrapped(label: str) -> str:
    """A label as plotly shows it, on lines that leave room for the figure on a phone."""
    parts = label.split(BETWEEN)
    return "<br>".join(line for part in parts for line in textwrap.wrap(part, LINE_CHARACTERS))


def less_interesting(outcome: Outcome, cells: Sequence[Cell]) -> set[str]:
    """Cells that wait in the legend: of many, all but the best and the first."""
    if len(cells) <= MOST_CURVES:
        return set()
    means = {each.cell.label: each.mean for each in outcome.cells}
    sign = -1 if outcome.study.higher_is_better else 1
    ranked = sorted(
        (cell.label for cell in cells),
        key=lambda label: np.inf if (mean := means[label]) is None else sign * mean,
    )
    shown = {*ranked[: MOST_CURVES - 1], cells[0].label}
    return {cell.label for cell in cells} - shown
