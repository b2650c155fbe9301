"""How good the cells of a study are: figures of scores and of their differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from flockstep.report.page import FigureView, TableView, Variant
from flockstep.report.study.scale import (
    BETWEEN,
    DASHES,
    MOST_CURVES,
    SYMBOLS,
    Rows,
    Scale,
    Trace,
    clock_of,
    less_interesting,
    rows_layout,
)
from flockstep.study import (
    Cell,
    CellSummary,
    Comparison,
    Outcome,
    Record,
    is_cost,
    printed_sample,
    t_interval,
)
from flockstep.units import shown_number

GRID_POINTS = 60  # of a curve, unless there are many
FEWEST_POINTS, MOST_POINTS = 12, 2_400  # of a curve, and of all in a figure
MOST_TABLE_ROWS = 1_200


def final_scores(outcome: Outcome) -> FigureView | None:
    """Every run as a dot, the mean of each cell with its interval."""
    cells = [each for each in outcome.cells if each.n]
    if not cells or is_cost(outcome.study.metric):
        return None
    scale = Scale(outcome, outcome.study.metric)
    labels = [each.cell.label for each in cells]
    dots = [
        (each.cell.label, value) for each in cells for value in each.values if value is not None
    ]
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "a run",
            "x": [scale.of(value) for _, value in dots],
            "y": [label for label, _ in dots],
            "marker": {"color": "@0/55", "size": 8},
        },
        _means(cells, scale),
    ]
    rows = [summary_row(each, scale) for each in cells]
    table = TableView("Final scores", SUMMARY_COLUMNS, rows, key="final-scores-table")
    best = max if outcome.study.higher_is_better else min
    known = [each for each in cells if each.mean is not None]
    top = best(known, key=lambda each: each.mean or 0.0)
    return FigureView(
        "Final scores",
        data,
        rows_layout(labels, scale.title),
        "Every dot is a run; a bar is the mean of its cell with the 95 % interval of the mean, by "
        "Student's t.",
        f"Final {scale.title} of {len(cells)} cells. The best mean is that of {top.cell.label}: "
        f"{shown_number((top.mean or 0.0) * scale.factor)}.",
        table,
        key="final-scores",
    )


SUMMARY_COLUMNS = (
    "cell",
    "n",
    "mean",
    "deviation",
    "95 % low (t)",
    "95 % high (t)",
    "95 % low (bootstrap)",
    "95 % high (bootstrap)",
)


def summary_row(each: CellSummary, scale: Scale) -> list[Any]:
    deviation = None if each.sample is None else each.sample.deviation
    bounds = [*(each.interval or (None, None)), *(each.bootstrap or (None, None))]
    figures = [scale.of(value) for value in (each.mean, deviation, *bounds)]
    return [each.cell.label, each.n, *figures]


def _means(cells: Sequence[CellSummary], scale: Scale) -> Trace:
    known = [each for each in cells if each.mean is not None]
    halves = [
        0.0 if each.interval is None else (each.interval[1] - each.interval[0]) / 2
        for each in known
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "mean, 95 % interval",
        "x": [scale.of(each.mean) for each in known],
        "y": [each.cell.label for each in known],
        "error_x": {
            "type": "data",
            "array": [half * scale.factor for half in halves],
            "color": "@text",
            "thickness": 2,
        },
        "marker": {"color": "@text", "symbol": "line-ns-open", "size": 16, "line": {"width": 3}},
    }


def differences(outcome: Outcome) -> FigureView | None:
    """How far each cell is from its baseline, with the interval, and the margin."""
    by_pair: dict[str, Comparison] = {}  # a claim may be about a pair that is compared anyway
    for each in outcome.comparisons:
        if each.interval is not None:
            by_pair.setdefault(_pair_label(each), each)
    known = list(by_pair.values())
    if not known:
        return None
    scale = Scale(outcome, outcome.study.metric)
    colours = {"greater": "@0", "less": "@1", "equal": "@2", "open": "@muted"}
    labels = list(by_pair)
    data: list[Trace] = []
    for finding, colour in colours.items():
        some = [
            (label, each)
            for label, each in zip(labels, known, strict=True)
            if each.finding == finding
        ]
        if not some:
            continue
        intervals = [each.interval or (0.0, 0.0) for _, each in some]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": {"open": "not shown"}.get(finding, finding),
                "x": [scale.of(each.difference) for _, each in some],
                "y": [label for label, _ in some],
                "error_x": {
                    "type": "data",
                    "array": [(high - low) / 2 * scale.factor for low, high in intervals],
                    "color": colour,
                },
                "marker": {"color": colour, "size": 10, "symbol": SYMBOLS[len(data)]},
            }
        )
    layout = rows_layout(labels, "difference (points)" if scale.factor == 100 else "difference")
    layout["shapes"] = [_line_at(0.0)]
    if outcome.study.margin is not None:
        layout["shapes"].append(_band(outcome.study.margin * scale.factor))
    columns = ("cell", "against", "difference", "95 % low", "95 % high", "finding")
    rows = []
    for each in known:
        bounds = each.interval or (None, None)
        figures = [scale.of(value) for value in (each.difference, *bounds)]
        rows.append([each.cell, each.against, *figures, each.finding])
    margin = outcome.study.margin
    shaded = (
        ""
        if margin is None
        else " The shaded band is the margin: differences within do not matter."
    )
    return FigureView(
        "Differences",
        data,
        layout,
        f"Difference of the means with its 95 % interval.{shaded}",
        f"Differences of {len(known)} pairs of cells: "
        + ", ".join(f"{_count(known, name)} {name}" for name in colours if _count(known, name))
        + ".",
        TableView("Differences", columns, rows, key="differences-table"),
        key="differences",
    )


def _pair_label(each: Comparison) -> str:
    return f"{each.cell}{BETWEEN}{each.against}"


def _count(known: Iterable[Any], finding: str) -> int:
    return sum(1 for each in known if each.finding == finding)


def _line_at(x: float) -> dict[str, Any]:
    line = {"color": "@axis", "width": 1.5, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _band(half: float) -> dict[str, Any]:
    return {
        "type": "rect",
        "x0": -half,
        "x1": half,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "fillcolor": "@2/12",
        "line": {"width": 0},
        "layer": "below",
    }


# What curves can be drawn against: the field of a look, its factor and the title of the axis.
AGAINST = {
    "seconds": ("seconds", 1.0, "seconds"),
    "steps": ("step", 1.0, "steps of a worker"),
    "samples": ("samples", 1.0, "samples of all workers"),
    "bytes": ("bytes_sent", 1e-6, "MB sent by all workers"),
}


def curves(outcome: Outcome) -> FigureView | None:
    """The score in the course of the runs, with bands over seeds."""
    cells = [cell for cell in outcome.study.cells if outcome.records_of(cell)]
    scale = Scale(outcome, "accuracy")
    contents = []
    for name, (field, factor, title) in AGAINST.items():
        points = max(FEWEST_POINTS, min(GRID_POINTS, MOST_POINTS // max(1, len(cells))))
        lines = [
            (cell, curve_of(outcome.records_of(cell), field, factor, points)) for cell in cells
        ]
        known = [(cell, line) for cell, line in lines if line is not None]
        if not known:
            continue
        if name == "seconds":
            title = f"seconds ({clock_of(outcome)})"
        contents.append(_curves_against(outcome, name, title, known, scale))
    if not contents:
        return None
    return FigureView.of(
        "In the course of training",
        contents,
        "Lines are means over seeds; bands are 95 % intervals of the mean (Student's t). Runs that "
        "were looked at at different moments are joined by straight lines between their looks.",
        f"{scale.title} of {len(cells)} cells against seconds, steps, samples and bytes.",
        key="curves",
        switch="Against",
        log_axes="x",
    )


Curve = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def curve_of(
    records: Sequence[Record],
    field: str,
    factor: float,
    most: int = GRID_POINTS,
    score: str = "accuracy",
) -> Curve | None:
    """x, the mean of all runs there, and half the width of the interval; None without looks."""
    points = []
    for record in records:
        known = [
            (look[field] * factor, look[score])
            for look in record.history
            if look.get(field) is not None and look.get(score) is not None
        ]
        if known:
            points.append(np.array(sorted(known)))
    if not points:
        return None
    xs = _common_grid([each[:, 0] for each in points], most)
    ys = np.stack([np.interp(xs, each[:, 0], each[:, 1]) for each in points])
    mean = ys.mean(0)
    if len(points) < 2:
        return xs, mean, None
    from scipy.stats import t

    error = ys.std(0, ddof=1) / len(points) ** 0.5
    return xs, mean, error * t.ppf(0.975, len(points) - 1)


def _common_grid(columns: Sequence[np.ndarray], most: int) -> np.ndarray:
    """The places where all runs are known: their own, if they have the same, else evenly."""
    first = columns[0]
    if len(first) <= most and all(
        len(each) == len(first) and np.allclose(each, first) for each in columns
    ):
        return first
    low, high = max(each[0] for each in columns), min(each[-1] for each in columns)
    return np.linspace(low, max(low, high), most)


def _curves_against(
    outcome: Outcome, name: str, title: str, lines: list[tuple[Cell, Curve]], scale: Scale
) -> Variant:
    data: list[Trace] = []
    hidden = less_interesting(outcome, [cell for cell, _ in lines])
    for number, (cell, (xs, mean, half)) in enumerate(lines):
        colour, dash = number % 10, DASHES[number // 10 % len(DASHES)]
        visible: Any = "legendonly" if cell.label in hidden else True
        shared = {"type": "scatter", "mode": "lines", "legendgroup": cell.label, "visible": visible}
        ys = mean * scale.factor
        if half is not None:
            around = half * scale.factor
            data.append(
                {
                    **shared,
                    "x": [*xs.tolist(), *xs[::-1].tolist()],
                    "y": [*(ys + around).tolist(), *(ys - around)[::-1].tolist()],
                    "fill": "toself",
                    "fillcolor": f"@{colour}/18",
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                    "name": f"{cell.label}, interval",
                }
            )
        data.append(
            {
                **shared,
                "name": cell.label,
                "x": xs.tolist(),
                "y": ys.tolist(),
                "line": {"color": f"@{colour}", "width": 2, "dash": dash},
            }
        )
    layout = {
        "height": 460,
        "xaxis": {"title": {"text": title}},
        "yaxis": {"title": {"text": scale.title}},
        "hovermode": "x unified" if len(lines) <= MOST_CURVES else "closest",
    }
    columns = ("cell", title, "mean", "95 % low", "95 % high")
    every = max(1, -(-sum(len(line[0]) for _, line in lines) // MOST_TABLE_ROWS))
    rows: Rows = []
    for cell, (xs, mean, half) in lines:
        for place in range(0, len(xs), every):
            centre = float(mean[place])
            low, high = None, None
            if half is not None:
                low, high = centre - float(half[place]), centre + float(half[place])
            figures = [scale.of(value) for value in (centre, low, high)]
            rows.append([cell.label, float(xs[place]), *figures])
    note = "" if every == 1 else f"Every {every}th point of the figure."
    table = TableView(f"Score against {name}", columns, rows, note, key=f"curves-{name}")
    return Variant(name, data, layout, table)


def published_figure(outcome: Outcome) -> FigureView | None:
    """What was published beside what was measured."""
    study, scale = outcome.study, Scale(outcome, outcome.study.metric)
    rows: Rows = []
    theirs: list[tuple[str, float, float]] = []
    by_label = {each.cell.label: each for each in outcome.cells}
    for figure in study.printed:
        for cell in study.cells_of_figure(figure):
            sample = printed_sample(figure)
            bounds = t_interval(sample) if sample.deviation is not None else (sample.mean,) * 2
            theirs.append((cell.label, sample.mean, (bounds[1] - bounds[0]) / 2))
            own = by_label[cell.label]
            deviation = None if own.sample is None else own.sample.deviation
            measured = [own.n, scale.of(own.mean), scale.of(deviation)]
            printed = [scale.of(sample.mean), scale.of(sample.deviation), figure.n]
            rows.append([cell.label, *printed, *measured, figure.source])
    if not rows:
        return None
    labels = [label for label, _, _ in theirs]
    ours = [by_label[label] for label in labels if by_label[label].mean is not None]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "published",
            "x": [scale.of(mean) for _, mean, _ in theirs],
            "y": labels,
            "error_x": {
                "type": "data",
                "array": [half * scale.factor for *_, half in theirs],
                "color": "@1",
            },
            "marker": {"color": "@1", "symbol": "diamond-open", "size": 12, "line": {"width": 2}},
        },
        {**_means(ours, scale), "name": "measured here, 95 % interval"},
    ]
    columns = (
        "cell",
        "published mean",
        "published deviation",
        "published n",
        "n here",
        "mean here",
        "deviation here",
        "source",
    )
    return FigureView(
        "Published and measured",
        data,
        rows_layout(labels, scale.title),
        "Diamonds are the printed means, with a 95 % interval where the paper gives deviation "
        "and n.",
        f"{len(rows)} published figures beside the means measured here.",
        TableView("Published and measured", columns, rows, key="published-table"),
        key="published",
    )
