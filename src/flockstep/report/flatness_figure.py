"""A picture of what noise on the parameters does to models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flockstep.report.pictures import new_figure, save_figure
from flockstep.training import AtScale, Flatness

ERROR_BARS = {"marker": "o", "markersize": 4, "capsize": 3}


def draw_flatness(found: Sequence[tuple[str, Flatness]], path: Path) -> None:
    """Score and loss against the scale of the noise, side by side; a curve for each result, with
    standard deviations over the draws.
    """
    figure = new_figure(path, "--out", 11, 4.6)
    score_panel, loss_panel = figure.subplots(1, 2)
    first = found[0][1]
    for name, each in found:
        rows = each.by_scale
        scales = [row.scale for row in rows]
        scores, losses = _scores(rows), _losses(rows)
        score_panel.errorbar(scales, *scores, label=name, **ERROR_BARS)
        loss_panel.errorbar(scales, *losses, label=name, **ERROR_BARS)

    smallest = min((row.scale for row in first.by_scale if row.scale), default=1.0)
    unit = "of each tensor's root mean square" if first.noise == "relative" else "as it is"
    for panel, label in ((score_panel, first.metric_name), (loss_panel, "loss")):
        panel.set_xscale("symlog", linthresh=smallest)  # which has a place for 0
        panel.set(xlabel=f"noise on the parameters ({unit})", ylabel=f"{label} ({first.data} data)")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    loss_panel.legend(frameon=False)
    save_figure(figure, path, "--out")


def _scores(rows: Sequence[AtScale]) -> tuple[list[float], list[float]]:
    return [row.accuracy for row in rows], [row.accuracy_deviation or 0.0 for row in rows]


def _losses(rows: Sequence[AtScale]) -> tuple[list[float], list[float]]:
    return [row.loss for row in rows], [row.loss_deviation or 0.0 for row in rows]
