"""What the runs of one cell come to, with how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flockstep.study.cells import Cell
from flockstep.study.figures import shown_figure
from flockstep.study.metrics import is_cost
from flockstep.study.statistics import Sample, TimesToTarget, bootstrap_interval, t_interval

if TYPE_CHECKING:
    from flockstep.study.outcome import Outcome


@dataclass(frozen=True)
class CellSummary:
    """One cell's runs.

    Fields:
        planned, failed: how many runs there should be, and how many of them failed.
        values: the metric of each finished run, in the order of seeds; None where it has none.
        sample: n, mean and sample deviation; None for fewer than two values.
        interval: 95 %, by Student's t. bootstrap: 95 %, by resampling.
        times: of a metric that is a cost to a target, with runs that did not reach it as censored.
    """

    cell: Cell
    planned: int
    failed: int
    values: tuple[float | None, ...]
    sample: Sample | None
    interval: tuple[float, float] | None
    bootstrap: tuple[float, float] | None
    times: TimesToTarget | None = None

    @property
    def n(self) -> int:
        return len([value for value in self.values if value is not None])

    @property
    def mean(self) -> float | None:
        """The mean; of a cost to a target, the median, where half of the runs have reached it."""
        if self.times is not None:
            return self.times.median
        known = [value for value in self.values if value is not None]
        return sum(known) / len(known) if known else None

    def in_words(self, outcome: Outcome) -> str:
        """`sync_sgd: 94.72 % ± 0.51 % (n = 5)`."""

        def shown(value: float) -> str:
            return shown_figure(value, outcome.study.metric, outcome.is_percent)

        centre = "no figure" if self.mean is None else shown(self.mean)
        if self.times is not None:
            told = f"median {centre}, {self.times.reached} of {self.times.n} reached the target"
        elif self.sample is not None and self.sample.deviation is not None:
            told = f"{centre} ± {shown(self.sample.deviation)} (n = {self.n})"
        else:
            told = f"{centre} (n = {self.n})"
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.cell.label}: {told}{failed}"


def summary_of(outcome: Outcome, cell: Cell, metric: str | None = None) -> CellSummary:
    name = metric or outcome.study.metric
    values = tuple(outcome.values(cell, name).values())
    failed = [
        run for run, _ in outcome.failures if run.cell.label == cell.label and run.rate is None
    ]
    known = [value for value in values if value is not None]
    sample = Sample.of(known) if len(known) > 1 and not is_cost(name) else None
    return CellSummary(
        cell,
        planned=len(outcome.study.seed_list),
        failed=len(failed),
        values=values,
        sample=sample,
        interval=None if sample is None else t_interval(sample),
        bootstrap=None if sample is None else bootstrap_interval(known),
        times=times_of(outcome, cell, name) if is_cost(name) else None,
    )


def times_of(outcome: Outcome, cell: Cell, metric: str) -> TimesToTarget | None:
    """What each run of a cell took to its target; None without runs."""
    records = outcome.records_of(cell)
    if not records:
        return None
    times = [outcome.value(record, metric) for record in records]
    return TimesToTarget.of(times, [outcome.limit(record, metric) for record in records])
