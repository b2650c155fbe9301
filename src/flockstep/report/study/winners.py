"""Who wins where: the best method under every condition of a grid, and whether that is sure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.fields import require
from flockstep.report.page import COLOURS, TableView
from flockstep.report.pictures import new_figure, save_figure
from flockstep.report.study.scale import Scale
from flockstep.study import (
    CellSummary,
    Outcome,
    Study,
    Test,
    holm,
    log_rank_test,
    mean_test,
)
from flockstep.units import shown_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNSURE = 0.35  # how strong the colour of a winner is that may owe it to chance
WRONG_WAY = 1.0  # the p of a winner by its median that the test does not see in front


@dataclass(frozen=True)
class Contest:
    """All methods under one condition.

    Fields:
        study: its name. alpha: below which corrected p the winner is sure.
        labels: the condition, by the names of the axes that are not the methods'.
        where: the same in words.
        results: by method, in the order in which they are declared; those that have no run are
            left out.
        ranked: the methods, the best first. By median of costs to a target, where methods of which
            fewer than half of the runs arrived come last, by how many did; else by mean.
        p: of the winner against the runner-up, two-sided: log-rank of costs to a target, else
            Welch. None where there are too few runs for a test.
        corrected_p: by Holm, for all contests of one map.
    """

    study: str
    alpha: float
    labels: dict[str, str]
    where: str
    results: dict[str, CellSummary]
    ranked: tuple[str, ...]
    p: float | None = None
    corrected_p: float | None = None

    @property
    def winner(self) -> str | None:
        """None where no method has a figure."""
        return self.ranked[0] if self.figure(0) is not None else None

    @property
    def runner_up(self) -> str | None:
        return self.ranked[1] if self.winner is not None and len(self.ranked) > 1 else None

    @property
    def is_sure(self) -> bool:
        return self.corrected_p is not None and self.corrected_p < self.alpha

    def figure(self, place: int) -> float | None:
        """The median or mean of the method in that place; None where it has none."""
        return self.results[self.ranked[place]].mean if place < len(self.ranked) else None


def contests(outcomes: Sequence[Outcome]) -> list[Contest]:
    """Who wins under which condition of each study: all together are one map, for which p-values
    are corrected. Studies without several methods under several conditions are left out, and so are
    conditions that one method alone has met.

    The best is tested against the second best as if the pair had been named before. Where methods
    scatter alike that is safe: the two best of many are, by chance, no further apart than any two
    (Gutmann and Maymin, 1987). It says nothing of a third method that scatters more.
    """
    found = [contest for outcome in outcomes for contest in _contests_of(outcome)]
    tested = [(place, each.p) for place, each in enumerate(found) if each.p is not None]
    for (place, _), corrected in zip(tested, holm([p for _, p in tested]), strict=True):
        found[place] = replace(found[place], corrected_p=corrected)
    return found


def _contests_of(outcome: Outcome) -> list[Contest]:
    study = outcome.study
    methods = _axis_of_methods(study)
    if methods is None:
        return []
    others = [axis for axis in study.all_axes if axis is not methods]
    varying = [name for axis in others if len(axis.levels) > 1 for name in axis.telling]
    if not varying:
        return []
    by_labels = {_key(each.cell.labels): each for each in outcome.cells}
    found = []
    for levels in itertools.product(*(axis.levels for axis in others)):
        labels = {name: label for level in levels for name, label in level.labels.items()}
        results = {}
        for method in methods.levels:
            summary = by_labels.get(_key({**labels, **method.labels}))
            if summary is not None and summary.values:
                results[methods.label(method)] = summary
        where = ", ".join(f"{name}={labels[name]}" for name in varying)
        if len(results) > 1:
            shown = {name: labels[name] for name in varying}
            found.append(_contest(outcome, shown, where, results))
    return found


def _axis_of_methods(study: Study) -> Any:
    """The axis on which the baseline is; None where it is on several."""
    names = {*study.baseline_levels}
    for axis in study.all_axes:
        if names and names <= {*axis.names} and len(axis.levels) > 1:
            return axis
    return None


def _key(labels: Any) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _contest(
    outcome: Outcome, labels: dict[str, str], where: str, results: dict[str, CellSummary]
) -> Contest:
    sign = -1.0 if outcome.study.higher_is_better else 1.0

    def rank(method: str) -> tuple[int, float]:
        each = results[method]
        if each.mean is not None:
            return 0, sign * each.mean
        return 1, -each.n

    ranked = tuple(sorted(results, key=rank))
    contest = Contest(outcome.study.name, outcome.study.alpha, labels, where, results, ranked)
    if contest.winner is None or contest.runner_up is None:
        return contest
    test = _test(results[contest.winner], results[contest.runner_up])
    if test is None:
        return contest
    is_in_front = sign * test.statistic < 0
    return replace(contest, p=test.p if is_in_front else WRONG_WAY)


def _test(one: CellSummary, other: CellSummary) -> Test | None:
    """Two-sided, with a negative statistic where the first has the smaller figures."""
    if one.times is not None and other.times is not None:
        is_enough = min(one.times.n, other.times.n) > 1
        return log_rank_test(one.times, other.times) if is_enough else None
    if one.sample is not None and other.sample is not None:
        return mean_test(one.sample, other.sample)
    return None


# ---- As a table


def map_table(outcome: Outcome) -> TableView | None:
    """A row for each condition, a column for each method, the best in bold, for Markdown; None
    where a study does not have several of both.
    """
    found = contests([outcome])
    if len(found) < 2:
        return None
    scale = Scale(outcome, outcome.study.metric)
    methods = list(dict.fromkeys(name for each in found for name in each.results))
    rows: list[list[Any]] = []
    for each in found:
        best = each.figure(0)
        figures = []
        for method in methods:
            value = each.results[method].mean if method in each.results else None
            text = None if value is None else shown_number(value * scale.factor)
            figures.append(f"**{text}**" if value is not None and value == best else text)
        verdict = None if each.corrected_p is None else "yes" if each.is_sure else "open"
        rows.append([each.where, *figures, each.runner_up, each.corrected_p, verdict])
    centre = "Medians" if any(each.times is not None for each in outcome.cells) else "Means"
    tests = "log-rank" if centre == "Medians" else "Welch"
    note = (
        f"{centre} of {scale.title}, the best in bold. Corrected p: of the best against the "
        f"runner-up, two-sided, by {tests}, corrected by Holm's method for {len(found)} rows."
    )
    columns = ("where", *methods, "runner-up", "corrected p", "sure")
    return TableView("Who wins where", columns, rows, note)


# ---- As a picture


def write_map(outcomes: Sequence[Outcome], path: Path) -> None:
    """A picture of all studies side by side: in every field the winner, and the runner-up with how
    many times the winner's figure it has. Pale where the runner-up may be as good.
    """
    found = contests(outcomes)
    rule = "be of studies with several methods under several conditions"
    require(bool(found), "map", rule, [each.study.name for each in outcomes])
    names = list(dict.fromkeys(each.study for each in found))
    methods = list(dict.fromkeys(name for each in found for name in each.results))
    wheres = list(dict.fromkeys(each.where for each in found))
    figure = new_figure(path, "report", 2.5 + 2.6 * max(1, len(names)), 1.6 + 0.62 * len(wheres))
    panel = figure.subplots()
    for each in found:
        colour = COLOURS[methods.index(each.winner) % len(COLOURS)] if each.winner else "#888888"
        _draw(panel, names.index(each.study), wheres.index(each.where), each, colour)
    panel.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(wheres) - 0.5, -0.5))
    panel.set_xticks(range(len(names)), names)
    panel.set_yticks(range(len(wheres)), wheres)
    panel.xaxis.tick_top()
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    panel.set_xlabel("Who wins; the runner-up, × the winner's figure; pale: it may be chance")
    save_figure(figure, path, "report")


def _draw(panel: Axes, x: int, y: int, each: Contest, colour: str) -> None:
    from matplotlib.patches import Rectangle

    strength = 1.0 if each.is_sure else UNSURE
    panel.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, alpha=strength, lw=0))
    ink = "#ffffff" if each.is_sure else "#000000"
    panel.text(x, y, field_text(each), ha="center", va="center", color=ink, fontsize="small")


def field_text(each: Contest) -> str:
    """`local`, and below `diloco: × 1.4`: how many times the winner's figure the next one has."""
    if each.winner is None:
        return "nobody"
    best, second = each.figure(0), each.figure(1)
    if each.runner_up is None:
        return each.winner
    if not best or second is None:
        return f"{each.winner}\nbefore {each.runner_up}"
    return f"{each.winner}\n{each.runner_up}: × {shown_number(round(second / best, 2))}"
