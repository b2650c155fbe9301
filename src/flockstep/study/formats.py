"""Where a study's report goes: a table of formats, which the package `report` fills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flockstep.fields import require, require_path

if TYPE_CHECKING:
    from flockstep.study.outcome import Outcome

Writer = Callable[["Outcome", Path], None]

# By the ending of the file. What is drawn and written builds on studies, not they on it.
FORMATS: dict[str, Writer] = {}


def write_report(outcome: Outcome, path: str | Path) -> Path:
    """Write a report in the format that the file's name ends in."""
    place = require_report_path(path)
    FORMATS[place.suffix.lower()](outcome, place)
    return place


def require_report_path(path: str | Path) -> Path:
    """A file that a report can be written to, as far as its name says."""
    require_path("report", path)
    place = Path(path)
    rule = f"end in {', '.join(FORMATS)}"
    require(place.suffix.lower() in FORMATS, "report", rule, str(path))
    require(place.parent.is_dir(), "report", "be in a folder that exists", str(path))
    return place
