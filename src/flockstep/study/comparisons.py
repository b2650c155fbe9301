"""Comparisons: two cells, a test, and a verdict in words.

The rules, which every report repeats (`RULES`):

- Each table is one family: its p-values are corrected by Holm's method.
- A difference is shown where the corrected p is below alpha. Two cells are equal where two
  one-sided tests with the declared margin say so. Else it is open, and the difference that these n
  could have seen is told.
- A claim agrees where what it expects is shown; it disagrees where the opposite, or equality in
  place of a difference, is shown; else there was too little power.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flockstep.study.cells import Cell
from flockstep.study.declaration import Published, Study
from flockstep.study.figures import shown_figure, shown_p
from flockstep.study.metrics import LIMITS
from flockstep.study.statistics import (
    Sample,
    Test,
    TimesToTarget,
    detectable_difference,
    difference_interval,
    effect_size,
    equivalence_test,
    holm,
    log_rank_test,
    mean_test,
    paired_detectable_difference,
    paired_difference_interval,
    paired_equivalence_test,
    paired_test,
    power_of_test,
    probability_of_improvement,
    runs_needed,
)
from flockstep.study.summaries import times_of

if TYPE_CHECKING:
    from flockstep.study.outcome import Outcome

BASELINE, HYPOTHESIS, PUBLISHED = "baseline", "hypothesis", "published"
GREATER, LESS, EQUAL, OPEN, TOO_FEW = "greater", "less", "equal", "open", "too few runs"
AGREES, DISAGREES, TOO_LITTLE = "agrees", "disagrees", "too little power"
OPPOSITE = {"greater": "less", "less": "greater"}
RULES = (
    "Each table is one family of tests: its p-values are corrected by Holm's method, so that the "
    "chance of any false alarm in a table is at most alpha.",
    "A difference is shown where the corrected p is below alpha. Two cells are equal where two "
    "one-sided tests (TOST) show, corrected in the same way, that they differ by less than the "
    "declared margin. Otherwise it is open, and the difference is told that these n would have "
    "seen with a probability of 80 %.",
    "A claim agrees where what it expects is shown. It disagrees where the opposite difference is "
    "shown, or equality in place of a difference, or a difference in place of equality. Otherwise "
    "there was too little power.",
    "A published figure is a claim, too: that its cell differs from the baseline as the published "
    "means do, or is equal to it where these differ by no more than the margin.",
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
        power: the probability to see a difference as large as the margin, or the published one.
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
    backward: Test | None = None  # of the opposite
    two_sided: Test | None = None
    equivalence: Test | None = None
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
        for cell, other in outcome.study.pairs_of(hypothesis):
            pairs.append(_pair(outcome, cell, other, HYPOTHESIS, expect, margin, about))
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
        "claim": f"published: {_shown(outcome, gap)}",
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
    if metric in LIMITS:
        return _timed(
            outcome, draft, times_of(outcome, cell, metric), times_of(outcome, other, metric)
        )
    values, others = _known(outcome, cell), _known(outcome, other)
    draft = dataclasses.replace(draft, n=(len(values), len(others)))
    if min(draft.n) < 2:
        return _Pair(draft, missing=_too_few(draft))
    pairs = _seed_pairs(outcome, cell, other)
    return _tested(outcome, draft, Sample.of(values), Sample.of(others), margin, pairs)


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
    one, two = [x for x, _ in pairs], [y for _, y in pairs]
    can_pair = len(pairs) > 1
    is_paired = study.test == "paired" and can_pair
    expected = draft.expect if draft.expect in OPPOSITE else "two-sided"
    opposite = OPPOSITE.get(draft.expect, "two-sided")

    def test(alternative: str) -> Test:
        return paired_test(one, two, alternative) if is_paired else mean_test(a, b, alternative)

    equivalence = None
    if margin is not None:
        equivalence = (
            paired_equivalence_test(one, two, margin)
            if is_paired
            else equivalence_test(a, b, margin)
        )
    forward = test(expected)
    wanted = abs(draft.published) if draft.published and draft.expect != EQUAL else margin
    levels: dict[str, Any] = {"alpha": study.alpha, "alternative": expected}
    has_both = b.values is not None
    detectable, power = None, None
    if not b.is_known_number:
        detectable = (
            paired_detectable_difference(one, two, **levels)
            if is_paired
            else detectable_difference(a, b, **levels)
        )
        power = None if not wanted else power_of_test(a, b, wanted, **levels)
    draft = dataclasses.replace(
        draft,
        means=(a.mean, b.mean),
        deviations=(a.deviation, b.deviation),
        difference=a.mean - b.mean,
        interval=paired_difference_interval(one, two) if is_paired else difference_interval(a, b),
        test=f"{forward.name}, {forward.alternative}",
        paired_p=paired_test(one, two).p if can_pair else None,
        effect_size=effect_size(a, b),
        improvement=_improvement(study, a, b) if has_both else None,
        detectable=detectable,
        power=power,
    )
    needed = None
    if wanted and has_both:
        needed = runs_needed(a, b, wanted, **levels)
    return _Pair(draft, forward, test(opposite), test("two-sided"), equivalence, needed)


def _improvement(study: Study, a: Sample, b: Sample) -> float:
    """The probability that a run of the first cell is better than one of the second."""
    assert a.values is not None
    assert b.values is not None
    share = probability_of_improvement(a.values, b.values)
    return share if study.higher_is_better else 1 - share


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
    draft = dataclasses.replace(
        draft,
        means=medians,
        difference=gap,
        test=f"{forward.name}, {forward.alternative}",
    )
    backward = log_rank_test(a, b, OPPOSITE.get(draft.expect, "two-sided"))
    return _Pair(draft, forward, backward, log_rank_test(a, b))


# ---- Judging


def _judged(outcome: Outcome, pairs: list[_Pair]) -> list[Comparison]:
    """The comparisons of one family, corrected together."""
    tested = [pair for pair in pairs if pair.forward is not None]
    corrected = {
        name: dict(zip(map(id, some), holm([getattr(each, name).p for each in some]), strict=True))
        for name in ("decisive", "backward", "two_sided", "equivalence")
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
        return dataclasses.replace(draft, headline=f"{_sides(draft)}: {pair.missing}.")
    decisive = pair.decisive
    assert decisive is not None
    finding = _finding(pair, ps, alpha)
    verdict = finding if draft.family == BASELINE else _agreement(draft.expect, finding)
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
        told, headline=_headline(outcome, told), detail=_detail(outcome, told, pair.needed)
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
    if expect in OPPOSITE and shown("backward"):
        return OPPOSITE[expect]
    if expect not in OPPOSITE and shown("two_sided"):
        return _sign(pair)
    return EQUAL if shown("equivalence") else OPEN


def _sign(pair: _Pair) -> str:
    """Which way a two-sided difference goes. Where medians do not tell, the test's statistic
    does: of two log-rank tests the one that says more.
    """
    gap = pair.draft.difference
    if gap:
        return GREATER if gap > 0 else LESS
    assert pair.two_sided is not None
    return LESS if pair.two_sided.statistic < 0 else GREATER


def _agreement(expect: str, finding: str) -> str:
    if finding == OPEN:
        return TOO_LITTLE
    return AGREES if finding == expect else DISAGREES


# ---- Words


def _sides(draft: Comparison) -> str:
    return f"{draft.cell} against {draft.against}"


def _headline(outcome: Outcome, told: Comparison) -> str:
    """What is shown, in one sentence."""
    margin = _shown(outcome, told.margin or 0.0, signed=False)
    nothing = "no difference is shown"
    if told.expect == EQUAL:
        nothing = f"neither a difference nor equality within ±{margin} is shown"
    what = {
        GREATER: f"{told.cell} is {_than(outcome, True)} {told.against}",
        LESS: f"{told.cell} is {_than(outcome, False)} {told.against}",
        EQUAL: f"{told.cell} equals {told.against} within ±{margin}",
        OPEN: f"{told.cell} against {told.against}: {nothing}",
    }[told.finding]
    gap = "" if told.difference is None else f" ({_shown(outcome, told.difference)})"
    if told.family == BASELINE:
        return f"{what}{gap}."
    claim = told.claim or f"expected: {told.cell} {_expected(told)} {told.against}"
    return f"{claim[:1].upper()}{claim[1:]}: {told.verdict}. Here {what}{gap}."


def _detail(outcome: Outcome, told: Comparison, needed: int | None) -> str:
    """How sure that is, and what would make it surer."""
    n = f"n = {told.n[0]} and {told.n[1]}"
    interval = ""
    if told.interval is not None:
        low, high = (_shown(outcome, each) for each in told.interval)
        interval = f"95 % interval {low} to {high}; "
    how = f"{told.test}: p = {shown_p(told.p)}, corrected {shown_p(told.corrected_p)}"
    sentences = [f"{interval}{how}; {n}."]
    if told.finding == OPEN and told.detectable:
        seen = _shown(outcome, told.detectable, signed=False)
        sentences.append(f"These n would have seen {seen} with a probability of 80 %.")
    if told.verdict == TOO_LITTLE and needed:
        wanted = abs(told.published) if told.published and told.expect != EQUAL else told.margin
        size = _shown(outcome, wanted or 0, signed=False)
        sentences.append(f"To see {size}, about {needed} runs on each side are needed.")
    return " ".join(sentences)


def _expected(told: Comparison) -> str:
    return {EQUAL: "equal to", GREATER: "greater than", LESS: "less than"}[told.expect]


def _than(outcome: Outcome, is_greater: bool) -> str:
    better = is_greater == outcome.study.higher_is_better
    name = outcome.study.metric
    if name in LIMITS or name in ("seconds", "wall_seconds"):
        return "slower than" if is_greater else "faster than"
    return "better than" if better else "worse than"


def _shown(outcome: Outcome, difference: float, signed: bool = True) -> str:
    """A difference as people read it."""
    metric, is_percent = outcome.study.metric, outcome.is_percent
    return shown_figure(difference, metric, is_percent, is_difference=True, signed=signed)
