"""What scores cost: figures of seconds, bytes, steps and epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flockstep.report.page import FigureView, TableView, Variant
from flockstep.report.study.scale import (
    DASHES,
    SYMBOLS,
    Rows,
    Scale,
    Trace,
    less_interesting,
    rows_layout,
)
from flockstep.study import (
    Cell,
    Outcome,
    is_cost,
    performance_profile,
    summary_of,
    times_of,
)
from flockstep.units import shown_number

COSTS_TO_TARGET = (
    "seconds_to_target",
    "bytes_to_target",
    "steps_to_target",
    "epochs_to_target",
)


def to_target(outcome: Outcome) -> FigureView | None:
    """What each run took to the target; those that did not reach it are shown where they ended."""
    if outcome.target is None:
        return None
    contents = [
        content
        for metric in COSTS_TO_TARGET
        if (content := _to_target(outcome, metric)) is not None
    ]
    if not contents:
        return None
    share = Scale(outcome, "accuracy")
    unit = " %" if share.factor == 100 else ""
    goal = f"{shown_number(outcome.target * share.factor)}{unit}"
    why = (
        ""
        if outcome.study.target or _asks_target(outcome)
        else " (the lowest mean of a cell: the study declares no target)"
    )
    return FigureView.of(
        f"Cost to {goal}",
        contents,
        f"Until the first look at which the score was at least {goal}{why}. A cross is a run that "
        "did not reach it: it counts as censored there. A bar is the Kaplan–Meier median.",
        f"Seconds, bytes, steps and epochs to a score of {goal}, for every run.",
        key="to-target",
        log_axes="x",
    )


def _asks_target(outcome: Outcome) -> bool:
    return any(record.config.get("target") is not None for _, record in outcome.finished)


def _to_target(outcome: Outcome, metric: str) -> Variant | None:
    scale = Scale(outcome, metric)
    cells = [summary_of(outcome, cell, metric) for cell in outcome.study.cells]
    cells = [each for each in cells if each.times is not None]
    if not cells:
        return None
    reached, missed, medians = [], [], []
    rows: Rows = []
    for each in cells:
        label, times = each.cell.label, each.times
        assert times is not None
        for record in outcome.records_of(each.cell):
            value = outcome.value(record, metric)
            if value is None:
                missed.append((outcome.limit(record, metric), label))
            else:
                reached.append((value, label))
        if times.median is not None:
            medians.append((times.median, label))
        rows.append([label, times.n, times.reached, scale.of(times.median)])

    def trace(name: str, points: list[tuple[float, str]], marker: dict[str, Any]) -> Trace:
        return {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [x * scale.factor for x, _ in points],
            "y": [label for _, label in points],
            "marker": marker,
        }

    bar = {"color": "@text", "symbol": "line-ns-open", "size": 16, "line": {"width": 3}}
    data = [
        trace("reached", reached, {"color": "@0/55", "size": 8}),
        trace("not reached", missed, {"color": "@1", "size": 9, "symbol": "x"}),
        trace("median", medians, bar),
    ]
    name = metric.removesuffix("_to_target")
    columns = ("cell", "runs", "reached", f"median {scale.title}")
    table = TableView(f"{name} to the target", columns, rows, key=f"to-target-{name}")
    return Variant(name, data, rows_layout([each.cell.label for each in cells], scale.title), table)


def share_reached(outcome: Outcome) -> FigureView | None:
    """The share of runs that have reached the target, by time: one minus Kaplan–Meier."""
    if outcome.target is None:
        return None
    scale = Scale(outcome, "seconds_to_target")
    data: list[Trace] = []
    rows: Rows = []
    cells = outcome.study.cells
    hidden = less_interesting(outcome, cells)
    for number, cell in enumerate(cells):
        times = times_of(outcome, cell, "seconds_to_target")
        if times is None or not times.reached:
            continue
        moments, survival = times.steps
        xs = list(moments)
        ys = [100 * (1 - each) for each in survival]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": cell.label,
                "x": xs,
                "y": ys,
                "line": {
                    "shape": "hv",
                    "color": f"@{number % 10}",
                    "dash": DASHES[number // 10 % len(DASHES)],
                },
                "visible": "legendonly" if cell.label in hidden else True,
            }
        )
        rows += [[cell.label, x, y] for x, y in zip(xs, ys, strict=True)]
    if not data:
        return None
    layout = {
        "xaxis": {"title": {"text": scale.title}},
        "yaxis": {"title": {"text": "runs that have reached it (%)"}, "range": [-3, 103]},
    }
    return FigureView(
        "Runs that have reached the target",
        data,
        layout,
        "One minus the Kaplan–Meier estimate: runs that ended before are censored, not dropped.",
        f"The share of runs that have reached the target by time, for {len(data)} cells.",
        TableView("Share of runs", ("cell", scale.title, "share (%)"), rows, key="reached-table"),
        key="reached",
        log_axes="x",
    )


def trade_off(outcome: Outcome) -> FigureView | None:
    """Score against bytes and seconds, with the Pareto front."""
    metric = outcome.study.metric
    if metric in ("bytes_sent", "seconds") or is_cost(metric):
        return None
    contents = []
    for cost in ("bytes_sent", "seconds"):
        points = [
            (each.cell.label, mean, each.mean, each.interval)
            for each in outcome.cells
            if each.mean is not None and (mean := _mean_of(outcome, each.cell, cost)) is not None
        ]
        if points:
            contents.append(_trade_off(outcome, cost, points))
    if not contents:
        return None
    return FigureView.of(
        "What a score costs",
        contents,
        "Means of each cell, with the 95 % interval of the score. The line joins the cells that no "
        "other beats in both: the Pareto front.",
        f"Score against bytes sent, and against seconds, of {len(outcome.cells)} cells.",
        key="trade-off",
        switch="Against",
        log_axes="x",
    )


def _mean_of(outcome: Outcome, cell: Cell, metric: str) -> float | None:
    values = [outcome.value(record, metric) for record in outcome.records_of(cell)]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _trade_off(outcome: Outcome, cost: str, points: list[Any]) -> Variant:
    scale, price = Scale(outcome, outcome.study.metric), Scale(outcome, cost)
    front = pareto_front(
        [(paid, score) for _, paid, score, _ in points], outcome.study.higher_is_better
    )
    data: list[Trace] = []
    chosen = sorted((points[place][1], points[place][2]) for place in front)
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto front",
            "x": [price.of(x) for x, _ in chosen],
            "y": [scale.of(y) for _, y in chosen],
            "line": {"color": "@muted", "dash": "dash", "shape": "linear", "width": 1.5},
            "hoverinfo": "skip",
        }
    )
    for number, (label, paid, score, interval) in enumerate(points):
        half = 0.0 if interval is None else (interval[1] - interval[0]) / 2
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label,
                "x": [price.of(paid)],
                "y": [scale.of(score)],
                "error_y": {
                    "type": "data",
                    "array": [half * scale.factor],
                    "color": f"@{number % 10}",
                },
                "marker": {
                    "color": f"@{number % 10}",
                    "size": 11,
                    "symbol": SYMBOLS[number % len(SYMBOLS)],
                },
            }
        )
    rows = [
        [label, price.of(paid), scale.of(score), "yes" if place in front else "no"]
        for place, (label, paid, score, _) in enumerate(points)
    ]
    layout = {
        "height": 460,
        "xaxis": {"title": {"text": price.title}},
        "yaxis": {"title": {"text": scale.title}},
    }
    columns = ("cell", price.title, scale.title, "on the front")
    name = cost.removesuffix("_sent")
    return Variant(
        name,
        data,
        layout,
        TableView(f"Score against {name}", columns, rows, key=f"trade-off-{name}"),
    )


def pareto_front(points: Sequence[tuple[float, float]], higher_is_better: bool = True) -> list[int]:
    """The places of the points that no other beats: none is as cheap and better, or as good and
    cheaper.
    """
    sign = 1 if higher_is_better else -1

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        no_worse = one[0] <= other[0] and sign * one[1] >= sign * other[1]
        return no_worse and one != other

    return [
        place
        for place, point in enumerate(points)
        if not any(beats(other, point) for other in points)
    ]


def profiles(outcome: Outcome) -> FigureView | None:
    """Performance profiles over tasks, where there are several."""
    axes = {name: axis for axis in outcome.study.all_axes for name in axis.names}
    if "task" not in axes or len(axes["task"].levels) < 2 or outcome.target is None:
        return None
    costs: dict[str, dict[str, float | None]] = {}
    for cell in outcome.study.cells:
        others = {name: label for name, label in cell.labels.items() if name != "task"}
        method = ", ".join(others[name] for name in cell.varying if name != "task") or "all"
        times = times_of(outcome, cell, "seconds_to_target")
        costs.setdefault(method, {})[cell.labels["task"]] = None if times is None else times.median
    tasks = [level.labels["task"] for level in axes["task"].levels]
    costs = {method: {task: known.get(task) for task in tasks} for method, known in costs.items()}
    ratios = np.geomspace(1, 10, 50)
    shares = performance_profile(costs, ratios.tolist())
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": method,
            "x": ratios.tolist(),
            "y": [100 * each for each in share],
            "line": {"shape": "hv", "color": f"@{number % 10}", "dash": DASHES[number // 10 % 6]},
        }
        for number, (method, share) in enumerate(shares.items())
    ]
    layout = {
        "xaxis": {
            "title": {"text": "times the seconds of the best method on the task"},
            "type": "log",
        },
        "yaxis": {"title": {"text": "tasks (%)"}, "range": [-3, 103]},
    }
    rows: Rows = [
        [method, float(ratio), 100 * each]
        for method, share in shares.items()
        for ratio, each in zip(ratios, share, strict=True)
    ]
    return FigureView(
        "Performance profiles",
        data,
        layout,
        "The share of tasks that a method brings to the target within so many times the seconds "
        "of the best one (Dolan and Moré, 2002). A task that it does not bring there counts "
        "against it.",
        f"Performance profiles of {len(shares)} methods over {len(axes['task'].levels)} tasks.",
        TableView(
            "Performance profiles", ("method", "ratio", "tasks (%)"), rows, key="profiles-table"
        ),
        key="profiles",
    )
