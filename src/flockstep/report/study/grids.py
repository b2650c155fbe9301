"""Grids of cells, and the learning rates that were tried: figures of means."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from flockstep.report.page import FigureView, TableView, Variant
from flockstep.report.study.scale import (
    DASHES,
    SYMBOLS,
    Rows,
    Scale,
    Trace,
    category_axis,
)
from flockstep.study import (
    Outcome,
    score_to_pick_by,
)
from flockstep.units import shown_number


def heat_maps(outcome: Outcome) -> FigureView | None:
    """The mean of every cell of a grid, over two axes at a time."""
    study = outcome.study
    axes = [axis for axis in study.all_axes if len(axis.levels) > 1]
    if len(axes) < 2:
        return None
    others = axes[2:]
    down, across = sorted(axes[:2], key=lambda axis: -len(axis.levels))  # rows have more room
    scale = Scale(outcome, study.metric)
    means = {tuple(sorted(each.cell.labels.items())): each for each in outcome.cells}
    contents = []
    for levels in itertools.product(*(axis.levels for axis in others)):
        fixed = {name: label for level in levels for name, label in level.labels.items()}
        name = ", ".join(f"{key}={fixed[key]}" for axis in others for key in axis.telling)
        contents.append(_heat_map(down, across, fixed, name or "all", means, study, scale))
    return FigureView.of(
        "Over the grid",
        contents,
        f"Mean {scale.title} over seeds.",
        f"Mean {scale.title} for every level of {down.names[0]} and {across.names[0]}.",
        key="grid",
        switch="Where",
    )


def _heat_map(
    down: Any, across: Any, fixed: dict[str, str], name: str, means: Any, study: Any, scale: Scale
) -> Variant:
    rows: Rows = []
    for level in down.levels:
        row = []
        for other in across.levels:
            labels = {**level.labels, **other.labels, **fixed}
            # In the order of the axes, whichever they are.
            each = means.get(tuple(sorted(labels.items())))
            row.append(None if each is None else scale.of(each.mean))
        rows.append(row)
    ys = [down.label(level) for level in down.levels]
    xs = [across.label(level) for level in across.levels]
    data = [
        {
            "type": "heatmap",
            "x": xs,
            "y": ys,
            "z": rows,
            "colorscale": "Cividis",
            "autocolorscale": False,
            "reversescale": not study.higher_is_better,
            "colorbar": {"title": {"text": scale.title, "side": "right"}},
        }
    ]
    layout = {
        "height": 200 + 42 * len(ys),
        "annotations": _cell_texts(xs, ys, rows, study.higher_is_better),
        "xaxis": {"title": {"text": across.names[0]}, "type": "category"},
        "yaxis": {"title": {"text": down.names[0]}, **category_axis(ys)},
    }
    table_rows = [[label, *row] for label, row in zip(ys, rows, strict=True)]
    columns = (down.names[0], *(f"{across.names[0]}={x}" for x in xs))
    return Variant(name, data, layout, TableView(f"Grid, {name}", columns, table_rows))


def _cell_texts(
    xs: Sequence[str], ys: Sequence[str], rows: Sequence[Sequence[float | None]], is_rising: bool
) -> list[dict[str, Any]]:
    """The figure of each cell, light on the dark half of the scale and dark on the light one."""
    known = [z for row in rows for z in row if z is not None]
    middle = (min(known) + max(known)) / 2 if known else 0.0
    texts = []
    for (y, row), (place, x) in itertools.product(zip(ys, rows, strict=True), enumerate(xs)):
        z = row[place]
        if z is None:
            continue
        colour = "#000000" if (z >= middle) == is_rising else "#ffffff"
        font = {"color": colour}
        texts.append({"x": x, "y": y, "text": shown_number(z), "showarrow": False, "font": font})
    return texts


def tuning_curves(outcome: Outcome) -> FigureView | None:
    """The validation score of every learning rate that was tried."""
    if not outcome.picks:
        return None
    scale = Scale(outcome, score_to_pick_by(outcome.study.metric))
    data: list[Trace] = []
    rows: Rows = []
    for number, (label, pick) in enumerate(outcome.picks.items()):
        known = [(rate, score) for rate, score in sorted(pick.scores.items()) if score is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label,
                "x": [rate for rate, _ in known],
                "y": [scale.of(score) for _, score in known],
                "line": {"color": f"@{number % 10}", "dash": DASHES[number // 10 % len(DASHES)]},
                "marker": {
                    "size": [14 if rate == pick.lr else 7 for rate, _ in known],
                    "symbol": SYMBOLS[number % len(SYMBOLS)],
                    "color": f"@{number % 10}",
                },
            }
        )
        for rate, score in sorted(pick.scores.items()):
            rows.append([label, rate, scale.of(score), "picked" if rate == pick.lr else ""])
    layout = {
        "xaxis": {"title": {"text": "learning rate"}, "type": "log"},
        "yaxis": {"title": {"text": f"validation {scale.title}"}},
    }
    return FigureView(
        "Learning rates that were tried",
        data,
        layout,
        "Mean over the seeds of the tries, on data that are neither trained nor tested on. The "
        "large mark is the rate that was picked. A rate at which a run failed has no point.",
        f"Validation score against the learning rate for {len(data)} cells.",
        TableView("Tries", ("cell", "learning rate", scale.title, ""), rows, key="tuning-table"),
        key="tuning",
    )
