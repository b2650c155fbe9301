"""Pictures of a run's history: how good the model was, and what it had cost until then."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from flockstep.report.pictures import COLOUR, SECOND_COLOUR, new_figure, save_figure
from flockstep.report.terminal_chart import Curve, chart
from flockstep.result import Result, is_virtual, shown_score, strategy_text
from flockstep.units import shown_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What a history can be drawn by, and the field of a look that says it.
AXES = {
    "seconds": "seconds",
    "steps": "step",
    "epochs": "epoch",
    "samples": "samples",
    "bytes": "bytes_sent",
}
SCORE_ROWS, LOSS_ROWS = 9, 7  # odd, so that the middle one is half-way
WIDEST = 100
TITLE_COLUMNS = 120


def sketch_history(result: Result, by: str, columns: int) -> Group | Text:
    """Two charts for a terminal: the score, and the losses."""
    if not result.history:
        return Text("no looks: there is no history to draw")
    name, columns = _score_name(result), min(columns, WIDEST)
    score, loss, train_loss = _curves(result, by)
    axis = axis_name(result, by)

    def show_score(value: float) -> str:
        return shown_score(name, value)

    return Group(
        chart([score], columns, SCORE_ROWS, axis, show_score, shown_number),
        Text(),
        chart([loss, train_loss], columns, LOSS_ROWS, axis, shown_number, shown_number),
    )


def draw_history(result: Result, by: str, path: Path) -> None:
    """The same as a picture: two panels side by side."""
    figure = new_figure(path, "--plot", 11, 4.6)
    score_panel, loss_panel = figure.subplots(1, 2)
    config = result.config
    title = f"{config['task']}, {strategy_text(config)}, {config['workers']} workers"
    figure.suptitle(textwrap.fill(title, TITLE_COLUMNS))
    score, loss, train_loss = _curves(result, by)
    _draw_curve(score_panel, score, COLOUR)
    _draw_curve(loss_panel, loss, COLOUR)
    _draw_curve(loss_panel, train_loss, SECOND_COLOUR)
    loss_panel.legend(frameon=False)

    for panel, name in ((score_panel, _score_name(result)), (loss_panel, "loss")):
        panel.set(xlabel=axis_name(result, by), ylabel=name)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    if _score_name(result) == "accuracy":
        from matplotlib.ticker import PercentFormatter

        score_panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    save_figure(figure, path, "--plot")


def axis_name(result: Result, by: str) -> str:
    """What the axis counts, with its unit."""
    clock = "virtual seconds" if is_virtual(result.config) else "seconds of the wall's clock"
    names = {
        "seconds": clock,
        "steps": "steps of a worker",
        "epochs": "epochs",
        "samples": "samples of all workers",
        "bytes": "MB sent by all workers",
    }
    return names[by]


def _score_name(result: Result) -> str:
    return str(result.config.get("metric_name", "accuracy"))


def _curves(result: Result, by: str) -> tuple[Curve, Curve, Curve]:
    """The score, and the losses on the data of the looks and in training."""

    def points(field: str) -> list[tuple[float, Any]]:
        return [
            (x / 1e6 if by == "bytes" else x, getattr(look, field))
            for look in result.history
            if (x := getattr(look, AXES[by])) is not None  # samples are not in older results
        ]

    return (
        Curve(_score_name(result), points("accuracy"), "blue"),
        Curve("evaluation loss", points("loss"), "blue"),
        Curve("training loss", points("train_loss"), "yellow", is_joined=False),
    )


def _draw_curve(panel: Axes, curve: Curve, colour: str) -> None:
    known = curve.known
    # So few looks are seen one by one.
    marker = "o" if len(known) <= 40 else None
    xs, ys = [x for x, _ in known], [y for _, y in known]
    panel.plot(xs, ys, color=colour, marker=marker, markersize=4, label=curve.name)
