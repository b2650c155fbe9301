"""Outcomes as a table for the terminal, as markdown and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from benchmarks.harness import Case, Outcome

COLUMNS = ("case", "what", "measured", "spread", "bound", "reached", "figures")

LIMITS = """\
## What the limits are

- **Simulator.** One lane: the gradient steps themselves. Two lanes: Python's global lock, which the
  two share between torch's operations, and the neighbours on the machine: a second core that is not
  free shows here first.
- **Memory.** Parameters, gradients and momentum of LeNet-5 are 0.75 MB per worker; the rest is
  torch's and malloc's, made in the first step of each thread.
- **All-reduce.** Memory bandwidth; gloo's is that of its hand-overs, so the ratio falls where
  memory is slow and cores are fast. *In place* is a worker's own flat tensors, which lie in shared
  memory. *Staged* is any other tensor: copying it in and out, once each on every process, is most
  of the time at 11.1 M floats.
- **Launch.** Loading torch, once. **SyncSGD.** The gradient steps; the exchange is a small part of
  each.
- **Looks and traces.** None of their own: the spread is what two equal runs differ by.
- **Asynchronous solvers.** The gradient steps: four equal processes keep two cores busy whether
  they wait for turns or not. Where one is slower the others wait for its turn, or do not.
- **Codecs.** Memory bandwidth for the first three, which work on parts that stay in the cache;
  drawing random numbers for QSGD; looking for candidates for TopK.
- **Batches.** Copying rows of bytes and making floats of them, about a third of the time each; the
  loader's is Python's, sample by sample. **Augmentation.** Copying windows. **Assignment.** Looking
  up indices at random.
- **Studies.** The runs. Of a short comparison about half is loading torch, in the study and then in
  each job, and torch's compiler, which it loads with its first optimizer. Two jobs share the
  memory bandwidth and the last-level cache. **Report.** Reading the records and working out the
  ids of their specs, then compressing plotly.js.
- **torchrun.** Gloo's hand-overs between threads: all-to-all and all-gather together take as long
  as its all-reduce.
- **Ray.** Memory bandwidth: a blend moves five streams (the value twice, the tensor, the answer), a
  put three.
"""


def table(outcomes: Sequence[Outcome]) -> Table:
    result = Table(*COLUMNS, title=conditions(), title_justify="left", show_lines=True)
    for outcome in outcomes:
        name, what, measured, spread, bound, reached, figures = cells(outcome)
        style = "green" if outcome.is_reached else "bold red"
        result.add_row(
            name, what, Text(measured, style), spread, bound, Text(reached, style), figures
        )
    return result


def markdown(outcomes: Sequence[Outcome], before: str, names: Sequence[str]) -> str:
    """The whole of RESULTS.md. Of `names`, cases that were not measured now keep the rows that
    they had `before`.
    """
    row_of = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in before.splitlines()
        if line.startswith("| ")
    }
    row_of |= {outcome.case.name: _row(cells(outcome)) for outcome in outcomes}
    lines = [
        _row(COLUMNS),
        _row(["---"] * len(COLUMNS)),
        *(row_of[name] for name in names if name in row_of),
    ]
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "Written by `python -m benchmarks --write`. Measured: the median over repeats, each of",
            "which measures both sides back to back. Spread: the least and the most of them.",
            "Figures: the median of each side. The simulator's speed and looks are measured in",
            "several turns per repeat, of which the best of each side counts. A run of some cases",
            "(`--only`) replaces their rows alone.",
            "",
            f"{conditions()}.",
            "",
            *lines,
            "",
            LIMITS,
        ]
    )


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "conditions": conditions(),
        "cases": [
            {
                "name": outcome.case.name,
                "what": outcome.case.what,
                "value": outcome.value,
                "values": outcome.values,
                "unit": outcome.case.unit.strip(),
                "bound": outcome.case.bound,
                "lower_is_better": outcome.case.lower_is_better,
                "reached": outcome.is_reached,
                "figures": outcome.figures,
                "figure_unit": outcome.case.figure_unit,
            }
            for outcome in outcomes
        ],
    }


def conditions() -> str:
    """On what the figures depend."""
    return (
        f"{len(os.sched_getaffinity(0))} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def bound(case: Case) -> str:
    return f"{'≤' if case.lower_is_better else '≥'} {case.bound:.2f}{case.unit}"


def cells(outcome: Outcome) -> list[str]:
    case, values = outcome.case, outcome.values
    figures = ", ".join(
        f"{side} {_number(figure)} {case.figure_unit}" for side, figure in outcome.figures.items()
    )
    return [
        case.name,
        case.what,
        f"{outcome.value:.3f}{case.unit}",
        f"{min(values):.2f}–{max(values):.2f} of {len(values)}",
        bound(case),
        "yes" if outcome.is_reached else "NO",
        figures,
    ]


def _number(value: float) -> str:
    """Three digits at least, and all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
