"""Folders that are made on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def empty_folders_removed(folder: Path) -> Iterator[None]:
    """Of `folder` and its parents, remove those that were not there before and are empty in the
    end: what has failed leaves nothing.
    """
    new = [each for each in (folder, *folder.parents) if not is_there(each)]
    try:
        yield
    finally:
        for each in new:  # the innermost first
            with suppress(OSError):  # one that holds something stays
                each.rmdir()


def is_there(path: Path) -> bool:
    """Whether a file or folder is there; not where its name is too long, or we may not look."""
    try:
        return path.exists()
    except OSError:
        return False
