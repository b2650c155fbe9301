"""The command: measure, print a table, and with `--write` keep it in RESULTS.md."""

from __future__ import annotations

import json
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import (
    asynchronous,
    checkpoints,
    codec_speed,
    data_speed,
    failures,
    local,
    looks,
    on_ray,
    on_torchrun,
    report,
    simulator,
    sparse,
    studies,
    tracing,
)
from benchmarks.harness import Benchmark, Outcome, run

BENCHMARKS = tuple(
    benchmark
    for module in (
        simulator,
        local,
        looks,
        tracing,
        asynchronous,
        checkpoints,
        failures,
        on_torchrun,
        on_ray,
        codec_speed,
        data_speed,
        sparse,
        studies,
    )
    for benchmark in module.BENCHMARKS
)
RESULTS = Path(__file__).with_name("RESULTS.md")
WIDTH_OF_A_FILE = 180
BUSY_LOAD = 0.5


def main() -> None:
    parser = _parser()
    asked = parser.parse_args()
    names = [case.name for each in BENCHMARKS for case in each.cases]
    for beginning in asked.only:
        if not any(name.startswith(beginning) for name in names):
            parser.error(f"no case begins with {beginning!r}; there are {', '.join(names)}")
    chosen = {name for name in names if not asked.only or name.startswith(tuple(asked.only))}
    benchmarks = [each for each in BENCHMARKS if any(case.name in chosen for case in each.cases)]
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_OF_A_FILE)
    if asked.list:
        console.print(_listed(benchmarks, chosen))
        return
    torch.set_num_threads(1)
    measured, crashed = _measure(benchmarks, asked.repeats)
    outcomes = [outcome for outcome in measured if outcome.case.name in chosen]
    _show(console, outcomes, sorted(chosen & crashed))
    _keep(asked, outcomes, names, is_complete=not crashed)
    if crashed:
        sys.exit(1)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "python -m benchmarks",
        description="Measure Flockstep against plain torch. A missed bound is shown, and no error: "
        "only a benchmark that crashes makes the exit code 1.",
    )
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="cases, or their beginnings",
    )
    add(
        "--repeats",
        type=int,
        choices=range(1, 100),
        metavar="N",
        help="for all cases, in place of their own",
    )
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    add("--list", action="store_true", help="list the cases and stop")
    add("--write", action="store_true", help=f"write the rows to benchmarks/{RESULTS.name}")
    return parser


def _listed(benchmarks: list[Benchmark], chosen: set[str]) -> Table:
    table = Table("case", "what", "bound", "repeats")
    for benchmark in benchmarks:
        for case in benchmark.cases:
            if case.name in chosen:
                table.add_row(case.name, case.what, report.bound(case), str(benchmark.repeats))
    return table


def _measure(benchmarks: list[Benchmark], repeats: int | None) -> tuple[list[Outcome], set[str]]:
    """The outcomes, and the names of the cases that crashed."""
    progress = Console(stderr=True, highlight=False)
    if os.getloadavg()[0] > BUSY_LOAD:
        progress.print(
            f"The machine is busy (load {os.getloadavg()[0]:.1f}): "
            "ratios that need free cores suffer."
        )
    outcomes: list[Outcome] = []
    crashed: set[str] = set()
    for number, benchmark in enumerate(benchmarks, 1):
        names = [case.name for case in benchmark.cases]
        progress.print(f"benchmark {number} of {len(benchmarks)}: {', '.join(names)}")
        try:
            outcomes += run(benchmark, repeats or benchmark.repeats, progress.print)
        except Exception:  # noqa: BLE001
            # Whatever it is, it must not take the other cases' figures with it.
            traceback.print_exc()
            crashed.update(names)
    return outcomes, crashed


def _show(console: Console, outcomes: list[Outcome], crashed: list[str]) -> None:
    console.print(report.table(outcomes))
    missed = [outcome.case.name for outcome in outcomes if not outcome.is_reached]
    console.print(f"{len(outcomes) - len(missed)} of {len(outcomes)} bounds reached.")
    for word, names in (("Missed", missed), ("Crashed", crashed)):
        if names:
            console.print(f"[bold red]{word}: {', '.join(names)}")


def _keep(asked: Namespace, outcomes: list[Outcome], names: list[str], is_complete: bool) -> None:
    if asked.json:
        asked.json.write_text(json.dumps(report.as_json(outcomes), indent=2) + "\n")
    if asked.write and is_complete:
        RESULTS.write_text(report.markdown(outcomes, RESULTS.read_text(), names))


if __name__ == "__main__":
    main()
