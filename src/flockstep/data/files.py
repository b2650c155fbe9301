"""The files of data sets: where they lie, whether they are what they should be, and how they get
their names.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from flockstep.data.formats import unpacked
from flockstep.errors import DataError

_MD5 = functools.partial(hashlib.md5, usedforsecurity=False)
LOCKED_BYTE = (1 << 31) - 2  # the last but one whose place fits into 31 bits, as Windows wants


@dataclass(frozen=True)
class DataFile:
    """One file. Of `NAME.gz` what is in it may lie there as `NAME` instead, if `plain_md5` says
    what that must be.
    """

    name: str
    md5: str
    size: int | None = None
    plain_md5: str | None = None

    @property
    def variants(self) -> dict[str, str]:
        """Each name under which it may lie on a disk, with the checksum there."""
        plain = {self.name.removesuffix(".gz"): self.plain_md5} if self.plain_md5 else {}
        return {self.name: self.md5, **plain}

    def path_in(self, place: Path) -> Path | None:
        """Where it lies in a folder, verified or not."""
        return next((place / name for name in self.variants if _is_file(place / name)), None)

    def is_intact(self, path: Path) -> bool:
        """Whether it is what lies there."""
        return md5_of(path) == self.variants[path.name]


@dataclass(frozen=True)
class Archive(DataFile):
    """A tar file with all files of a set in its one `folder`."""

    folder: str = ""


@dataclass(frozen=True)
class Form:
    """A form in which a set may lie on a disk: its files in order, all in one of these folders, and
    their reader.

    `read(path, content)` is called with the unpacked bytes of one verified file.
    """

    read: Callable[[str, bytes], Any]
    folders: tuple[str, ...]
    files: tuple[DataFile, ...]


@dataclass(frozen=True)
class Files:
    """All that is known of the files of one set.

    Fields:
        name: the set's.
        forms: in any of which it may lie on a disk; the first is the one that is fetched. None: it
            needs no files.
        mirrors: addresses to which a file's name is appended.
        archive: what the mirrors have, if not the files themselves.
    """

    name: str
    forms: tuple[Form, ...] = ()
    mirrors: tuple[str, ...] = ()
    archive: Archive | None = None

    @property
    def nbytes(self) -> int:
        """To be downloaded."""
        fetched = (
            [self.archive]
            if self.archive
            else [file for form in self.forms[:1] for file in form.files]
        )
        return sum(file.size or 0 for file in fetched)

    def find(self, roots: Sequence[Path] | None = None) -> tuple[Form, list[Path]] | None:
        """The first form whose files are all there, not yet verified; None if there is none."""
        for form, place in self._places(roots):
            paths = [path for file in form.files if (path := file.path_in(place))]
            if len(paths) == len(form.files):
                return form, paths
        return None

    def load(self, roots: Sequence[Path] | None = None) -> list[tuple[str, Any]]:
        """The path of each file, in order, and what the reader makes of it once its checksum is
        found to be right.
        """
        found = self.find(roots)
        if found is None:
            raise self._missing(roots)
        form, paths = found
        return [
            (str(path), _read(form, file, path))
            for file, path in zip(form.files, paths, strict=True)
        ]

    def _places(self, roots: Sequence[Path] | None) -> Iterator[tuple[Form, Path]]:
        for root in folders() if roots is None else roots:
            for form in self.forms:
                yield from ((form, root / folder) for folder in form.folders)

    def _missing(self, roots: Sequence[Path] | None) -> DataError:
        """Names the first file that is missing where most are there."""
        places = list(self._places(roots))
        lacking = [
            [file for file in form.files if not file.path_in(place)] for form, place in places
        ]
        form, files = min(
            zip((form for form, _ in places), lacking, strict=True), key=lambda each: len(each[1])
        )
        name = files[0].name.removesuffix(".gz") + "[.gz]" if files[0].plain_md5 else files[0].name
        looked = " or ".join(str(place) for each, place in places if each is form)
        return DataError(
            f"data set {self.name!r} must have {name} in {looked}: "
            f"run 'flockstep data fetch {self.name}', or set FLOCKSTEP_DATA"
        )


def _read(form: Form, file: DataFile, path: Path) -> Any:
    content = verified(path, file.variants[path.name])
    return form.read(str(path), unpacked(str(path), content) if path.suffix == ".gz" else content)


def folders() -> list[Path]:
    """Where data may lie: FLOCKSTEP_DATA if it is set, then the user's cache."""
    found = []
    if named := os.environ.get("FLOCKSTEP_DATA"):
        found.append(Path(named).expanduser())
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # unset, or to be ignored as the XDG specification says
        try:
            cache = Path.home() / ".cache"
        except RuntimeError as error:
            if not found:
                raise DataError(
                    "FLOCKSTEP_DATA must be set for a user who has no home folder"
                ) from error
            return found
    return [*found, cache / "flockstep"]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # in a folder that this user may not look into
        return False


