"""A study's report as a page: verdicts first, then tables and figures, then how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flockstep.report.page import (
    CodeView,
    Page,
    Section,
    TableView,
    TextView,
    Tone,
    VerdictView,
    View,
    write_page,
)
from flockstep.report.study.figures import all_figures
from flockstep.report.study.scale import Rows, Scale
from flockstep.report.study.scores import SUMMARY_COLUMNS, summary_row
from flockstep.result import versions
from flockstep.study import RULES, Comparison, Outcome, is_cost, shown_duration
from flockstep.units import shown_number

RENEWS_SECONDS = 60
MOST_VERDICTS = 12
TONES: dict[str, Tone] = {
    "agrees": "good",
    "disagrees": "bad",
    "equal": "neutral",
    "open": "unknown",
    "too little power": "unknown",
    "too few runs": "unknown",
}
WORDS = {
    "agrees": "Agrees",
    "disagrees": "Disagrees",
    "too little power": "Too little power",
    "equal": "Equal",
    "open": "Open",
    "too few runs": "Too few runs",
}
STATISTICS = (
    ("n", "how many runs, each with a seed of its own."),
    ("mean ± deviation", "over runs; the deviation is that of the sample, divided by n − 1."),
    (
        "95 % interval (t)",
        "would hold the true mean in 95 of 100 such studies, if runs scatter normally.",
    ),
    ("95 % interval (bootstrap)", "the same by resampling the runs; too narrow for few of them."),
    (
        "p",
        "how often chance alone would give a difference at least as large; by Welch's test, which "
        "allows for unequal scatter, or by the paired test of runs that share their seeds.",
    ),
    ("corrected p", "by Holm's method for all tests of the table: compare it with alpha."),
    (
        "equivalence p",
        "of two one-sided tests: small means that the difference is shown to be within the margin.",
    ),
    ("effect size", "Hedges' g: the difference in units of the scatter of single runs."),
    (
        "better in",
        "the probability that a run of the cell is better than one of the other; ties count half.",
    ),
    (
        "could have seen",
        "the true difference that such a test with these n finds with a probability of 80 %.",
    ),
    ("median to a target", "by Kaplan and Meier; a run that did not reach it counts as censored."),
)


def write_study_page(outcome: Outcome, path: Path) -> None:
    write_page(study_page(outcome), path)


def study_page(outcome: Outcome) -> Page:
    """The whole report."""
    study = outcome.study
    sections = [Section("Results", result_tables(outcome))]
    for title, figures in all_figures(outcome).items():
        views: list[View] = list(figures)
        sections.append(Section(title, views))
    sections.append(Section("All runs", _runs(outcome)))
    sections.append(Section("How to read this", _reading(outcome)))
    sections.append(Section("How to repeat this", _repeating(outcome)))
    return Page(
        title=study.name,
        question=study.question,
        lead=_facts(outcome),
        verdicts=_verdicts(outcome),
        sections=sections,
        footer=f"Written by Flockstep {versions()['flockstep']}, {_now()}.",
        renews_every=RENEWS_SECONDS if outcome.is_running else None,
    )


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _facts(outcome: Outcome) -> list[str]:
    study = outcome.study
    done, planned = len(outcome.finished), len(study.cells) * len(study.seed_list)
    tasks = sorted({str(record.config.get("task")) for _, record in outcome.finished})
    better = "higher" if study.higher_is_better else "lower"
    facts = [
        f"{study.metric.replace('_', ' ')}, {better} is better",
        f"{len(study.cells)} cells × {len(study.seed_list)} seeds",
        f"{done} of {planned} runs done",
        _budget(outcome),
    ]
    if tasks:
        facts.insert(0, ", ".join(tasks))
    if outcome.failures:
        facts.append(f"{len(outcome.failures)} failed")
    return [fact for fact in facts if fact]


def _budget(outcome: Outcome) -> str:
    """The budget that all runs had, or that they had different ones."""
    if outcome.study.budget is not None:
        return "equal " + ", ".join(f"{n}: {v:,}" for n, v in outcome.study.budget.items())
    names = ("epochs", "steps", "seconds", "bytes")
    found = {
        f"{record.config[name]:,} {name}"
        for _, record in outcome.finished
        for name in names
        if record.config.get(name) is not None
    }
    if len(found) > 1:
        return f"budgets differ: {', '.join(sorted(found))}"
    return f"{min(found)} per run" if found else ""


# ---- Verdicts


def _verdicts(outcome: Outcome) -> list[VerdictView]:
    views = []
    if outcome.failures:
        views.append(_failure_verdict(outcome))
    claims = [each for each in outcome.comparisons if each.family != "baseline"]
    against = [each for each in outcome.comparisons if each.family == "baseline"]
    views += [_verdict(outcome, each) for each in claims[:MOST_VERDICTS]]
    if len(against) > MOST_VERDICTS or len(claims) > MOST_VERDICTS:
        views.append(VerdictView(_counted(outcome, [*claims, *against]), "neutral", word="In all"))
    told = sorted(against, key=lambda each: each.finding in ("open", "too few runs"))
    views += [_verdict(outcome, each) for each in told[:MOST_VERDICTS]]
    edges = [label for label, pick in outcome.picks.items() if pick.is_at_the_edge]
    if edges:
        text = (
            f"The best learning rate lies at the edge of those tried for {', '.join(edges)}: "
            "a better one may lie beyond."
        )
        views.append(VerdictView(text, "unknown", word="Tuning"))
    if not views:
        views.append(VerdictView("There is nothing to compare yet.", "unknown", word="Open"))
    return views


def _failure_verdict(outcome: Outcome) -> VerdictView:
    kinds = sorted({str((record.error or {}).get("type")) for _, record in outcome.failures})
    text = (
        f"{len(outcome.failures)} runs failed ({', '.join(kinds)}). They are missing from every "
        "figure below: a cell that fails often looks better than it is."
    )
    return VerdictView(text, "bad", word="Failures")


def _verdict(outcome: Outcome, each: Comparison) -> VerdictView:
    if each.verdict in ("greater", "less"):
        is_better = (each.verdict == "greater") == outcome.study.higher_is_better
        tone: Tone = "good" if is_better else "bad"
        return VerdictView(each.headline, tone, _detail(each), "Better" if is_better else "Worse")
    return VerdictView(each.headline, TONES[each.verdict], _detail(each), WORDS[each.verdict])


def _detail(each: Comparison) -> str:
    source = f" Published: {each.source}." if each.source else ""
    return f"{each.detail}{source}"


def _counted(outcome: Outcome, comparisons: Sequence[Comparison]) -> str:
    """`Of 40 comparisons, 3 are greater, …`."""
    counts: dict[str, int] = {}
    for each in comparisons:
        counts[each.verdict] = counts.get(each.verdict, 0) + 1
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    return f"Of {len(comparisons)} comparisons: {told}. All of them are in the tables below."


# ---- Tables


def result_tables(outcome: Outcome) -> list[TableView]:
    """The tables that answer the question."""
    views = [_cells_table(outcome)]
    titles = {
        "baseline": "Against the baseline",
        "hypothesis": "Hypotheses",
        "published": "Published claims",
    }
    for family, title in titles.items():
        some = [each for each in outcome.comparisons if each.family == family]
        if some:
            views.append(_comparison_table(outcome, title, some))
    if outcome.picks:
        views.append(_picks_table(outcome))
    if outcome.failures:
        views.append(_failures_table(outcome))
    return views


def _cells_table(outcome: Outcome) -> TableView:
    scale = Scale(outcome, outcome.study.metric)
    costs = ("seconds", "bytes_sent", "steps", "samples", "wall_seconds")
    means = (*outcome.study.also_shown, *costs)
    scales = {name: Scale(outcome, name) for name in means}
    columns = [*SUMMARY_COLUMNS, "failed", *(scales[name].title for name in means)]
    rows: Rows = []
    for each in outcome.cells:
        shown = [scales[name].of(outcome.mean_of(each.cell, name)) for name in means]
        rows.append([*summary_row(each, scale), each.failed, *shown])
    centre = "medians" if is_cost(outcome.study.metric) else "means"
    note = f"{scale.title}; {centre} over the runs of each cell. Costs are means."
    return TableView("Cells", columns, rows, note, key="cells")


def _comparison_table(outcome: Outcome, title: str, some: Sequence[Comparison]) -> TableView:
    scale = Scale(outcome, outcome.study.metric)
    is_published = some[0].family == "published"
    columns = [
        "cell",
        "against",
        "n",
        "difference",
        "95 % low",
        "95 % high",
        "test",
        "p",
        "corrected p",
        "paired p",
        "equivalence p",
        "effect size",
        "better in (%)",
        "could have seen",
        "verdict",
    ]
    if is_published:
        columns[3:3] = ["published", "printed p"]
    rows = []
    for each in some:
        low, high = each.interval or (None, None)
        row: list[Any] = [each.cell, each.against, f"{each.n[0]}, {each.n[1]}"]
        if is_published:
            row += [scale.of(each.published), each.printed_p]
        row += [scale.of(value) for value in (each.difference, low, high)]
        row += [each.test, each.p, each.corrected_p, each.paired_p, each.equivalence_p]
        better = None if each.improvement is None else 100 * each.improvement
        row += [each.effect_size, better, scale.of(each.detectable), each.verdict]
        rows.append(row)
    note = f"{scale.title.replace('(%)', '(points)')}; alpha = {outcome.study.alpha:g}"
    if outcome.study.margin is not None:
        note += f", margin ±{shown_number(outcome.study.margin * scale.factor)}"
    return TableView(title, columns, rows, f"{note}.")


def _picks_table(outcome: Outcome) -> TableView:
    columns = ("cell", "picked rate", "at the edge", "rates tried", "runs", "seconds of the wall")
    rows = [
        [
            label,
            pick.lr,
            "yes" if pick.is_at_the_edge else "no",
            ", ".join(f"{rate:g}" for rate in pick.scores),
            pick.tries,
            pick.wall_seconds,
        ]
        for label, pick in outcome.picks.items()
    ]
    note = "Every cell had the same budget of tries; picks go by validation data alone."
    return TableView("Learning rates, and what picking cost", columns, rows, note, key="picks")


def _failures_table(outcome: Outcome) -> TableView:
    rows = [
        [
            run.label,
            record.id,
            str((record.error or {}).get("type")),
            str((record.error or {}).get("message")),
        ]
        for run, record in outcome.failures
    ]
    return TableView("Failed runs", ("run", "id", "error", "message"), rows, key="failures")


def _runs(outcome: Outcome) -> list[View]:
    scale = Scale(outcome, outcome.study.metric)
    costs = ("seconds", "bytes_sent", "steps", "wall_seconds")
    scales = {name: Scale(outcome, name) for name in costs}
    axes = [name for axis in outcome.study.all_axes for name in axis.names]
    columns = [
        *(axes or ["cell"]),
        "seed",
        scale.title,
        *(each.title for each in scales.values()),
        "id",
    ]
    rows = []
    for run, record in outcome.finished:
        labels = list(run.cell.labels.values()) or [run.cell.label]
        figures = [scales[name].of(record.metrics.get(name)) for name in costs]
        value = scale.of(outcome.value(record))
        rows.append([*labels, record.seed, value, *figures, record.id])
    return [TableView("Runs", columns, rows, key="runs")]


# ---- Words


def _reading(outcome: Outcome) -> list[View]:
    statistics = [f"{name}: {what}" for name, what in STATISTICS]
    return [
        TextView("Rules of the verdicts", RULES, key="rules"),
        TextView("Statistics, a sentence each", statistics, key="statistics"),
    ]


def _repeating(outcome: Outcome) -> list[View]:
    study = outcome.study
    records = [record for _, record in outcome.finished]
    seconds = sum(record.wall_seconds for record in outcome.records.values())
    made = {
        f"Flockstep {record.versions.get('flockstep')}, torch {record.versions.get('torch')}, "
        f"Python {record.versions.get('python')}, commit {record.commit or 'unknown'}"
        for record in records
    }
    machines = {
        f"{record.host.get('system')} {record.host.get('machine')}, "
        f"{record.host.get('cores')} cores"
        for record in records
    }
    paragraphs = [
        *sorted(made),
        f"On {', '.join(sorted(machines)) or 'no machine yet'}; all runs together took "
        f"{shown_duration(seconds)} of one core.",
        "Simulated runs repeat bit for bit; runs on real processes do so for strategies whose "
        "workers wait for each other.",
    ]
    views: list[View] = [TextView("Made with", paragraphs, key="made-with")]
    try:
        text = study.to_toml()
    except ValueError as error:
        views.append(TextView("The study", [f"It cannot be written as a file: {error}"]))
        return views
    command = f"flockstep study {study.name}.toml"
    views.append(CodeView("The study: save it as a file …", text, "toml", key="declaration"))
    views.append(CodeView("… and run it", command, "console", key="command"))
    return views
