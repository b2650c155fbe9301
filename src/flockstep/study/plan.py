"""What a study would run, and how long that would take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flockstep.study.cells import selected
from flockstep.study.declaration import Study
from flockstep.study.estimating import Estimates
from flockstep.study.outcome import planned_so_far
from flockstep.study.planning import PlannedRun, picks_of, planned_tries, require_one_score
from flockstep.study.records import read_records
from flockstep.study.tuning import Tuning


@dataclass(frozen=True)
class Plan:
    """Runs, each with whether it is done and how many seconds it takes.

    Fields:
        unknown: runs that only tuning will tell, of which no more is known than how many.
    """

    study: Study
    rows: list[tuple[PlannedRun, bool, float | None]]
    unknown: int = 0

    @property
    def may_end_early(self) -> bool:
        """Whether runs end where they reach a target, which nobody can foretell."""
        return any(run.spec.target is not None for run, is_done, _ in self.rows if not is_done)

    def seconds(self, jobs: int) -> float | None:
        """Until all is done, with so many runs side by side; None where nobody can tell."""
        known = [seconds for _, is_done, seconds in self.rows if not is_done]
        together, alone = 0.0, 0.0
        for run, is_done, seconds in self.rows:
            if is_done:
                continue
            if seconds is None:
                return None
            if run.is_alone:
                alone += seconds
            else:
                together += seconds
        mean = (together + alone) / len(known) if known else 0.0
        return (together + mean * self.unknown) / jobs + alone


def planned(study: Study, folder: Path | None, only: Mapping[str, str] | None = None) -> Plan:
    """All runs of a study, with those that are done already."""
    chosen = None if only is None else selected("only", only, study.all_axes)
    require_one_score(study)
    ids = [run.id for run in planned_tries(study)]
    records = {} if folder is None else read_records(folder, ids)
    runs = planned_so_far(study, records, chosen)
    if folder is not None:
        records |= read_records(folder, [run.id for run in runs])
    estimates = Estimates(runs, records)
    rows = []
    for run in runs:
        record = records.get(run.id)
        rows.append((run, record is not None and record.is_done, estimates.seconds_of(run)))
    unknown = 0
    if isinstance(study.tune, Tuning):
        picks = picks_of(study, records)
        open_cells = {run.cell.label for run in runs if not picks[run.cell.label].is_complete}
        unknown = len(open_cells) * max(0, len(study.seed_list) - study.tune.seeds)
    return Plan(study, rows, unknown)