def verified(path: Path, md5: str) -> bytes:
    """The content of a file that has this checksum."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} must be a file that can be read (got: {error.strerror})"
        ) from error
    found = _MD5(content).hexdigest()
    if found != md5:
        raise DataError(f"{path} must have md5 {md5} (got {found})")
    return content


def md5_of(path: Path) -> str:
    """A file's checksum."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, _MD5).hexdigest()
    except OSError as error:
        raise DataError(
            f"{path} must be a file that can be read (got: {error.strerror})"
        ) from error


class Partial:
    """A file on its way: `NAME.part` beside its final name, which it takes when it is whole and
    verified.

    What is left when a program ends is the beginning of the file, and the next one goes on there.
    It is locked while it is open, so that two programs never write one file."""

    def __init__(self, final: Path) -> None:
        self.final = final
        self.path = final.with_name(final.name + ".part")
        with _on_disk(self.path):
            final.parent.mkdir(parents=True, exist_ok=True)
            self.file = self._locked()
        self.size = self.file.seek(0, os.SEEK_END)

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.size:
            self._close_on_windows()
            self.path.unlink(missing_ok=True)
        self.file.close()

    def write(self, content: bytes) -> None:
        """Append; what has come is on the disk even if the program is killed next."""
        rest = memoryview(content)
        try:
            with _on_disk(self.path):
                while rest:
                    written = self.file.write(rest)
                    self.size += written
                    rest = rest[written:]
        except DataError:
            self.size = 0  # a full disk gets its room back: what is empty is not left
            raise

    def restart(self) -> None:
        """Forget what has come."""
        with _on_disk(self.path):
            self.file.seek(0)
            self.file.truncate()
        self.size = 0

    def md5(self) -> str:
        with _on_disk(self.path):
            self.file.seek(0)
            return hashlib.file_digest(self.file, _MD5).hexdigest()

    def settle(self) -> None:
        """Take the final name, over whatever has it."""
        with _on_disk(self.path):
            os.fsync(self.file.fileno())
            self._close_on_windows()
            self.path.replace(self.final)

    def discard(self) -> None:
        """Be gone."""
        with _on_disk(self.path):
            self._close_on_windows()
            self.path.unlink()

    def _close_on_windows(self) -> None:
        """Windows renames and removes no file that is open. If another program takes the file up
        just then, Windows refuses, and nothing is lost. Elsewhere the lock is held until it is
        done.
        """
        if sys.platform == "win32":
            self.file.close()

    def _locked(self) -> FileIO:
        while True:
            with ExitStack() as closing:
                file = closing.enter_context(
                    FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
                )
                if not _try_lock(file):
                    raise DataError(
                        f"{self.path} must be written by one program at a time (another does)"
                    )
                # Between the two calls its last owner may have given it its final name: then the
                # lock is of no use.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                        closing.pop_all()
                        return file


def _try_lock(file: FileIO) -> bool:
    """Lock an open file unless another program has. The system frees the lock when the file is
    closed, also of a program that is killed: a lock file of ours would stay behind.
    """
    if sys.platform == "win32":
        import msvcrt

        # Windows lets nobody else read what is locked, so that is a byte behind all content.
        file.seek(LOCKED_BYTE)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} must be a file that can be written (got: {error.strerror})"
        ) from error
