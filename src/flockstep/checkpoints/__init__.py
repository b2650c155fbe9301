"""A run kept in a folder, so that it can go on."""

from flockstep.checkpoints.folder import (
    Checkpoint,
    Writer,
    drop_unfinished,
    newest,
    require_folder,
)
from flockstep.checkpoints.part import Part, joined, load_part, part_of, parted, read_part
from flockstep.checkpoints.together import go_on_together, require_same, save_together

__all__ = [
    "Checkpoint",
    "Part",
    "Writer",
    "drop_unfinished",
    "go_on_together",
    "joined",
    "load_part",
    "newest",
    "part_of",
    "parted",
    "read_part",
    "require_folder",
    "require_same",
    "save_together",
]
