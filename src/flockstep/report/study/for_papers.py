"""A study's report for papers and pull requests: Markdown, CSV, a picture."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.errors import InvalidField
from flockstep.folders import write_whole
from flockstep.report.page import TableView
from flockstep.report.pictures import COLOUR, SECOND_COLOUR, new_figure, save_figure
from flockstep.report.study.scale import Scale
from flockstep.report.study.scores import AGAINST, curve_of
from flockstep.report.study.whole_page import result_tables, study_page
from flockstep.study import Outcome, is_cost
from flockstep.units import shown_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LINES = 10
LETTERS_PER_INCH = 8  # of a title, with room to spare


def write_markdown(outcome: Outcome, path: Path) -> None:
    """Question, verdicts and tables."""
    page = study_page(outcome)
    lines = [f"# {page.title}", "", page.question, "", " · ".join(page.lead), "", "## Verdicts", ""]
    lines += [
        f"- **{each.word or each.tone}**: {each.text} {each.detail}" for each in page.verdicts
    ]
    for table in result_tables(outcome):
        lines += ["", f"## {table.title}", "", *markdown_rows(table)]
    lines += ["", page.footer, ""]
    write_text(path, "\n".join(lines))


def markdown_rows(table: TableView) -> list[str]:
    """Columns that have no value in any row are left out."""
    kept = [
        place
        for place in range(len(table.columns))
        if any(row[place] not in (None, "") for row in table.rows)
    ]
    rows = [[table.columns[place] for place in kept], ["---"] * len(kept)]
    rows += [[_cell(row[place]) for place in kept] for row in table.rows]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [*lines, "", table.note] if table.note else lines


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    text = shown_number(value) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def write_csv(outcome: Outcome, path: Path) -> None:
    """One row per run, with all its figures and all digits."""
    table = outcome.table()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.itertuples(index=False):
        writer.writerow(["" if value is None or value != value else value for value in row])
    write_text(path, text.getvalue())


def write_text(path: Path, text: str) -> None:
    """All of it, or nothing."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise InvalidField(
            f"'report' must be a file that can be written (got {str(path)!r}: {error.strerror})"
        ) from error


def write_picture(outcome: Outcome, path: Path) -> None:
    """Final scores with their intervals, and the scores against seconds and bytes where runs were
    looked at on their way; against steps, if looks have the training data's score beside.
    """
    cells = [each for each in outcome.cells if each.mean is not None]
    lines = _lines_drawn(outcome)
    width = 15 if lines else 9
    figure = new_figure(path, "report", width, max(3, 1.8 + 0.32 * len(cells)))
    scores, *curves = figure.subplots(1, 1 + len(lines), squeeze=False)[0]
    figure.suptitle(textwrap.fill(outcome.study.question, width * LETTERS_PER_INCH))
    _draw_scores(scores, outcome, cells)
    for panel, (score, against) in zip(curves, lines, strict=True):
        _draw_curves(panel, outcome, score, against)
    for panel in (scores, *curves):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    if curves and cells:
        curves[-1].legend(frameon=False, fontsize="small")
    save_figure(figure, path, "report")


def _lines_drawn(outcome: Outcome) -> tuple[tuple[str, str], ...]:
    """Which scores are drawn, and against what."""
    looks = [record.history for _, record in outcome.finished if len(record.history) > 1]
    if not looks:
        return ()
    if all("train_accuracy" in look for history in looks for look in history):
        return (("accuracy", "steps"), ("train_accuracy", "steps"))
    return (("accuracy", "seconds"), ("accuracy", "bytes"))


def _draw_scores(panel: Axes, outcome: Outcome, cells: Sequence[Any]) -> None:
    scale = Scale(outcome, outcome.study.metric)
    for place, each in enumerate(reversed(cells)):
        values = [value * scale.factor for value in each.values if value is not None]
        panel.plot(values, [place] * len(values), "o", color=COLOUR, alpha=0.4, markersize=5)
        low, high = each.interval or (each.mean, each.mean)
        bounds = [low * scale.factor, high * scale.factor]
        panel.plot(bounds, [place, place], color=SECOND_COLOUR, linewidth=2)
        panel.plot([each.mean * scale.factor], [place], "D", color=SECOND_COLOUR, markersize=6)
    panel.set_yticks(range(len(cells)), [each.cell.label for each in reversed(cells)])
    kind = "median" if is_cost(outcome.study.metric) else "mean and 95 % interval"
    panel.set_xlabel(f"{scale.title}, {kind}")


def _draw_curves(panel: Axes, outcome: Outcome, score: str, against: str) -> None:
    field, factor, title = AGAINST[against]
    scale = Scale(outcome, score)
    for cell in outcome.study.cells[:MOST_LINES]:
        line = curve_of(outcome.records_of(cell), field, factor, score=score)
        if line is None:
            continue
        xs, mean, half = line
        (drawn,) = panel.plot(xs, mean * scale.factor, label=cell.label)
        if half is not None:
            low, high = (mean - half) * scale.factor, (mean + half) * scale.factor
            panel.fill_between(xs, low, high, alpha=0.2, color=drawn.get_color())
    panel.set(xlabel=title, ylabel=scale.title)
