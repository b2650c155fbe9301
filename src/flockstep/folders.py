"""Folders that are made on the way, and files that are whole."""

from __future__ import annotations

import tempfile
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


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file: all of it, or nothing, and then what was there before stays."""
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def why_not(folder: Path) -> str | None:
    """Why a folder takes no files; None where it does. It is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def is_there(path: Path) -> bool:
    """Whether a file or folder is there; not where its name is too long, or we may not look."""
    try:
        return path.exists()
    except OSError:
        return False
