"""Pictures of who holds which samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from flockstep.data import Overlap
from flockstep.report.pictures import COLOUR, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHADES = " ░▒▓█"
MOST_ROWS = 64


def draw(overlap: Overlap, title: str, path: Path) -> None:
    """Two panels: which samples each worker holds, and how many each pair has in common."""
    figure = new_figure(path, "--out", 11, 4.6)
    samples_panel, pairs_panel = figure.subplots(1, 2, width_ratios=(2, 1))
    figure.suptitle(title)
    _draw_samples(samples_panel, overlap)
    _draw_pairs(pairs_panel, overlap)
    save_figure(figure, path, "--out")


def _draw_samples(panel: Axes, overlap: Overlap) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(["white", COLOUR])
    panel.imshow(overlap.held, aspect="auto", interpolation="nearest", cmap=colours, vmin=0, vmax=1)
    panel.set(
        title="samples that each worker holds",
        xlabel="samples, sorted by who holds them",
        ylabel="worker",
    )
    _whole_ticks(panel.yaxis)
    if len(overlap.held) <= MOST_ROWS:
        panel.set_yticks(np.arange(len(overlap.held)) - 0.5, minor=True)
        panel.grid(which="minor", axis="y", color="white", linewidth=1.5)
        panel.tick_params(which="minor", length=0)


def _draw_pairs(panel: Axes, overlap: Overlap) -> None:
    shares = overlap.common / np.diagonal(overlap.common)[:, None]
    image = panel.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100)
    panel.set(title="what two workers share", xlabel="worker", ylabel="worker")
    _whole_ticks(panel.xaxis)
    _whole_ticks(panel.yaxis)
    panel.figure.colorbar(image, ax=panel, label="% of a worker's samples", shrink=0.8)


def _whole_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def sketch(overlap: Overlap, columns: int) -> Text:
    """The left panel for a terminal: a row a worker, shaded by how much of each stretch of
    samples it holds.
    """
    rows = overlap.held[:MOST_ROWS]
    width = max(1, min(columns - len(f"{len(rows) - 1} "), rows.shape[1]))
    borders = [column * rows.shape[1] // width for column in range(width)]
    lengths = np.diff([*borders, rows.shape[1]])
    shares = np.add.reduceat(rows, borders, axis=1, dtype=np.int64) / lengths
    shades = np.ceil(shares * (len(SHADES) - 1)).astype(int)
    label = len(str(len(rows) - 1))
    lines = [
        f"{rank:>{label}} " + "".join(SHADES[shade] for shade in row)
        for rank, row in enumerate(shades)
    ]
    left_out = len(overlap.held) - len(rows)
    return Text(
        "\n".join(lines + ([f"… and {left_out} more workers"] if left_out else [])), no_wrap=True
    )
