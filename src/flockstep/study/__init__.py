"""Studies: grids of runs with seeds, statistics and verdicts.

What needs scipy is loaded when it is first asked for: importing the library stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flockstep.study.cells import Cell
from flockstep.study.comparing import compare, comparison
from flockstep.study.declaration import Hypothesis, PrintedTest, Published, Study
from flockstep.study.figures import shown_duration, shown_figure, shown_p
from flockstep.study.formats import FORMATS, require_report_path
from flockstep.study.metrics import THROUGHPUT, is_cost, is_score, value_of
from flockstep.study.outcome import DECLARATION, Outcome, load_outcome
from flockstep.study.plan import Plan, planned
from flockstep.study.planning import PlannedRun, score_to_pick_by
from flockstep.study.records import Record, load_records, pack_records
from flockstep.study.retest import TESTS, Retest, retest, shown_small
from flockstep.study.running import default_folder, run_study
from flockstep.study.tuning import Pick, Tuning

if TYPE_CHECKING:
    from flockstep.study.comparisons import RULES, Comparison, printed_sample
    from flockstep.study.statistics import (
        Test,
        holm,
        log_rank_test,
        mean_test,
        performance_profile,
        t_interval,
    )
    from flockstep.study.summaries import CellSummary, summary_of, times_of

_LATER = {
    "RULES": "comparisons",
    "Comparison": "comparisons",
    "printed_sample": "comparisons",
    "Test": "statistics",
    "holm": "statistics",
    "log_rank_test": "statistics",
    "mean_test": "statistics",
    "performance_profile": "statistics",
    "t_interval": "statistics",
    "CellSummary": "summaries",
    "summary_of": "summaries",
    "times_of": "summaries",
}

__all__ = [
    "DECLARATION",
    "FORMATS",
    "RULES",
    "TESTS",
    "THROUGHPUT",
    "Cell",
    "CellSummary",
    "Comparison",
    "Hypothesis",
    "Outcome",
    "Pick",
    "Plan",
    "PlannedRun",
    "PrintedTest",
    "Published",
    "Record",
    "Retest",
    "Study",
    "Test",
    "Tuning",
    "compare",
    "comparison",
    "default_folder",
    "holm",
    "is_cost",
    "is_score",
    "load_outcome",
    "load_records",
    "log_rank_test",
    "mean_test",
    "pack_records",
    "performance_profile",
    "planned",
    "printed_sample",
    "require_report_path",
    "retest",
    "run_study",
    "score_to_pick_by",
    "shown_duration",
    "shown_figure",
    "shown_p",
    "shown_small",
    "summary_of",
    "t_interval",
    "times_of",
    "value_of",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
