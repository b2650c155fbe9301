"""Running a study: what is missing, side by side, whatever becomes of single runs."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flockstep.backends import one_interrupt, usable_cores
from flockstep.errors import InvalidField, RecordError
from flockstep.fields import require, require_choice, require_flag, require_integer, require_path
from flockstep.folders import empty_folders_removed, why_not, write_whole
from flockstep.study.cells import selected
from flockstep.study.declaration import Study
from flockstep.study.display import Display
from flockstep.study.formats import require_report_path, write_report
from flockstep.study.jobs import Jobs
from flockstep.study.one_run import Order
from flockstep.study.outcome import DECLARATION, Outcome, planned_so_far
from flockstep.study.planning import (
    PlannedRun,
    picks_of,
    planned_runs,
    planned_tries,
    require_one_score,
    require_written,
)
from flockstep.study.records import (
    Record,
    drop_unfinished,
    read_records,
    require_same_run,
    write_record,
)

PLACES = ("here", "ray")
REPORT_SECONDS = 60.0
# A report while runs go on must not slow them down: it is written at most so often that it takes a
# fiftieth of the time.
REPORT_SHARE = 0.02


@one_interrupt()
def run_study(
    study: Study,
    folder: str | Path | None = None,
    *,
    jobs: int | None = None,
    on: str = "here",
    only: Mapping[str, Any] | None = None,
    retry_failed: bool = False,
    progress: bool | None = None,
    report: str | Path | None = None,
) -> Outcome:
    """Run what is missing of a study, and give its outcome.

    `folder` keeps a record of every run, and is what a study that was stopped goes on from; by
    default it is `results/NAME` beside the study's file, and for a study that is from no file, a
    temporary one. `jobs` runs go on side by side, as many as there are cores unless told; runs by
    the wall's clock have the machine for themselves. `on="ray"` spreads them over a Ray cluster.
    `only` runs some cells, by levels of axes. `retry_failed` tries runs again that failed before.
    `progress` shows how far it is, on stderr; by default where that is a terminal. `report` is a
    file that is written every minute, and at the end.
    """
    require(isinstance(study, Study), "study", "be an fs.Study", study)
    require_choice("on", on, PLACES)
    require_flag("retry_failed", retry_failed)
    if jobs is not None:
        require_integer("jobs", jobs, 1)
    chosen = None if only is None else selected("only", only, study.all_axes)
    require_one_score(study)
    with ExitStack() as stack:
        place = stack.enter_context(records_in(study, folder))
        run = StudyRun(study, place, chosen, retry_failed, report)
        display = stack.enter_context(Display(study, progress))
        if run.missing():
            workers = stack.enter_context(_workers(jobs, on))
            run.carry_out(workers, display)
        return run.outcome()


def _workers(jobs: int | None, on: str) -> Any:
    if on == "here":
        return Jobs(jobs or usable_cores())
    from flockstep.study.on_ray import RayJobs

    return RayJobs(jobs, usable_cores())


def default_folder(study: Study) -> Path | None:
    """Where a study from a file keeps its records."""
    return None if study.path is None else study.path.parent / "results" / study.name


@contextmanager
def records_in(study: Study, folder: str | Path | None) -> Iterator[Path]:
    """The folder of a study's records, for this process alone while it is open."""
    chosen = default_folder(study) if folder is None else folder
    if chosen is None:
        with tempfile.TemporaryDirectory(prefix="flockstep-study-") as made:
            yield Path(made)
        return
    require_path("folder", chosen)
    place = Path(chosen)
    require_written(study)
    with empty_folders_removed(place):
        reason = why_not(place)
        if reason is not None:
            rule = "be one that takes files"
            raise InvalidField(f"'folder' must {rule} (got {str(place)!r}: {reason})")
        with _held(place):
            drop_unfinished(place)
            _write_declaration(study, place)
            yield place


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """No other process runs the same study meanwhile: both would do the same runs."""
    try:
        import fcntl
    except ImportError:  # another system: there is no such lock
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordError(f"{str(folder)!r} is in use: a study is running there") from error
        yield
    finally:
        os.close(descriptor)


def _write_declaration(study: Study, folder: Path) -> None:
    try:
        write_whole(folder / DECLARATION, study.to_toml())
    except OSError as error:
        reason = error.strerror
        raise RecordError(f"{str(folder / DECLARATION)!r} cannot be written: {reason}") from error


class StudyRun:
    """One call of `run_study`: the records so far, and what is still to do."""

    def __init__(
        self,
        study: Study,
        folder: Path,
        only: Mapping[str, str] | None,
        retry_failed: bool,
        report: str | Path | None,
    ) -> None:
        self.study = study
        self.records: dict[str, Record] = {}
        self._folder = folder
        self._only = only
        self._retries = retry_failed
        self._retried: set[str] = set()
        self._report = None if report is None else require_report_path(report)
        self._next_report = time.monotonic() + REPORT_SECONDS
        self._take_in(planned_tries(study))
        self._take_in(self._runs())

    def _take_in(self, runs: Sequence[PlannedRun]) -> None:
        """The records of these runs that are there already."""
        specs = {run.id: run.spec for run in runs if run.id not in self.records}
        found = read_records(self._folder, list(specs))
        for name, record in found.items():
            require_same_run(record, specs[name])
        self.records |= found

    def _runs(self) -> list[PlannedRun]:
        rates = {label: pick.lr for label, pick in picks_of(self.study, self.records).items()}
        return planned_runs(self.study, rates, self._only)

    def planned(self) -> list[PlannedRun]:
        """All that is known to be run, each once: the tries, and what counts as far as tuning has
        found the rates.
        """
        return planned_so_far(self.study, self.records, self._only)

    def missing(self) -> list[PlannedRun]:
        """What is to run, as far as that is known."""
        return [run for run in self.planned() if self._is_missing(run)]

    def _is_missing(self, run: PlannedRun) -> bool:
        record = self.records.get(run.id)
        is_retried = self._retries and run.id not in self._retried
        return record is None or (not record.is_done and is_retried)

    def carry_out(self, workers: Any, display: Display) -> None:
        """Until nothing is missing: tuning may tell of more runs when its tries are done."""
        while missing := self.missing():
            self._retried |= {run.id for run in missing}
            by_id = {run.id: run for run in missing}
            display.begin(self.planned(), self.records, missing)
            orders = [Order(run.id, run.spec, run.is_shown) for run in missing]
            alone = [order for order in orders if by_id[order.id].is_alone]
            together = [order for order in orders if not by_id[order.id].is_alone]
            for record in workers.run(together, alone, lambda: self._tick(display)):
                write_record(self._folder, record)
                self.records[record.id] = record
                display.add(record)
            self._take_in(self._runs())

    def _tick(self, display: Display) -> None:
        display.tick()
        if self._report is None or time.monotonic() < self._next_report:
            return
        began = time.monotonic()
        try:
            write_report(self.outcome(is_running=True), self._report)
        except Exception as error:  # noqa: BLE001
            # The runs are worth more than a look at them: the last report will tell again.
            warnings.warn(f"no report for now: {type(error).__name__}: {error}", stacklevel=2)
        took = time.monotonic() - began
        self._next_report = time.monotonic() + max(REPORT_SECONDS, took / REPORT_SHARE)

    def outcome(self, is_running: bool = False) -> Outcome:
        outcome = Outcome(self.study, dict(self.records), is_running=is_running)
        if not is_running and self._report is not None:
            write_report(outcome, self._report)
        return outcome
