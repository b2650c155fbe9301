"""What a study costs beside its runs: planning, records, statistics, processes, the report."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample
from flockstep.study import DECLARATION, Record
from flockstep.study.one_run import SHOWN_EVENTS
from flockstep.study.planning import planned_runs
from flockstep.study.records import write_record

RUNS, LOOKS, WORKERS = 500, 100, 8
STRATEGIES = ["sync_sgd", "local_sgd(period=8)", "nosync(pull=0.1)"]


def _study(epochs: int, seeds: int) -> fs.Study:
    base = {"task": "digits-cnn", "workers": 4, "epochs": epochs}
    return fs.Study("Which?", base=base, axes={"strategy": STRATEGIES[:2]}, seeds=seeds)


def _overhead() -> list[Sample]:
    """All that a study does beside its runs, with one job, in the time that the runs take.

    The start of the job's process is paid once, whatever the number of runs: it is told apart.
    """
    study = _study(epochs=10, seeds=4)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        outcome = study.run(folder=folder, jobs=1)
        assert str(outcome)  # the statistics of all cells
        whole = time.perf_counter() - began
        runs = sum(record.wall_seconds for _, record in outcome.finished)
    start = _start_seconds()
    figures = {"runs": runs, "study": whole, "start of a job, once": start}
    return [Sample(100 * (whole - runs - start) / runs, figures)]


def _start_seconds() -> float:
    """Until a process has loaded what a job needs."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import flockstep.study.job_process"], check=True)
    return time.perf_counter() - began


def _side_by_side() -> list[Sample]:
    """The same runs by one job and by two, once both are at work."""
    study = _study(epochs=10, seeds=4)
    seconds = {}
    for jobs in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            study.run(folder=folder, jobs=jobs)
            seconds[f"{jobs} jobs"] = time.perf_counter() - began - _start_seconds()
    return [Sample(seconds["1 jobs"] / seconds["2 jobs"], seconds)]


def _large_report() -> list[Sample]:
    """A report of many runs with many looks, from the folder of their records; of each cell one run
    is shown with its workers and replicas.
    """
    names = [f"local_sgd(period={period})" for period in range(1, 51)]
    base = {"task": "digits-mlp", "workers": WORKERS, "epochs": 2}
    study = fs.Study("Which?", base=base, axes={"strategy": names}, seeds=RUNS // len(names))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / DECLARATION).write_text(study.to_toml())
        for run in planned_runs(study, {}):
            write_record(Path(folder), _made_up(run.id, run.spec.seed, run.is_shown))
        began = time.perf_counter()
        fs.load_outcome(folder).report(Path(folder) / "report.html")
        seconds = time.perf_counter() - began
        megabytes = (Path(folder) / "report.html").stat().st_size / 1e6
    return [Sample(seconds, {"report": seconds}), Sample(megabytes, {"page": megabytes})]


def _made_up(run_id: str, seed: int, is_shown: bool) -> Record:
    rise = int(run_id, 16) % 97 / 1000
    places = [[float(worker * place) for place in range(16)] for worker in range(WORKERS)]
    history = [
        {
            "step": 10 * look,
            "samples": 640 * look,
            "seconds": 0.1 * look,
            "bytes_sent": 1_000_000 * look,
            "accuracy": 0.9 + rise - 0.5 / look,
            **({"positions": places} if is_shown else {}),
        }
        for look in range(1, LOOKS + 1)
    ]
    metrics = {"test_accuracy": 0.9 + rise, "seconds": 10.0, "bytes_sent": 1e8, "steps": 1000}
    track = [[event % 3, 0.01 * event, 0.01] for event in range(SHOWN_EVENTS)]
    kinds = ["computing", "waiting", "sending"]
    timeline = {"kinds": kinds, "workers": [track] * WORKERS, "of": WORKERS}
    return Record(
        run_id,
        None,
        seed,
        "done",
        metrics,
        history,
        config={"task": "digits-mlp"},
        timeline=timeline if is_shown else None,
    )


def _compare() -> list[Sample]:
    """The one-line comparison as a user starts it: a process of its own, report included."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flockstep", "compare", "digits-mlp", *STRATEGIES]
        began = time.perf_counter()
        subprocess.run(
            [*command, "--seeds", "5", "--report", f"{folder}/out.html"],
            check=True,
            capture_output=True,
        )
        seconds = time.perf_counter() - began
    return [Sample(seconds, {"compare": seconds})]


BENCHMARKS = (
    Benchmark(
        (
            Case(
                "study_overhead",
                "what a study of 8 runs takes beside them (planning, records, statistics), in "
                "per cent of the runs' own time; the start of the job apart",
                3.0,
                "s",
                lower_is_better=True,
                unit=" %",
            ),
        ),
        _overhead,
        3,
    ),
    Benchmark(
        (Case("study_two_jobs", "8 runs with two jobs, speed against one job", 1.8, "s"),),
        _side_by_side,
        3,
    ),
    Benchmark(
        (
            Case(
                "study_report",
                f"the report of {RUNS} runs with {LOOKS} looks each",
                10.0,
                "s",
                lower_is_better=True,
                unit=" s",
            ),
            Case(
                "study_report_size",
                "the size of that page",
                6.0,
                "MB",
                lower_is_better=True,
                unit=" MB",
            ),
        ),
        _large_report,
        3,
    ),
    Benchmark(
        (
            Case(
                "study_compare",
                "flockstep compare of 3 strategies with 5 seeds on digits, from the prompt to the "
                "report",
                15.0,
                "s",
                lower_is_better=True,
                unit=" s",
            ),
        ),
        _compare,
        5,
    ),
)
