"""`flockstep retest`: what papers printed, tested again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flockstep.cli.commands import json_option
from flockstep.errors import InvalidField
from flockstep.folders import empty_folders_removed, why_not, write_whole
from flockstep.result import as_json
from flockstep.study import TESTS, Retest, Study, shown_small
from flockstep.study import retest as retested

HOW = (
    "No run is made: these tests take the printed means, deviations and numbers of runs. Tests are "
    "one-tailed unless the paper says two-sided; where it names no tail, it is the side on which "
    "the printed difference is, which gives the smallest p.",
    "*df = n − 1* takes the smaller number of runs less one for the degrees of freedom, *Welch* "
    "those of Welch and Satterthwaite. *Holm* corrects for all tests of a table, *Holm over all* "
    "for all tests of this page. Figures that stand in several tables are counted once.",
    "*Equal* stands for two one-sided Welch tests (TOST) with the margin of the study. A p with a "
    "star gives another verdict than the published one.",
)


@click.command()
@click.argument(
    "files", type=click.Path(path_type=Path), metavar="FILE.toml …", nargs=-1, required=True
)
@click.option(
    "--page",
    type=click.Path(path_type=Path),
    metavar="FILE.md",
    help="Write a page in Markdown, with all tests.",
)
@json_option()
def retest(files: tuple[Path, ...], page: Path | None, for_machines: bool) -> None:
    """Test the printed figures of the study in each FILE.toml again, and say which published
    verdicts change.

    Nothing is run. Of each pair of figures: the p of a t-test with n − 1 and with Welch's degrees
    of freedom, both after Holm's correction, and whether they are equal within the margin.

    \b
    flockstep retest studies/e2_3_batch.toml
    flockstep retest studies/e*.toml --page printed_figures.md
    """
    studies = [Study.from_toml(file) for file in files]
    found = retested(*studies)
    if page is not None:
        _write(page, _page(studies, found, files))
    if for_machines:
        click.echo(as_json({"retests": [each.row() for each in found]}))
        return
    console = Console()
    for study, rows in _by_study(studies, found):
        console.print(_table(study, rows))
    changed = [f"- {each.study}: {each.words}" for each in found if each.changed]
    for line in [*changed, *_untested(found), *_summary(studies, found)]:
        console.print(line, highlight=False, markup=False)
    if page is not None:
        click.echo(f"The page: {page}")


def _by_study(
    studies: Sequence[Study], found: Sequence[Retest]
) -> list[tuple[Study, list[Retest]]]:
    """The studies that have something to test again, with it."""
    names = [name for name, _ in groupby(found, key=lambda each: each.study)]
    grouped = {name: [each for each in found if each.study == name] for name in names}
    return [(study, grouped[study.name]) for study in studies if study.name in grouped]


def _summary(studies: Sequence[Study], found: Sequence[Retest]) -> list[str]:
    """How many verdicts change, and how many say that two are equal; each test once."""
    tested = [each for each in found if each.p is not None and not each.also_in]
    told = [each for each in tested if each.published is not None]
    counts = Counter(name for each in told for name in each.changed)
    lines = []
    if tested:
        listed = "; ".join(f"{name}: {counts[name]}" for name in TESTS)
        lines.append(f"Of {len(told)} published verdicts so many change: {listed}.")
    same = [each for each in told if each.published is False and each.is_equal is not None]
    if same:
        equal = [each for each in same if each.is_equal]
        surely = [each for each in equal if _is_below(each.corrected_equivalence_p, each.alpha)]
        lines.append(
            f"Of {len(same)} verdicts without a significant difference, {len(equal)} mean equal "
            f"within the margin, {len(surely)} after Holm's correction over their table."
        )
    fits = Counter(each.fitting for each in tested if each.fitting)
    if fits:
        listed = ", ".join(f"{name} {count}" for name, count in fits.most_common())
        lines.append(f"Printed p-values, {fits.total()}, by the test that is nearest: {listed}.")
    missing = sum(each.p is None for each in found)
    if missing:
        lines.append(f"Pairs with a published verdict and without figures: {missing}.")
    without = [study.name for study in studies if study.name not in {each.study for each in found}]
    if without:
        lines.append(f"Without pairs of printed figures: {', '.join(without)}.")
    return lines


def _untested(found: Sequence[Retest]) -> list[str]:
    """What cannot be tested again; pairs of which the same is said together."""
    groups: dict[tuple[str, ...], list[Retest]] = {}
    for each in found:
        if each.missing:
            said = (each.study, each.printed, each.source, each.missing)
            groups.setdefault(said, []).append(each)
    lines = []
    for (study, printed, _, missing), (first, *others) in groups.items():
        words = first.words
        if others:
            pair = f"{first.cell} against {first.against}"
            words = f"{pair}, and {len(others)} more: published: {printed}; {missing}."
        lines.append(f"- {study}: {words}")
    return lines


def _is_below(p: float | None, alpha: float) -> bool:
    return p is not None and p < alpha


def _p(each: Retest, name: str) -> str:
    """With a star where the verdict is another one."""
    text = shown_small(getattr(each, TESTS[name]))
    return f"{text}*" if name in each.changed else text


def _difference(each: Retest) -> str:
    return "–" if each.difference is None else each.shown(each.difference)


def _equal(each: Retest) -> str:
    """Whether the two are equal within the margin."""
    if each.is_equal is None:
        return "–"
    return f"{'yes' if each.is_equal else 'no'} ({shown_small(each.equivalence_p)})"


SHOWN = ("df = n − 1", "Welch", "Holm, Welch", "Holm over all, Welch")


def _table(study: Study, rows: Sequence[Retest]) -> Table:
    """The tests of one study, for a terminal."""
    table = Table(
        title=Text(f"{study.name}: {study.question}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("cell", "against"):
        table.add_column(name, overflow="fold")
    for name in ("difference", "published", *SHOWN, "equal"):
        table.add_column(name, justify="right")
    for each in rows:
        if each.p is None:
            continue
        cells = [each.cell, each.against, _difference(each), each.printed]
        cells += [_p(each, name) for name in SHOWN]
        table.add_row(*map(Text, [*cells, _equal(each)]))  # not as rich's markup
    return table


# ---- The page


def _page(studies: Sequence[Study], found: Sequence[Retest], files: Sequence[Path]) -> str:
    parts = ["# Printed figures, tested again", *HOW]
    parts.append("\n".join(f"- {line}" for line in _summary(studies, found)))

    parts += ["## Verdicts that change", _changes(found)]
    equal = [
        each
        for each in found
        if each.published is False and each.is_equal is not None and not each.also_in
    ]
    if equal:
        title = "## No significant difference: does that mean equal?"
        parts += [title, _equalities(equal)]
    parts.append("## All tests")
    for study, rows in _by_study(studies, found):
        tested = [each for each in rows if each.p is not None]
        if tested:
            parts += [f"### {study.name}", study.question, _whole_table(tested)]
    missing = _untested(found)
    if missing:
        parts += ["## What cannot be tested again", "\n".join(missing)]
    parts.append(f"Again: `flockstep retest {' '.join(map(str, files))}`.")
    return "\n\n".join(parts) + "\n"


def _changes(found: Sequence[Retest]) -> str:
    changed = [each for each in found if each.changed and not each.also_in]
    if not changed:
        return "None."
    columns = ("study", "cell", "against", "difference", "published", "changes by")
    rows = [
        [
            each.study,
            each.cell,
            each.against,
            _difference(each),
            each.printed,
            ", ".join(
                f"{name}: {shown_small(getattr(each, TESTS[name]))}" for name in each.changed
            ),
        ]
        for each in changed
    ]
    lines = [f"- {each.study}: {each.words}" for each in changed]
    return "\n".join([*_markdown(columns, rows), "", *lines])


def _equalities(rows: Sequence[Retest]) -> str:
    columns = (
        "study",
        "cell",
        "against",
        "difference",
        "margin",
        "equal (TOST p)",
        "p after Holm's correction",
    )
    table = [
        [
            each.study,
            each.cell,
            each.against,
            _difference(each),
            each.shown(each.margin or 0.0, signed=False),
            _equal(each),
            shown_small(each.corrected_equivalence_p),
        ]
        for each in rows
    ]
    return "\n".join(_markdown(columns, table))


def _whole_table(rows: Sequence[Retest]) -> str:
    columns = ("cell", "against", "difference", "published", *TESTS, "two-sided, Welch")
    table = [
        [
            each.cell,
            each.against,
            _difference(each),
            each.printed,
            *(_p(each, name) for name in TESTS),
            shown_small(each.two_sided_p),
        ]
        for each in rows
    ]
    note = f"Tests in this table: {rows[0].tests_in_table}; over all: {rows[0].tests_overall}."
    for study in dict.fromkeys(each.also_in for each in rows if each.also_in):
        note += f" {sum(each.also_in == study for each in rows)} of them stand in {study}, too."
    sources = ", ".join(dict.fromkeys(each.source for each in rows if each.source))
    lines = _markdown(columns, table)
    return "\n".join([*lines, "", f"{note} Published in: {sources}." if sources else note])


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]


def _write(path: Path, text: str) -> None:
    """All of it, or nothing."""
    with empty_folders_removed(path.parent):
        reason = why_not(path.parent)
        try:
            if reason is None:
                write_whole(path, text)
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            rule = "be a file that can be written"
            raise InvalidField(f"'--page' must {rule} (got {str(path)!r}: {reason})")
