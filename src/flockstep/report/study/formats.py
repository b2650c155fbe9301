"""The formats of a study's report. What draws them is loaded when a report is written."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from flockstep.study import FORMATS, Outcome

WRITERS = {
    ".html": ("whole_page", "write_study_page"),
    ".md": ("for_papers", "write_markdown"),
    ".csv": ("for_papers", "write_csv"),
    ".png": ("for_papers", "write_picture"),
    ".svg": ("for_papers", "write_picture"),
    ".pdf": ("for_papers", "write_picture"),
}


def register_formats() -> None:
    """Tell the studies, which must not know what draws their reports."""
    for ending, (module, name) in WRITERS.items():

        def write(outcome: Outcome, path: Path, module: str = module, name: str = name) -> None:
            getattr(import_module(f"flockstep.report.study.{module}"), name)(outcome, path)

        FORMATS[ending] = write


def write_short_page(outcome: Outcome, folder: Path) -> Path:
    """`page.md` and its picture in the folder of a study's records."""
    module = import_module("flockstep.report.study.short_page")
    path: Path = module.write_page_and_picture(outcome, folder)
    return path


def write_map(outcomes: Sequence[Outcome], path: Path) -> None:
    """Which method wins under which condition of several studies, as one picture."""
    import_module("flockstep.report.study.winners").write_map(outcomes, path)
