"""All figures of a study's report."""

from __future__ import annotations

from collections.abc import Callable

from flockstep.report.page import FigureView
from flockstep.report.study.costs import profiles, share_reached, to_target, trade_off
from flockstep.report.study.grids import heat_maps, tuning_curves
from flockstep.report.study.scores import curves, differences, final_scores, published_figure
from flockstep.report.study.workers import replica_map, timeline
from flockstep.study import Outcome


def all_figures(outcome: Outcome) -> dict[str, list[FigureView]]:
    """The figures by the section that they belong to; those for which there is nothing to show are
    left out.
    """
    wanted: dict[str, list[Callable[[Outcome], FigureView | None]]] = {
        "Scores": [final_scores, differences, curves, published_figure],
        "Costs": [to_target, share_reached, trade_off, profiles],
        "Grid": [heat_maps],
        "Tuning": [tuning_curves],
        "Workers": [timeline, replica_map],
    }
    drawn = {
        title: [figure for make in makers if (figure := make(outcome)) is not None]
        for title, makers in wanted.items()
    }
    return {title: figures for title, figures in drawn.items() if figures}
