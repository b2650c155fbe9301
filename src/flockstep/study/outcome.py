"""`Outcome`: what a study has found, from the records of its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.errors import RecordError
from flockstep.fields import require_path
from flockstep.study.cells import Cell
from flockstep.study.declaration import Study
from flockstep.study.findings import BASELINE, HYPOTHESIS, PUBLISHED
from flockstep.study.formats import write_report
from flockstep.study.metrics import LIMITS, cost_so_far, cost_to, is_score, score_in, value_of
from flockstep.study.planning import PlannedRun, picks_of, planned_runs, planned_tries
from flockstep.study.records import Record, read_records
from flockstep.study.tuning import Pick

if TYPE_CHECKING:
    import pandas as pd

    from flockstep.study.comparisons import Comparison
    from flockstep.study.summaries import CellSummary

DECLARATION = "study.toml"


@dataclass(frozen=True)
class Outcome:
    """A study and the records of its runs, finished or not.

    Fields:
        study: what was asked.
        records: by id; those of other studies do not matter.
        is_running: whether more are to come.

    Example:
        outcome = fs.compare("digits-mlp", [fs.SyncSGD(), fs.LocalSGD(8)], seeds=3, epochs=2)
        outcome.table()
        print(outcome.comparisons[0].words)
        outcome.report("comparison.html")
    """

    study: Study
    records: Mapping[str, Record] = field(repr=False)
    is_running: bool = False

    @cached_property
    def picks(self) -> dict[str, Pick]:
        """What tuning has found, by the label of each cell."""
        return picks_of(self.study, self.records)

    @cached_property
    def runs(self) -> list[PlannedRun]:
        """The runs that count, finished or not."""
        rates = {label: pick.lr for label, pick in self.picks.items()}
        return planned_runs(self.study, rates)

    @cached_property
    def finished(self) -> list[tuple[PlannedRun, Record]]:
        """The runs that count and are done."""
        pairs = [(run, self.records.get(run.id)) for run in self.runs]
        return [(run, record) for run, record in pairs if record is not None and record.is_done]

    @cached_property
    def failures(self) -> list[tuple[PlannedRun, Record]]:
        """The runs that count and failed."""
        return self._failed(self.runs)

    @cached_property
    def failed_tries(self) -> list[tuple[PlannedRun, Record]]:
        """Tries of tuning that failed, as those of high rates may."""
        return self._failed(planned_tries(self.study))

    def _failed(self, runs: Sequence[PlannedRun]) -> list[tuple[PlannedRun, Record]]:
        pairs = [(run, self.records.get(run.id)) for run in runs]
        return [(run, record) for run, record in pairs if record is not None and not record.is_done]

    def records_of(self, cell: Cell) -> list[Record]:
        """Of one cell's finished runs, seed by seed."""
        return self._by_cell.get(cell.label, [])

    @cached_property
    def _by_cell(self) -> dict[str, list[Record]]:
        found: dict[str, list[Record]] = {}
        for run, record in self.finished:
            found.setdefault(run.cell.label, []).append(record)
        return found

    def value(self, record: Record, metric: str | None = None) -> float | None:
        """A figure of a run; None where it has none."""
        name = metric or self.study.metric
        if name in LIMITS and name not in record.metrics:
            return None if self.target is None else cost_to(self.target, name, record.history)
        return value_of(name, record.metrics, record.history)

    def values(self, cell: Cell, metric: str | None = None) -> dict[int, float | None]:
        """The figures of a cell's finished runs, by seed."""
        return {record.seed: self.value(record, metric) for record in self.records_of(cell)}

    def mean_of(self, cell: Cell, metric: str) -> float | None:
        """Over the finished runs of a cell that have it."""
        known = [value for value in self.values(cell, metric).values() if value is not None]
        return sum(known) / len(known) if known else None

    def limit(self, record: Record, metric: str) -> float:
        """How far a run had come that did not reach the target."""
        return cost_so_far(metric, record.history[-1])

    @cached_property
    def score_name(self) -> str:
        """What people read the score as."""
        names = [record.config.get("metric_name") for record in self.records.values()]
        return next((name for name in names if name), "accuracy")

    @cached_property
    def target(self) -> float | None:
        """The score whose costs are told: the one that the study declares, if only in the name of
        its metric, that the runs were to reach, or the lowest mean final score of a cell, which
        most runs have reached. None where runs were to reach different ones.
        """
        if self.study.target is not None:
            return self.study.target
        if (score := score_in(self.study.metric)) is not None:
            return score
        asked = {record.config.get("target") for _, record in self.finished}
        known = [each for each in asked if each is not None]
        if known:
            return float(known[0]) if len(asked) == 1 else None  # each run has its own
        means = []
        for cell in self.study.cells:
            scores = [
                value_of("accuracy", each.metrics, each.history) for each in self.records_of(cell)
            ]
            known = [score for score in scores if score is not None]
            if known:
                means.append(sum(known) / len(known))
        return float(f"{min(means):.3g}") if means else None

    @cached_property
    def cells(self) -> list[CellSummary]:
        """Of each cell: n, mean, deviation, intervals."""
        from flockstep.study.summaries import summary_of

        return [summary_of(self, cell) for cell in self.study.cells]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Every cell with its baseline, then the hypotheses, then what was published."""
        from flockstep.study.comparisons import compared

        return compared(self)

    @property
    def claims(self) -> list[Comparison]:
        """The comparisons of which something was expected or published."""
        return [each for each in self.comparisons if each.family != BASELINE]

    @property
    def verdict(self) -> str:
        """In one line: how many claims agree, and how many printed figures: these often are of
        the same two cells as a claim. Where nothing is claimed, what was found.
        """
        told = []
        how = ", by direction" if self.study.published_by == "difference" else ""
        families = ((HYPOTHESIS, "claims", ""), (PUBLISHED, "printed figures", how))
        for family, plural, by in families:
            verdicts = [each.verdict for each in self.claims if each.family == family]
            if verdicts:
                name = plural if len(verdicts) > 1 else plural[:-1]
                told.append(f"Of {len(verdicts)} {name}{by}: {_listed(Counter(verdicts))}.")
        if told:
            return " ".join(told)
        found = Counter(each.finding for each in self.comparisons)
        return f"Against the baseline: {_listed(found)}." if found else "Nothing is compared yet."

    def table(self) -> pd.DataFrame:
        """One row for each finished run: its cell, its seed, its figures."""
        import pandas as pd

        rows = []
        for run, record in self.finished:
            figures = {**record.metrics, self.study.metric: self.value(record)}
            row: dict[str, Any] = {"cell": run.cell.label, **run.cell.labels}
            rows.append({**row, "seed": record.seed, **figures, "id": record.id})
        return pd.DataFrame(rows)

    def looks(self) -> pd.DataFrame:
        """One row for each look of each finished run."""
        import pandas as pd

        rows = []
        for run, record in self.finished:
            for look in record.history:
                told = {name: value for name, value in look.items() if not isinstance(value, list)}
                rows.append({"cell": run.cell.label, "seed": record.seed, **told})
        return pd.DataFrame(rows)

    def comparison_table(self) -> pd.DataFrame:
        """One row for each comparison."""
        import pandas as pd

        return pd.DataFrame([each.row() for each in self.comparisons])

    def report(self, path: str | Path) -> Path:
        """Write a report: an interactive page (.html), or .md, .csv, .png for papers."""
        return write_report(self, path)

    def __str__(self) -> str:
        """What was asked, the cells, and what can be said of them."""
        lines = [self.study.question]
        lines += [each.in_words(self) for each in self.cells]
        return "\n".join([*lines, *(each.words for each in self.comparisons)])

    @property
    def is_percent(self) -> bool:
        """Whether the metric is a share that people read in per cent."""
        return is_score(self.study.metric) and self.score_name == "accuracy"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in counts.most_common())


def planned_so_far(
    study: Study, records: Mapping[str, Record], only: Mapping[str, str] | None = None
) -> list[PlannedRun]:
    """All that is known to be run, each once: the tries, and what counts as far as tuning has
    found the rates.
    """
    rates = {label: pick.lr for label, pick in picks_of(study, records).items()}
    found: dict[str, PlannedRun] = {}
    for run in [*planned_tries(study, only), *planned_runs(study, rates, only)]:
        found.setdefault(run.id, run)
    return list(found.values())


def load_outcome(folder: str | Path) -> Outcome:
    """The outcome of a study from the folder of its records."""
    require_path("folder", folder)
    place = Path(folder)
    declaration = place / DECLARATION
    if not declaration.exists():
        raise RecordError(f"{str(folder)!r} holds no study: it has no {DECLARATION}")
    study = Study.from_toml(declaration)
    tries = read_records(place, [run.id for run in planned_tries(study)])
    rates = {label: pick.lr for label, pick in picks_of(study, tries).items()}
    runs = read_records(place, [run.id for run in planned_runs(study, rates)])
    return Outcome(study, tries | runs)
