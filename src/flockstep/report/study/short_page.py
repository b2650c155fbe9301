"""A study on one short page: question, what was published, how it was scaled, a table, a figure,
and the verdict in words. It is made of the records, and of a text beside them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from flockstep.report.page import TableView
from flockstep.report.study.for_papers import markdown_rows, write_picture, write_text
from flockstep.report.study.scale import Scale
from flockstep.report.study.winners import map_table
from flockstep.study import (
    THROUGHPUT,
    Comparison,
    Outcome,
    PlannedRun,
    Record,
    Study,
    is_cost,
)
from flockstep.units import shown_number

PAGE, PICTURE = "page.md", "page.png"
WORDS = "verdict.md"  # what a person has written of it, beside the records


def write_page_and_picture(outcome: Outcome, folder: Path) -> Path:
    """`page.md` and `page.png` in the folder of the records."""
    write_picture(outcome, folder / PICTURE)
    write_text(folder / PAGE, short_page(outcome, _words_in(folder)))
    return folder / PAGE


def _words_in(folder: Path) -> str:
    path = folder / WORDS
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def short_page(outcome: Outcome, words: str = "") -> str:
    """The page as Markdown."""
    study = outcome.study
    parts = [f"# {study.name}", f"**{study.question}**"]
    if study.published_claim:
        parts += ["## What was published", f"{study.published_claim}{_sources(study)}"]
    if study.scaling:
        parts += ["## How it was scaled", study.scaling]
    parts += ["## Verdict", outcome.verdict]
    if words:
        parts.append(words)
    claims = outcome.claims
    if claims:
        parts += ["## What was expected", "\n".join(markdown_rows(_claims_table(outcome, claims)))]
    if (winners := map_table(outcome)) is not None:
        parts += [f"## {winners.title}", "\n".join(markdown_rows(winners))]
    parts += ["## What was measured", "\n".join(markdown_rows(_cells_table(outcome)))]
    failed = [*outcome.failures, *outcome.failed_tries]
    if failed:
        parts += ["## What failed", "\n".join(markdown_rows(_failures_table(failed)))]
    parts += [f"![Scores of all cells]({PICTURE})", _made(outcome)]
    return "\n\n".join(parts) + "\n"


def _sources(study: Study) -> str:
    told = [each.source for each in study.claims] + [each.source for each in study.printed]
    sources = dict.fromkeys(filter(None, told))
    return f" ({'; '.join(sources)})" if sources else ""


def _claims_table(outcome: Outcome, claims: list[Comparison]) -> TableView:
    scale = Scale(outcome, outcome.study.metric)
    columns = (
        "claim",
        "cell",
        "against",
        "difference",
        "corrected p",
        "could have seen",
        "verdict",
    )
    rows = [
        [
            each.claim or each.expect,
            each.cell,
            each.against,
            scale.of(each.difference),
            each.corrected_p,
            scale.of(each.detectable),
            each.verdict,
        ]
        for each in claims
    ]
    tests = sorted({each.test.partition(",")[0] for each in claims if each.test})
    unit = scale.title.replace("(%)", "(points)")
    note = f"{unit}; by {', '.join(tests)}, corrected by Holm's method; alpha = "
    note += f"{outcome.study.alpha:g}"
    if outcome.study.margin is not None:
        note += f"; equal means within ±{shown_number(outcome.study.margin * scale.factor)}"
    if is_cost(outcome.study.metric):
        note += "; for a log-rank test no smallest difference that could have been seen is told"
    return TableView("", columns, rows, f"{note}.")


def _cells_table(outcome: Outcome) -> TableView:
    scale = Scale(outcome, outcome.study.metric)
    centre = "median" if is_cost(outcome.study.metric) else "mean"
    is_of_speed = outcome.study.metric.startswith("seconds_to")
    others = {name: Scale(outcome, name) for name in outcome.study.also_shown}
    columns = ["cell", "n", centre, "deviation", *(each.title for each in others.values())]
    columns += ["MB sent", *(["samples/s"] if is_of_speed else [])]
    columns += ["lr"] if outcome.picks else []
    rows = []
    for each in outcome.cells:
        deviation = None if each.sample is None else each.sample.deviation
        n = f"{each.times.reached} of {each.times.n}" if each.times is not None else str(each.n)
        sent = outcome.mean_of(each.cell, "bytes_sent")
        row = [each.cell.label, n, scale.of(each.mean), scale.of(deviation)]
        row += [other.of(outcome.mean_of(each.cell, name)) for name, other in others.items()]
        row.append(sent / 1e6 if sent else None)
        if is_of_speed:
            row.append(outcome.mean_of(each.cell, THROUGHPUT))
        rows.append([*row, outcome.picks[each.cell.label].lr] if outcome.picks else row)
    told = f"{scale.title}, {'higher' if outcome.study.higher_is_better else 'lower'} is better."
    if outcome.picks:
        told += " Every cell had the same learning rates to pick from, by validation data."
        edges = [label for label, pick in outcome.picks.items() if pick.is_at_the_edge]
        told += f" At the edge of those tried: {'; '.join(edges)}." if edges else ""
    return TableView("", columns, rows, told)


def _failures_table(failed: list[tuple[PlannedRun, Record]]) -> TableView:
    counts = Counter((run.cell.label, (record.error or {})["type"]) for run, record in failed)
    rows: list[list[str | int]] = [[cell, error, count] for (cell, error), count in counts.items()]
    told = "Runs that ended with an error; tries of rates are among them."
    return TableView("", ("cell", "error", "runs"), rows, told)


def _made(outcome: Outcome) -> str:
    """What it was made with, and how to make it again."""
    records = [record for _, record in outcome.finished]
    commits = sorted({(record.commit or "unknown")[:12] for record in records})
    dates = sorted({record.started[:10] for record in records})
    seconds = sum(record.wall_seconds for record in outcome.records.values())
    return (
        f"{len(outcome.records)} runs, {seconds / 60:.0f} minutes of one core, "
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]])) if dates else 'not run'}, commit "
        f"{', '.join(commits)}. Again: `flockstep study studies/{outcome.study.name}.toml`."
    )
