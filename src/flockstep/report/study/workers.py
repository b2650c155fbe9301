"""What workers did, and where replicas went: figures of single runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flockstep.report.page import FigureView, TableView, Variant
from flockstep.report.study.scale import (
    SYMBOLS,
    Rows,
    Trace,
)
from flockstep.study import (
    Outcome,
    Record,
)
from flockstep.units import shown_number

MOST_TIMELINES = 12
MOST_MAPS = 12
MOST_LOOKS = 40  # of a path: more make the page heavy, and the path no clearer


def timeline(outcome: Outcome) -> FigureView | None:
    """Who computed, waited and sent, in the beginning of one run of each cell."""
    shown = [
        (run, record)
        for run, record in outcome.finished
        if record.timeline is not None and any(record.timeline["workers"])
    ][:MOST_TIMELINES]
    if not shown:
        return None
    return FigureView.of(
        "What workers did",
        [_timeline(run.cell.label, record) for run, record in shown],
        "The beginning of one run of each cell: the first events of each worker, by the clock of "
        "the run.",
        f"Workers computing, waiting and sending in the beginning of {len(shown)} runs.",
        key="timeline",
        switch="Cell",
    )


def _timeline(name: str, record: Record) -> Variant:
    told = record.timeline
    assert told is not None
    names = [f"rank {rank}" for rank in range(len(told["workers"]))]
    # All tracks end where the first one does: behind it nothing is known of that worker.
    ends = [
        start + duration for rows in told["workers"] if rows for _, start, duration in rows[-1:]
    ]
    end = min(ends)
    data: list[Trace] = []
    shares: dict[str, list[float]] = {rank: [0.0] * 3 for rank in names}
    for number, (kind, colour) in enumerate(zip(told["kinds"], ("@2", "@1", "@0"), strict=True)):
        events = [
            (rank, start, min(duration, end - start))
            for rank, rows in zip(names, told["workers"], strict=True)
            for which, start, duration in rows
            if which == number and start < end
        ]
        for rank, _, duration in events:
            shares[rank][number] += duration
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "y": [rank for rank, _, _ in events],
                "base": [start for _, start, _ in events],
                "x": [duration for _, _, duration in events],
                "marker": {
                    "color": colour,
                    "line": {"width": 0},
                    "pattern": {"shape": ("", "/", "")[number], "fillmode": "overlay", "size": 6},
                },
                "hovertemplate": f"%{{y}}: {kind}, %{{x:.4g}} s<extra></extra>",
            }
        )
    layout = {
        "barmode": "overlay",
        "height": 180 + 24 * len(names),
        "bargap": 0.25,
        "xaxis": {"title": {"text": f"seconds ({record.config.get('clock', 'virtual')})"}},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": names[::-1],
            "automargin": True,
        },
    }
    rows = [
        [rank, *(f"{100 * each / end:.1f} %" if end else "–" for each in shares[rank])]
        for rank in names
    ]
    note = f"Of the first {shown_number(end)} s of seed {record.seed}."
    if told["of"] > len(names):
        note += f" The first {len(names)} of {told['of']} workers."
    columns = ("worker", *told["kinds"])
    return Variant(name, data, layout, TableView(f"Shares of time, {name}", columns, rows, note))


def replica_map(outcome: Outcome) -> FigureView | None:
    """Where the replicas went: their parameters at each look, in two dimensions."""
    shown = []
    for run, record in outcome.finished:
        positions = [look["positions"] for look in record.history if look.get("positions")]
        if len(positions) > 1 and len({len(each) for each in positions}) == 1:
            places = np.array(positions)[_some_of(len(positions))]
            shown.append((run.cell, record, places))  # looks × workers × dimensions
    shown = shown[:MOST_MAPS]
    if not shown:
        return None
    contents = []
    tasks = list(dict.fromkeys(record.config.get("task") for _, record, _ in shown))
    for task in tasks:
        same = [
            (cell, places) for cell, record, places in shown if record.config.get("task") == task
        ]
        flat, shares = _two_dimensions([places for _, places in same])
        if len(same) > 1:
            name = "centres of all cells" if len(tasks) == 1 else f"centres, {task}"
            contents.append(_centres(name, [cell.label for cell, _ in same], flat, shares))
        for (cell, _), places in zip(same, flat, strict=True):
            contents.append(_paths(cell.label, places, shares))
    return FigureView.of(
        "Where the replicas went",
        contents,
        "Parameters of every replica at every look, projected on the two directions in which they "
        "vary most (of a random projection to 16 numbers). All runs of a task share the "
        "directions, and those of one seed start at the same point.",
        f"Paths of the replicas of {len(shown)} runs in two dimensions.",
        key="replicas",
        switch="Cell",
    )


def _some_of(looks: int) -> list[int]:
    """Which looks are shown: all of a few, of many some, the first and the last among them."""
    return sorted({*np.linspace(0, looks - 1, min(looks, MOST_LOOKS)).round().astype(int).tolist()})


def _two_dimensions(runs: list[np.ndarray]) -> tuple[list[np.ndarray], tuple[float, float]]:
    """Principal components of all positions together, and the shares of variance of the two."""
    together = np.concatenate([each.reshape(-1, each.shape[-1]) for each in runs])
    centre = together.mean(0)
    _, values, directions = np.linalg.svd(together - centre, full_matrices=False)
    whole = float((values**2).sum()) or 1.0
    shares = (float(values[0] ** 2) / whole, float(values[1] ** 2) / whole)
    return [(each - centre) @ directions[:2].T for each in runs], shares


def _map_layout(shares: tuple[float, float]) -> dict[str, Any]:
    first, second = (f"{100 * share:.0f} % of the variance" for share in shares)
    return {
        "height": 520,
        "xaxis": {"title": {"text": f"first direction, {first}"}},
        "yaxis": {"title": {"text": f"second direction, {second}"}},
        "hovermode": "closest",
    }


def _centres(
    name: str, labels: Sequence[str], runs: Sequence[np.ndarray], shares: tuple[float, float]
) -> Variant:
    """The path of the centre of each cell's replicas."""
    data: list[Trace] = []
    rows: Rows = []
    for number, (label, places) in enumerate(zip(labels, runs, strict=True)):
        centre = places.mean(1)
        data.append(_path(label, centre, number))
        rows += [[label, look, *map(float, at)] for look, at in enumerate(centre, start=1)]
    columns = ("cell", "look", "first direction", "second direction")
    table = TableView(name, columns, rows)
    return Variant(name, data, _map_layout(shares), table)


def _paths(label: str, places: np.ndarray, shares: tuple[float, float]) -> Variant:
    data: list[Trace] = []
    rows: Rows = []
    for rank in range(places.shape[1]):
        data.append(_path(f"rank {rank}", places[:, rank], rank))
        rows += [
            [f"rank {rank}", look, *map(float, at)]
            for look, at in enumerate(places[:, rank], start=1)
        ]
    columns = ("worker", "look", "first direction", "second direction")
    table = TableView(f"Positions, {label}", columns, rows)
    return Variant(label, data, _map_layout(shares), table)


def _path(name: str, places: np.ndarray, number: int) -> Trace:
    last = len(places) - 1
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": places[:, 0].tolist(),
        "y": places[:, 1].tolist(),
        "line": {"color": f"@{number % 10}", "width": 1.5},
        "marker": {
            "color": f"@{number % 10}",
            "size": [11 if place == last else 4 for place in range(len(places))],
            "symbol": SYMBOLS[number // 10 % len(SYMBOLS)],
        },
    }
