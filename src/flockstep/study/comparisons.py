"""Comparisons: two cells, a test, and a verdict in words.

The rules, which every report repeats (`RULES`):

- Each table is one family: its p-values are corrected by Holm's method.
- A difference is shown where the corrected p is below alpha. Two cells are equal where two
  one-sided tests with the declared margin say so. Else it is open, and the difference that these n
  could have seen is told.
- A claim agrees where what it expects is shown; it disagrees where the opposite is shown: the other
  direction, equality in place of a difference, or a difference beyond the margin in place of
  equality; else there was too little power.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flockstep.study.cells import Cell
from flockstep.study.declaration import Published, Study
from flockstep.study.figures import shown_figure
from flockstep.study.findings import (
    AGREES,
    BASELINE,
    DISAGREES,
    EQUAL,
    GREATER,
    HYPOTHESIS,
    LESS,
    OPEN,
    OPPOSITE,
    PUBLISHED,
    TOO_FEW,
    TOO_LITTLE,
)
from flockstep.study.metrics import is_cost
from flockstep.study.sides import Sides
from flockstep.study.statistics import (
    Sample,
    Test,
    TimesToTarget,
    effect_size,
    holm,
    log_rank_test,
    mean_test,
)
from flockstep.study.summaries import times_of
from flockstep.study.wording import detail_of, headline_of, shown_difference

if TYPE_CHECKING:
    from flockstep.study.outcome import Outcome

RULES = (
    "Each table is one family of tests: the p-values of what is expected in its rows are corrected "
    "together by Holm's method, so that the chance that any of them is shown falsely is at most "
    "alpha. Tests of what was not expected are corrected among themselves in the same way.",
    "A difference is shown where the corrected p is below alpha. Two cells are equal where two "
    "one-sided tests (TOST) show, corrected in the same way, that they differ by less than the "
    "declared margin. Otherwise it is open, and the difference is told that these n would have "
    "seen in a single test with a probability of 80 %.",
    "A claim of a direction is tested one-sided. It agrees where it is shown; it disagrees where a "
    "two-sided test shows the opposite, or equality is shown. A claim of equality agrees where "
    "equality is shown, and disagrees where a two-sided test shows a difference beyond the margin: "
    "one that is sure, but may be smaller than that, refutes nothing. Otherwise there was too "
    "little power.",
    "A published figure is a claim, too. By difference: that its cell differs from the baseline in "
    "the direction in which the published means do, or is equal to it where these differ by no "
    "more than the margin. By value: that the mean here equals the printed one within the margin.",
)


@dataclass(frozen=True)
class Comparison:
    """Two cells side by side, and what can be said of them.

    Fields:
        family: the table that it belongs to: "baseline", "hypothesis" or "published".
        cell, against: their labels.
        expect: "different", "greater", "less" or "equal": of the cell against the other one.
        n, means, deviations: of both sides; of a cost to a target the medians, and no deviations.
        difference: of the means, the cell's less the other's; interval: 95 %.
        test: its name and alternative. p: of what is expected. corrected_p: by Holm, in its family.
        paired_p: two-sided, of runs with the same seeds; None where they do not start alike.
        margin, equivalence_p: of two one-sided tests, corrected; None without a margin.
        effect_size: Hedges' g. improvement: the probability that a run of the cell beats one of the
            other side.
        detectable: the difference that these n would have seen with a probability of 80 %.
        wanted, power: the margin, or the published difference, and the probability to see one as
            large.
        finding: "greater", "less", "equal", "open" or "too few runs": of the cell's metric.
        verdict: of a claim, "agrees", "disagrees" or "too little power"; else the finding.
        headline, detail: all of it in words.
        claim, source: of a hypothesis or a published figure.
        published: the difference that was published, in our unit.
        printed_p: two-sided Welch, from the printed figures alone.
    """

    family: str
    cell: str
    against: str
    metric: str
    expect: str
    n: tuple[int, int]
    means: tuple[float | None, float | None] = (None, None)
    deviations: tuple[float | None, float | None] = (None, None)
    difference: float | None = None
    interval: tuple[float, float] | None = None
    test: str = ""
    p: float | None = None
    corrected_p: float | None = None
    paired_p: float | None = None
    margin: float | None = None
    equivalence_p: float | None = None
    effect_size: float | None = None
    improvement: float | None = None
    detectable: float | None = None
    power: float | None = None
    wanted: float | None = None
    finding: str = TOO_FEW
    verdict: str = TOO_FEW
    headline: str = ""
    detail: str = ""
    claim: str = ""
    source: str = ""
    published: float | None = None
    printed_p: float | None = None

    @property
    def words(self) -> str:
        """All of it in words."""
        return f"{self.headline} {self.detail}".strip()

    def row(self) -> dict[str, Any]:
        """As a row of a table: a column for each figure."""
        row = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name, plural in (("n", "n"), ("mean", "means"), ("deviation", "deviations")):
            one, other = row.pop(plural)
            row |= {name: one, f"{name}_against": other}
        low, high = row.pop("interval") or (None, None)
        return {**row, "interval_low": low, "interval_high": high}


def compared(outcome: Outcome) -> list[Comparison]:
    """All comparisons of a study."""
    families = (_with_baseline(outcome), _hypotheses(outcome), _published(outcome))
    return [each for family in families for each in _judged(outcome, family)]


# ---- Which pairs


@dataclass(frozen=True)
class _Pair:
    """Two cells to compare, and all tests that a verdict may need."""

    draft: Comparison
    forward: Test | None = None  # of what is expected, or two-sided
    two_sided: Test | None = None
    equivalence: Test | None = None
    beyond: Test | None = None  # the margin: of claims of equality
    needed: int | None = None  # runs per side to see the published difference
    missing: str = ""  # why there is nothing to test

    @property
    def decisive(self) -> Test | None:
        """The test of what is expected."""
        is_of_equality = self.draft.expect == EQUAL and self.equivalence is not None
        return self.equivalence if is_of_equality else self.forward


def _with_baseline(outcome: Outcome) -> list[_Pair]:
    study, levels = outcome.study, outcome.study.baseline_levels
    pairs = []
    for cell in study.cells:
        other = study.partner(cell, levels)
        if other is None or other is cell:
            continue
        pairs.append(_pair(outcome, cell, other, BASELINE, "different", study.margin))
    return pairs


def _hypotheses(outcome: Outcome) -> list[_Pair]:
    pairs = []
    for hypothesis in outcome.study.claims:
        expect = _plain_expectation(outcome.study, hypothesis.expect)
        margin = outcome.study.margin_of(hypothesis)
        about = {"claim": hypothesis.claim, "source": hypothesis.source}
        for pair in outcome.study.pairs_of(hypothesis):
            than = outcome.study.pair_at(hypothesis, pair)
            if than is None:
                pairs.append(_pair(outcome, *pair, HYPOTHESIS, expect, margin, about))
            else:
                pairs.append(_pair_of_differences(outcome, pair, than, expect, margin, about))
    return pairs


def _plain_expectation(study: Study, expect: str) -> str:
    if expect in ("better", "worse"):
        is_greater = (expect == "better") == study.higher_is_better
        return GREATER if is_greater else LESS
    return expect


def _published(outcome: Outcome) -> list[_Pair]:
    study = outcome.study
    by_cell: dict[str, Published] = {}
    for printed in study.printed:
        for cell in study.cells_of_figure(printed):
            by_cell[cell.label] = printed
    pairs = []
    for cell in study.cells:
        if cell.label not in by_cell:
            continue
        figure = by_cell[cell.label]
        if study.published_by == "value":
            pairs.append(_against_value(outcome, cell, figure))
            continue
        other = study.partner(cell, study.baseline_levels)
        if other is None or other is cell or other.label not in by_cell:
            continue
        pairs.append(_against_difference(outcome, cell, other, figure, by_cell[other.label]))
    return pairs


def printed_sample(figure: Published) -> Sample:
    """A published figure in our unit."""
    deviation = None if figure.deviation is None else figure.in_our_unit(figure.deviation)
    return Sample.printed(figure.in_our_unit(figure.mean), deviation, figure.n)


def _against_difference(
    outcome: Outcome, cell: Cell, other: Cell, figure: Published, base: Published
) -> _Pair:
    """The published difference says what is to be expected of ours."""
    one, two = printed_sample(figure), printed_sample(base)
    gap = one.mean - two.mean
    margin = outcome.study.margin
    is_small = abs(gap) <= (margin or 0.0)
    expect = EQUAL if is_small and margin else GREATER if gap > 0 else LESS
    knows_spread = one.deviation is not None and two.deviation is not None
    printed_p = mean_test(one, two).p if knows_spread else None
    about = {
        "claim": f"published: {shown_difference(outcome, gap)}",
        "source": figure.source,
        "published": gap,
        "printed_p": printed_p,
    }
    return _pair(outcome, cell, other, PUBLISHED, expect, margin, about)


def _against_value(outcome: Outcome, cell: Cell, figure: Published) -> _Pair:
    """Our mean is to equal the printed one, within the margin."""
    printed, margin = printed_sample(figure), outcome.study.margin
    values = _known(outcome, cell)
    draft = Comparison(
        PUBLISHED,
        cell.label,
        f"published ({figure.source})" if figure.source else "published",
        outcome.study.metric,
        EQUAL,
        (len(values), printed.n),
        margin=margin,
        claim=f"published: {shown_figure(printed.mean, outcome.study.metric, outcome.is_percent)}",
        source=figure.source,
        published=printed.mean,
    )
    if len(values) < 2:
        return _Pair(draft, missing=_too_few(draft))
    return _tested(outcome, draft, Sample.of(values), printed, margin)


def _pair(
    outcome: Outcome,
    cell: Cell,
    other: Cell,
    family: str,
    expect: str,
    margin: float | None,
    about: dict[str, Any] | None = None,
) -> _Pair:
    metric = outcome.study.metric
    draft = Comparison(
        family, cell.label, other.label, metric, expect, (0, 0), margin=margin, **(about or {})
    )
    if is_cost(metric):
        return _timed(
            outcome, draft, times_of(outcome, cell, metric), times_of(outcome, other, metric)
        )
    values, others = _known(outcome, cell), _known(outcome, other)
    draft = dataclasses.replace(draft, n=(len(values), len(others)))
    if min(draft.n) < 2:
        return _Pair(draft, missing=_too_few(draft))
    pairs = _seed_pairs(outcome, cell, other)
    return _tested(outcome, draft, Sample.of(values), Sample.of(others), margin, pairs)


def _pair_of_differences(
    outcome: Outcome,
    pair: tuple[Cell, Cell],
    than: tuple[Cell, Cell],
    expect: str,
    margin: float | None,
    about: dict[str, Any],
) -> _Pair:
    """Two differences, each taken seed by seed, in the place of two figures."""
    one, two = _differences(outcome, *pair), _differences(outcome, *than)
    cell, against = (f"({one.label}) − ({other.label})" for one, other in (pair, than))
    metric, n = outcome.study.metric, (len(one), len(two))
    draft = Comparison(HYPOTHESIS, cell, against, metric, expect, n, margin=margin, **about)
    if min(n) < 2:
        return _Pair(draft, missing=_too_few(draft))
    return _tested(outcome, draft, Sample.of(one), Sample.of(two), margin)


def _differences(outcome: Outcome, cell: Cell, other: Cell) -> list[float]:
    values, others = outcome.values(cell), outcome.values(other)
    pairs = [(value, others.get(seed)) for seed, value in values.items()]
    return [a - b for a, b in pairs if a is not None and b is not None]


def _known(outcome: Outcome, cell: Cell) -> list[float]:
    return [value for value in outcome.values(cell).values() if value is not None]


def _too_few(draft: Comparison) -> str:
    one, other = draft.n
    return f"too few runs: a test needs at least 2 on each side (n = {one} and {other})"


# Runs of the same seed have the same start and the same order of data if these are alike.
_SHARED = ("task", "workers", "batch_size", "assignment", "sampling", "validation")


def _seed_pairs(outcome: Outcome, cell: Cell, other: Cell) -> list[tuple[float, float]]:
    """The figures of runs that start alike, seed by seed; none where the cells do not."""
    one, two = (each.spec(outcome.study.seed_list[0]).resolved() for each in (cell, other))
    if any(getattr(one, name) != getattr(two, name) for name in _SHARED):
        return []
    values, others = outcome.values(cell), outcome.values(other)
    shared = [seed for seed in values if seed in others]
    pairs = [(values[seed], others[seed]) for seed in shared]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


# ---- Testing


def _tested(
    outcome: Outcome,
    draft: Comparison,
    a: Sample,
    b: Sample,
    margin: float | None,
    pairs: Sequence[tuple[float, float]] = (),
) -> _Pair:
    study = outcome.study
    is_paired = study.test == "paired" and len(pairs) > 1
    if is_paired:  # runs without a partner have no say
        a, b = Sample.of(x for x, _ in pairs), Sample.of(y for _, y in pairs)
        draft = dataclasses.replace(draft, n=(a.n, b.n))
    sides = Sides(a, b, tuple(pairs), is_paired)
    expected = draft.expect if draft.expect in OPPOSITE else "two-sided"
    # What it would be good to see: the published difference, or one that is just not to be ignored.
    is_of_a_difference = draft.published is not None and draft.expect != EQUAL
    wanted = abs(draft.published or 0.0) if is_of_a_difference else margin

    draft = dataclasses.replace(
        draft,
        means=(a.mean, b.mean),
        deviations=(a.deviation, b.deviation),
        difference=a.mean - b.mean,
        interval=sides.interval(),
        paired_p=sides.paired_p(),
        effect_size=effect_size(a, b),
        improvement=sides.improvement(study.higher_is_better),
        detectable=sides.detectable(study.alpha, expected),
        power=sides.power(wanted, study.alpha, expected),
        wanted=wanted,
    )
    return _Pair(
        draft,
        forward=sides.test(expected),
        two_sided=sides.test("two-sided"),
        equivalence=None if margin is None else sides.equivalence(margin),
        beyond=sides.beyond(margin) if margin is not None and draft.expect == EQUAL else None,
        needed=sides.runs_needed(wanted, study.alpha, expected),
    )


def _timed(
    outcome: Outcome, draft: Comparison, a: TimesToTarget | None, b: TimesToTarget | None
) -> _Pair:
    """Costs to a target: runs that did not reach it count as censored."""
    draft = dataclasses.replace(draft, n=(a.n if a else 0, b.n if b else 0))
    if a is None or b is None or min(draft.n) < 2:
        return _Pair(draft, missing=_too_few(draft))
    expected = draft.expect if draft.expect in OPPOSITE else "two-sided"
    forward = log_rank_test(a, b, expected)
    medians = (a.median, b.median)
    gap = None if a.median is None or b.median is None else a.median - b.median
    draft = dataclasses.replace(draft, means=medians, difference=gap)
    return _Pair(draft, forward, two_sided=log_rank_test(a, b))


# ---- Judging


def _judged(outcome: Outcome, pairs: list[_Pair]) -> list[Comparison]:
    """The comparisons of one family, corrected together."""
    tested = [pair for pair in pairs if pair.forward is not None]
    corrected = {
        name: dict(zip(map(id, some), holm([getattr(each, name).p for each in some]), strict=True))
        for name in ("decisive", "two_sided", "equivalence", "beyond")
        if (some := [each for each in tested if getattr(each, name) is not None])
    }
    done = []
    for pair in pairs:
        ps = {name: known.get(id(pair)) for name, known in corrected.items()}
        done.append(_with_verdict(outcome, pair, ps))
    return done


def _with_verdict(outcome: Outcome, pair: _Pair, ps: dict[str, float | None]) -> Comparison:
    draft, alpha = pair.draft, outcome.study.alpha
    if pair.forward is None:
        headline = f"{draft.cell} against {draft.against}: {pair.missing}."
        return dataclasses.replace(draft, headline=headline)
    decisive = pair.decisive
    assert decisive is not None
    finding = _finding(pair, ps, alpha)
    verdict = finding if draft.family == BASELINE else _agreement(pair, finding, ps, alpha)
    told = dataclasses.replace(
        draft,
        p=decisive.p,
        corrected_p=ps["decisive"],
        test=f"{decisive.name}, {decisive.alternative}",
        equivalence_p=ps.get("equivalence"),
        finding=finding,
        verdict=verdict,
    )
    return dataclasses.replace(
        told, headline=headline_of(outcome, told), detail=detail_of(outcome, told, pair.needed)
    )


def _finding(pair: _Pair, ps: dict[str, float | None], alpha: float) -> str:
    """What is shown. Of a small difference that is sure, both may be: then that it is small counts
    where equality was expected, and that it is there elsewhere.
    """

    def shown(name: str) -> bool:
        p = ps.get(name)
        return p is not None and p < alpha

    expect = pair.draft.expect
    if expect == EQUAL and pair.equivalence is not None and shown("decisive"):
        return EQUAL
    if expect in OPPOSITE and shown("decisive"):
        return expect
    if shown("two_sided") and _sign(pair) != expect:
        return _sign(pair)
    return EQUAL if shown("equivalence") else OPEN


def _sign(pair: _Pair) -> str:
    """Which way a difference goes, by the test itself: of costs to a target, medians may be
    unknown, or say otherwise.
    """
    assert pair.two_sided is not None
    return LESS if pair.two_sided.statistic < 0 else GREATER


def _agreement(pair: _Pair, finding: str, ps: dict[str, float | None], alpha: float) -> str:
    if finding == OPEN:
        return TOO_LITTLE
    if finding == pair.draft.expect:
        return AGREES
    p_beyond = ps.get("beyond")
    is_within_perhaps = p_beyond is not None and p_beyond >= alpha
    return TOO_LITTLE if is_within_perhaps else DISAGREES
