"""A comparison in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flockstep.study.figures import shown_figure, shown_p
from flockstep.study.findings import BASELINE, EQUAL, GREATER, LESS, OPEN, TOO_LITTLE
from flockstep.study.metrics import is_cost

if TYPE_CHECKING:
    from flockstep.study.comparisons import Comparison
    from flockstep.study.outcome import Outcome


def headline_of(outcome: Outcome, told: Comparison) -> str:
    """What is shown, in one sentence."""
    margin = shown_difference(outcome, told.margin or 0.0, signed=False)
    nothing = "no difference is shown"
    if told.expect == EQUAL:
        nothing = f"neither a difference nor equality within ±{margin} is shown"
    what = {
        GREATER: f"{told.cell} is {_than(outcome, True)} {told.against}",
        LESS: f"{told.cell} is {_than(outcome, False)} {told.against}",
        EQUAL: f"{told.cell} equals {told.against} within ±{margin}",
        OPEN: f"{told.cell} against {told.against}: {nothing}",
    }[told.finding]
    gap = "" if told.difference is None else f" ({shown_difference(outcome, told.difference)})"
    if told.family == BASELINE:
        return f"{what}{gap}."
    if told.expect == EQUAL and told.verdict == TOO_LITTLE and told.finding != OPEN:
        gap += f"; whether by more than {margin} is open"
    claim = told.claim or f"expected: {told.cell} {_expected(told)} {told.against}"
    return f"{claim[:1].upper()}{claim[1:]}: {told.verdict}. Here {what}{gap}."


def detail_of(outcome: Outcome, told: Comparison, needed: int | None) -> str:
    """How sure that is, and what would make it surer."""
    n = f"n = {told.n[0]} and {told.n[1]}"
    interval = ""
    if told.interval is not None:
        low, high = (shown_difference(outcome, each) for each in told.interval)
        interval = f"95 % interval {low} to {high}; "
    how = f"{told.test}: p = {shown_p(told.p)}, corrected {shown_p(told.corrected_p)}"
    sentences = [f"{interval}{how}; {n}."]
    if told.finding == OPEN and told.detectable:
        seen = shown_difference(outcome, told.detectable, signed=False)
        sentences.append(f"In a single test, these n would have seen {seen} in 80 % of studies.")
    if told.verdict == TOO_LITTLE and needed:
        size = shown_difference(outcome, told.wanted or 0.0, signed=False)
        sentences.append(f"To see {size} as often, about {needed} runs on each side are needed.")
    return " ".join(sentences)


def _expected(told: Comparison) -> str:
    return {EQUAL: "equal to", GREATER: "greater than", LESS: "less than"}[told.expect]


def _than(outcome: Outcome, is_greater: bool) -> str:
    better = is_greater == outcome.study.higher_is_better
    name = outcome.study.metric
    unit = name.partition("_to")[0]
    if unit in ("seconds", "wall_seconds"):
        return "slower than" if is_greater else "faster than"
    if is_cost(name):
        return f"at the target after {'more' if is_greater else 'fewer'} {unit} than"
    return "better than" if better else "worse than"


def shown_difference(outcome: Outcome, difference: float, signed: bool = True) -> str:
    """A difference as people read it."""
    metric, is_percent = outcome.study.metric, outcome.is_percent
    return shown_figure(difference, metric, is_percent, is_difference=True, signed=signed)
