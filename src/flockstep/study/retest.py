"""What a paper printed, tested again: from means, deviations and numbers of runs alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from flockstep.fields import require
from flockstep.study.cells import Cell
from flockstep.study.declaration import UNITS, Hypothesis, PrintedTest, Published, Study
from flockstep.units import shown_number

if TYPE_CHECKING:
    from flockstep.study.statistics import Sample, Test

# The tests by name, and where their p-values stand.
TESTS = {
    "df = n − 1": "p",
    "Welch": "welch_p",
    "Holm, df = n − 1": "corrected_p",
    "Holm, Welch": "corrected_welch_p",
    "Holm over all, df = n − 1": "overall_p",
    "Holm over all, Welch": "overall_welch_p",
}


@dataclass(frozen=True)
class Retest:
    """Two printed figures, tested again, and what was published of them.

    Fields:
        study: its name.
        cell: the label of the one; against: the levels that the other has instead.
        figures: of both sides, the number of runs, mean and deviation; none where not printed.
        difference: of the means, the cell's less the other's, in our unit.
        is_percent: whether they were printed in per cent.
        tail: what a small p speaks for: "greater", "less" or "two-sided".
        is_tail_known: whether the paper or a hypothesis says so; else it is the side on which the
            printed difference is, which gives the smallest p that a one-tailed test can.
        p: with the smaller n − 1 degrees of freedom. welch_p: with Welch's, `df`.
        p_range, welch_p_range: the least and the largest that they can be, since the printed
            figures are rounded: all of a study as its most precise one.
        two_sided_p: with Welch's, whatever the tail.
        corrected_p, corrected_welch_p: by Holm, over the study's table of `tests_in_table` tests.
        overall_p, overall_welch_p: by Holm, over `tests_overall` tests of all studies given; of
            figures that several studies have, one test.
        margin, equivalence_p: of two one-sided Welch tests (TOST), in our unit;
            corrected_equivalence_p: by Holm, over the study's table.
        alpha: the study's.
        published: whether a significant difference was; None where nothing is said.
        printed_p: if one was. printed: the verdict in words. source: where.
        missing: why there is nothing to test; empty where there is.
        also_in: the earlier study that has the same test, as its figures stand in both.
    """

    study: str
    cell: str
    against: str
    figures: tuple[tuple[int, float, float], tuple[int, float, float]] | None = None
    difference: float | None = None
    is_percent: bool = False
    tail: str = ""
    is_tail_known: bool = False
    p: float | None = None
    welch_p: float | None = None
    df: float | None = None
    p_range: tuple[float, float] | None = None
    welch_p_range: tuple[float, float] | None = None
    two_sided_p: float | None = None
    corrected_p: float | None = None
    corrected_welch_p: float | None = None
    overall_p: float | None = None
    overall_welch_p: float | None = None
    tests_in_table: int = 0
    tests_overall: int = 0
    margin: float | None = None
    equivalence_p: float | None = None
    corrected_equivalence_p: float | None = None
    alpha: float = 0.05
    published: bool | None = None
    printed_p: float | None = None
    printed: str = ""
    source: str = ""
    missing: str = ""
    also_in: str = ""

    @property
    def verdicts(self) -> dict[str, bool]:
        """Of each test, whether it finds a significant difference."""
        values = {name: getattr(self, field) for name, field in TESTS.items()}
        return {name: p < self.alpha for name, p in values.items() if p is not None}

    @property
    def changed(self) -> tuple[str, ...]:
        """The tests that find another verdict than the published one."""
        if self.published is None:
            return ()
        return tuple(name for name, found in self.verdicts.items() if found != self.published)

    @property
    def rounded_away(self) -> tuple[str, ...]:
        """The tests, before corrections, of which rounding leaves open what they find."""
        ranges = {"df = n − 1": self.p_range, "Welch": self.welch_p_range}
        return tuple(
            name
            for name, found in ranges.items()
            if found is not None and found[0] < self.alpha <= found[1]
        )

    @property
    def is_equal(self) -> bool | None:
        """Whether the two are shown to be equal within the margin, by this test alone."""
        return None if self.equivalence_p is None else self.equivalence_p < self.alpha

    @property
    def fitting(self) -> str:
        """The test whose p is nearest to the printed one: "df = n − 1" or "Welch"."""
        if self.printed_p is None or self.p is None or self.welch_p is None:
            return ""
        distances = {"df = n − 1": self.p, "Welch": self.welch_p}
        return min(distances, key=lambda name: abs(distances[name] - self.printed_p))  # type: ignore[operator]

    @property
    def words(self) -> str:
        """What becomes of the published verdict."""
        gap = "" if self.difference is None else f" ({self.shown(self.difference)})"
        start = f"{self.cell} against {self.against}{gap}: "
        if self.missing:
            return f"{start}published: {self.printed}; {self.missing}."
        return f"{start}{self._verdict()}{self._equality()}"

    def _verdict(self) -> str:
        if self.published is None:
            return f"no verdict is printed; Welch: p = {shown_small(self.welch_p)}."
        published = f"published: {self.printed}; "
        if not self.changed:
            return f"{published}no test changes that."
        named = [f"{name} (p = {shown_small(getattr(self, TESTS[name]))})" for name in self.changed]
        now = "not significant" if self.published else "significant"
        said = f"{published}{now} by {', '.join(named)}."
        unsure = [name for name in self.rounded_away if name in self.changed]
        if unsure:
            said += f" By {' and '.join(unsure)}, rounding of the printed figures leaves it open."
        if self.published:
            return said
        if not self.is_tail_known:
            assert self.two_sided_p is not None
            either = "significant" if self.two_sided_p < self.alpha else "not significant"
            said += (
                " The paper names no tail; this one is that of the printed difference. Two-sided, "
                f"it is {either} (Welch: {shown_small(self.two_sided_p)})."
            )
        if "Holm, Welch" not in self.changed:
            corrected = shown_small(self.corrected_welch_p)
            count = self.tests_in_table
            said += f" After Holm's correction for {count} tests it is not (Welch: {corrected})."
        return said

    def _equality(self) -> str:
        if self.margin is None or self.published is not False:
            return ""
        margin = self.shown(self.margin, signed=False)
        p = shown_small(self.equivalence_p)
        if self.is_equal:
            return f" Equal within ±{margin} (TOST p = {p})."
        return f" Not shown to be equal within ±{margin} (TOST p = {p})."

    def shown(self, difference: float, signed: bool = True) -> str:
        """A difference as people read it."""
        sign = "+" if signed and difference > 0 else ""
        text = f"{100 * difference:.2f} points" if self.is_percent else shown_number(difference)
        return f"{sign}{text}".replace("-", "−")

    def row(self) -> dict[str, Any]:
        """All of it, for tables and machines."""
        table = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {
            **table,
            "verdicts": self.verdicts,
            "changed": list(self.changed),
            "rounded_away": list(self.rounded_away),
            "is_equal": self.is_equal,
            "fitting": self.fitting,
            "words": self.words,
        }


def retest(*studies: Study) -> tuple[Retest, ...]:
    """Test what papers printed again: no run is made.

    Of each study these pairs of cells: every published figure against that of the baseline, the
    sides of every hypothesis, and the printed tests; where both sides have a mean, a deviation and
    a number of runs. All at the published scale, if the study has one.

    Example:
        for each in fs.retest(fs.Study.from_toml("studies/e2_3_batch.toml")):
            print(each.words)
    """
    require(bool(studies), "studies", "be at least one", None)
    for study in studies:
        require(isinstance(study, Study), "studies", "be of fs.Study", study)
    tables = [_corrected(list(_table(study))) for study in studies]
    return tuple(_corrected_over_all(tables))


def shown_small(value: float | None) -> str:
    """A p-value with the digits that papers print."""
    if value is None:
        return "–"
    return f"{value:.4f}" if value >= 0.0001 else f"{value:.1e}" if value >= 1e-12 else "< 1e-12"


# ---- Which pairs


@dataclass
class _Pair:
    """Two cells, and who speaks of them."""

    cell: Cell
    other: Cell
    hypothesis: Hypothesis | None = None
    test: PrintedTest | None = None

    def take(self, test: PrintedTest) -> None:
        """The one that names more levels counts, of equal ones the later."""
        if self.test is None or _levels_in(test) >= _levels_in(self.test):
            self.test = test


def _levels_in(test: PrintedTest) -> int:
    return len(test.cell) + len(test.against)


def _table(study: Study) -> Iterator[Retest]:
    scale = study.at_full_scale() if study.full else study
    figures = {
        cell.label: figure for figure in scale.printed for cell in scale.cells_of_figure(figure)
    }
    step = _step(scale.printed)
    for pair in _pairs(scale, figures):
        one, two = (figures.get(each.label) for each in (pair.cell, pair.other))
        yield _retested(study, pair, one, two, step)


def _step(figures: Sequence[Published]) -> float:
    """The last digit that is printed: 0.01 of 91.52 and 0.7, as the latter may be 0.70."""
    printed = [each.mean for each in figures]
    printed += [each.deviation for each in figures if each.deviation is not None]
    exponents = [Decimal(repr(value)).as_tuple().exponent for value in printed]
    return float(10.0 ** min([each for each in exponents if isinstance(each, int)], default=0))


def _pairs(study: Study, figures: Mapping[str, Published]) -> list[_Pair]:
    """In the order of the figures, then of the hypotheses, then of the printed tests."""
    pairs: dict[tuple[str, str], _Pair] = {}

    def pair_of(cell: Cell, other: Cell) -> _Pair:
        return pairs.setdefault((cell.label, other.label), _Pair(cell, other))

    for figure in study.printed:
        for cell in study.cells_of_figure(figure):
            other = study.partner(cell, study.baseline_levels)
            if other is not None and other is not cell and _have_spread(figures, cell, other):
                pair_of(cell, other)
    for hypothesis in study.claims:
        if hypothesis.than:
            continue  # of four printed figures
        for cell, other in study.pairs_of(hypothesis):
            if _have_spread(figures, cell, other):
                pair = pair_of(cell, other)
                pair.hypothesis = pair.hypothesis or hypothesis
    for test in study.tests_printed:
        for cell, other in study.pairs_of_printed(test):
            pair_of(cell, other).take(test)
    return list(pairs.values())


def _have_spread(figures: Mapping[str, Published], *cells: Cell) -> bool:
    return all(_has_spread(figures.get(cell.label)) for cell in cells)


def _has_spread(figure: Published | None) -> bool:
    return figure is not None and figure.deviation is not None and figure.n is not None


# ---- Testing


def _retested(
    study: Study, pair: _Pair, one: Published | None, two: Published | None, step: float
) -> Retest:
    from flockstep.study.comparisons import printed_sample

    draft = _draft(study, pair)
    if not _has_spread(one) or not _has_spread(two):
        return _without_figures(draft, pair)
    assert one is not None
    assert two is not None
    a, b = printed_sample(one), printed_sample(two)
    draft = dataclasses.replace(
        draft,
        difference=a.mean - b.mean,
        is_percent="%" in (one.unit, two.unit),
        source=draft.source or one.source,
        tail=draft.tail or ("less" if a.mean < b.mean else "greater"),
    )
    rounding = max(one.in_our_unit(step), two.in_our_unit(step)) / 2
    return _tested(draft, a, b, rounding)


def _draft(study: Study, pair: _Pair) -> Retest:
    """What is said of the pair, without its figures."""
    test, hypothesis = pair.test, pair.hypothesis
    tail = test.tail if test is not None else None
    published, printed, source, printed_p, margin = None, "–", "", None, study.margin
    if hypothesis is not None:
        margin = study.margin_of(hypothesis)
        published, source = hypothesis.expect != "equal", hypothesis.source
        printed = f"{hypothesis.expect}, without a test"
        tail = tail or _tail_of(study, hypothesis)
    if test is not None:
        published, printed_p = _is_significant(test, study.alpha), test.p
        verdict = "significant" if published else "not significant"
        printed = verdict if test.p is None else f"{verdict} (p = {test.p:g})"
        source = test.source
    return Retest(
        study.name,
        pair.cell.label,
        _what_differs(pair),
        tail=tail or "",
        is_tail_known=tail is not None,
        margin=margin,
        alpha=study.alpha,
        published=published,
        printed_p=printed_p,
        printed=printed,
        source=source,
    )


def _is_significant(test: PrintedTest, alpha: float) -> bool:
    if test.significant is not None:
        return test.significant
    return test.p is not None and test.p < alpha


def _tail_of(study: Study, hypothesis: Hypothesis) -> str | None:
    if hypothesis.expect == "equal":
        return None
    if hypothesis.expect in ("better", "worse"):
        is_greater = (hypothesis.expect == "better") == study.higher_is_better
        return "greater" if is_greater else "less"
    return hypothesis.expect


def _what_differs(pair: _Pair) -> str:
    """The levels of the other cell that are not those of the one."""
    own, other = pair.cell.labels, pair.other.labels
    names = [name for name in pair.other.varying if own[name] != other[name]]
    return ", ".join(f"{name}={other[name]}" for name in names) or pair.other.label


def _tested(draft: Retest, a: Sample, b: Sample, rounding: float) -> Retest:
    from flockstep.study.statistics import equivalence_test, mean_test

    assert a.deviation is not None
    assert b.deviation is not None
    welch = mean_test(a, b, draft.tail)
    equivalence = None if draft.margin is None else equivalence_test(a, b, draft.margin)
    df = min(a.n, b.n) - 1
    corners = [mean_test(x, y, draft.tail) for x, y in _corners(a, b, rounding)]
    return dataclasses.replace(
        draft,
        figures=((a.n, a.mean, a.deviation), (b.n, b.mean, b.deviation)),
        p=_p_with(welch, df),
        p_range=_range(_p_with(each, df) for each in corners),
        welch_p=welch.p,
        welch_p_range=_range(each.p for each in corners),
        df=welch.df,
        two_sided_p=mean_test(a, b).p,
        equivalence_p=None if equivalence is None else equivalence.p,
    )


def _corners(a: Sample, b: Sample, rounding: float) -> Iterator[tuple[Sample, Sample]]:
    """Both sides before they were rounded, at the ends of what is possible: the means by turns
    nearer and farther, the deviations by turns smaller and larger.
    """

    def moved(sample: Sample, mean: float, deviation: float) -> Sample:
        spread = max(0.0, (sample.deviation or 0.0) + deviation)
        return dataclasses.replace(sample, mean=sample.mean + mean, deviation=spread)

    ends = (-rounding, rounding)
    for gap, one, other in itertools.product(ends, ends, ends):
        yield moved(a, gap, one), moved(b, -gap, other)


def _range(values: Iterable[float]) -> tuple[float, float]:
    given = list(values)
    return min(given), max(given)


def _p_with(test: Test, df: float) -> float:
    """The p of the same statistic with other degrees of freedom."""
    from scipy import stats

    if test.df is None:  # no spread
        return test.p
    if test.alternative == "two-sided":
        return float(2 * stats.t.sf(abs(test.statistic), df))
    sign = 1.0 if test.alternative == "greater" else -1.0
    return float(stats.t.sf(sign * test.statistic, df))


def _without_figures(draft: Retest, pair: _Pair) -> Retest:
    """What can be said where only a verdict, or a difference and a p, is printed."""
    test = pair.test
    missing = "no figures are printed"
    if test is None or test.difference is None:
        return dataclasses.replace(draft, missing=missing)
    gap = test.difference * UNITS[test.unit]
    draft = dataclasses.replace(draft, difference=gap, is_percent=test.unit == "%")
    if test.p is None or test.n is None or not 0 < test.p < 0.5:
        return dataclasses.replace(draft, missing=missing)
    low, high = _welch_range(test.p, test.n, test.tail == "two-sided")
    missing = (
        "no deviations are printed; if it was tested with df = n − 1, Welch's p is "
        f"between {shown_small(low)} and {shown_small(high)} whatever they were"
    )
    if draft.margin is not None and abs(gap) >= draft.margin:
        margin = draft.shown(draft.margin, signed=False)
        missing += f", and equality within ±{margin} cannot be shown of such a difference"
    return dataclasses.replace(draft, missing=missing)


def _welch_range(p: float, n: int, is_two_sided: bool) -> tuple[float, float]:
    """The p of the same t with from 2n − 2 down to n − 1 degrees of freedom, between which Welch's
    are.
    """
    from scipy import stats

    tails = 2 if is_two_sided else 1
    statistic = stats.t.isf(p / tails, n - 1)
    return float(tails * stats.t.sf(statistic, 2 * n - 2)), p


# ---- Correcting


def _corrected(table: list[Retest]) -> list[Retest]:
    """Over one table."""
    count = sum(each.p is not None for each in table)
    table = [dataclasses.replace(each, tests_in_table=count) for each in table]
    table = _with_holm(table, "p", "corrected_p")
    table = _with_holm(table, "welch_p", "corrected_welch_p")
    return _with_holm(table, "equivalence_p", "corrected_equivalence_p")


def _corrected_over_all(tables: Sequence[list[Retest]]) -> list[Retest]:
    """Over all tables, where the same figures in two of them are one test."""
    everything: list[Retest] = []
    tests: list[Any] = []
    first: dict[Any, str] = {}
    for table in tables:
        seen: Counter[Any] = Counter()
        for each in table:
            figures = (each.figures, each.tail)
            seen[figures] += 1  # the same once more in one table is another test
            test = (figures, seen[figures])
            tests.append(test)
            study = each.study if each.figures is None else first.setdefault(test, each.study)
            also_in = "" if study == each.study else study
            everything.append(dataclasses.replace(each, also_in=also_in))
    everything = [dataclasses.replace(each, tests_overall=len(first)) for each in everything]

    everything = _with_holm(everything, "p", "overall_p", tests.__getitem__)
    return _with_holm(everything, "welch_p", "overall_welch_p", tests.__getitem__)


def _with_holm(
    rows: list[Retest], source: str, target: str, test_of: Callable[[int], Any] = lambda at: at
) -> list[Retest]:
    """Rows of one test, by place, count once."""
    from flockstep.study.statistics import holm

    p_values = {
        test_of(place): getattr(each, source)
        for place, each in enumerate(rows)
        if getattr(each, source) is not None
    }
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    found: list[dict[str, Any]] = [{target: corrected.get(test_of(at))} for at in range(len(rows))]
    return [dataclasses.replace(each, **p) for each, p in zip(rows, found, strict=True)]
