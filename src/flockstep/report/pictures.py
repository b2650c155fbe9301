"""What all pictures have in common: matplotlib, if it is there, and files that are whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from flockstep.errors import FlockstepError, InvalidField
from flockstep.fields import require
from flockstep.folders import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
COLOUR = "#1f5fa8"
SECOND_COLOUR = "#d1711f"


def require_picture_path(path: Path, option: str) -> None:
    require(path.suffix.lower() in FORMATS, option, "end in " + ", ".join(FORMATS), str(path))


def new_figure(path: Path, option: str, width: float, height: float) -> Figure:
    """An empty figure for a file whose name the user gave with `option`."""
    require_picture_path(path, option)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlockstepError("pictures need matplotlib: pip install 'flockstep[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path, option: str) -> None:
    """Write the figure in the format that the name ends in; all of it, or nothing."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=130)
    try:
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise InvalidField(
            f"{option!r} must be a file that can be written (got {str(path)!r}: {error.strerror})"
        ) from error
