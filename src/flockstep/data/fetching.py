"""Downloads that end with a verified file under its name, or with the beginning of one from
which the next goes on.
"""

from __future__ import annotations

import functools
import gzip
import re
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urljoin

from flockstep.data.datasets import DataSet
from flockstep.data.files import Archive, DataFile, Partial
from flockstep.errors import DataError
from flockstep.fields import require, require_integer, require_number
from flockstep.folders import empty_folders_removed

Watch = Callable[[str, int, int | None], None]

CHUNK_BYTES = 1 << 18
LONGEST_PAUSE_SECONDS = 8.0
SCHEMES = ("http://", "https://")


def fetch(
    dataset: DataSet,
    folder: Path,
    *,
    mirrors: Sequence[str] | None = None,
    timeout: float = 30.0,
    attempts: int = 3,
    pause_seconds: float = 0.5,
    limit_bytes: int = 1 << 32,
    watch: Watch | None = None,
) -> list[Path]:
    """Download what is missing or damaged of a data set's files; where they all are.

    Fields:
        folder: under which data sets lie: FLOCKSTEP_DATA, or flockstep in the user's cache.
        mirrors: tried in order; the data set's, unless others are given.
        timeout: seconds without a byte after which a mirror is said to stall.
        attempts: connections to one mirror for one file; each goes on where the one before ended.
        pause_seconds: before a second attempt, and twice as long before each further one.
        limit_bytes: the most to be read of a file whose size nobody knows.
        watch: `watch(file name, bytes done, bytes in all or None)` is called as bytes come.
    """
    files = dataset.files
    if not files.forms:
        return []
    chosen = tuple(files.mirrors if mirrors is None else mirrors)
    link = _Link(chosen, timeout, attempts, pause_seconds, limit_bytes, watch or (lambda *_: None))
    found = files.find([folder])
    if found and all(
        file.is_intact(path) for file, path in zip(found[0].files, found[1], strict=True)
    ):
        return found[1]
    form = files.forms[0]
    place = folder / form.folders[0]
    wanted = [
        file for file in form.files if not ((path := file.path_in(place)) and file.is_intact(path))
    ]
    with empty_folders_removed(place):
        if files.archive:
            _fetch_archive(link, files.archive, place, wanted)
        else:
            _fetch_files(link, place, wanted)
    return [path for file in form.files if (path := file.path_in(place))]


def _fetch_files(link: _Link, place: Path, wanted: Sequence[DataFile]) -> None:
    for file in wanted:
        with Partial(place / file.name) as part:
            link.fill(part, file, accept=functools.partial(_verify, part, file))
            part.settle()


def _fetch_archive(link: _Link, archive: Archive, place: Path, wanted: Sequence[DataFile]) -> None:
    with Partial(place.parent / archive.name) as part:

        def accept() -> None:
            _verify(part, archive)
            _unpack(part, archive, place, wanted)

        link.fill(part, archive, accept)
        part.discard()


class _Failed(Exception):
    """Why nothing came of an attempt; `final` if another one at this mirror would fare no
    better.
    """

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


def _verify(part: Partial, file: DataFile) -> None:
    found = part.md5()
    if found != file.md5:
        raise _Failed(f"{file.name} must have md5 {file.md5} (got {found})", final=True)


def _unpack(part: Partial, archive: Archive, place: Path, wanted: Sequence[DataFile]) -> None:
    """Put the wanted files, and nothing else that may be in an archive, in their place."""
    missing = {f"{archive.folder}/{file.name}": file for file in wanted}
    part.file.seek(0)
    try:
        with tarfile.open(fileobj=part.file, mode="r:gz") as tar:
            for member in tar:
                if member.isreg() and (file := missing.pop(member.name, None)):
                    _place(tar.extractfile(member), file, place)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _Failed(f"must be a tar.gz file (got: {error})", final=True) from error
    if missing:
        raise _Failed(f"must have {next(iter(missing))} in it", final=True)


def _place(content: IO[bytes] | None, file: DataFile, place: Path) -> None:
    with Partial(place / file.name) as part:
        part.restart()
        try:
            while content and (chunk := content.read(CHUNK_BYTES)):
                part.write(chunk)
            _verify(part, file)
        except Exception:
            part.restart()  # nothing goes on from here, so nothing is left
            raise
        part.settle()


@dataclass(frozen=True)
class _Link:
    """Mirrors, and how much patience to have with them."""

    mirrors: tuple[str, ...]
    timeout: float
    attempts: int
    pause_seconds: float
    limit_bytes: int
    watch: Watch

    def __post_init__(self) -> None:
        require(bool(self.mirrors), "mirrors", "be one or more addresses", self.mirrors)
        for mirror in self.mirrors:
            require(mirror.startswith(SCHEMES), "mirrors", "start with http:// or https://", mirror)
        require_number("timeout", self.timeout, at_least=0.001, at_most=3600)
        require_integer("attempts", self.attempts, 1)
        require_number(
            "pause_seconds", self.pause_seconds, at_least=0, at_most=LONGEST_PAUSE_SECONDS
        )
        require_integer("limit_bytes", self.limit_bytes, 1)

    def fill(self, part: Partial, file: DataFile, accept: Callable[[], None]) -> None:
        """Download from the first mirror whose file is accepted. What is not is deleted."""
        failures = []
        for mirror in self.mirrors:
            try:
                self._fill_from(mirror, part, file, accept)
            except _Failed as failed:
                failures.append(f"{mirror}: {failed}")
            else:
                return
        kept = f"; the next fetch goes on after {part.size:,} bytes" if part.size else ""
        raise DataError(f"{part.final} could not be fetched from {'; from '.join(failures)}{kept}")

    def _fill_from(
        self, mirror: str, part: Partial, file: DataFile, accept: Callable[[], None]
    ) -> None:
        went_on = part.size > 0
        while True:
            self._complete(mirror.removesuffix("/") + "/" + quote(file.name), part, file)
            try:
                accept()
                return
            except _Failed:
                part.restart()
                if not went_on:
                    raise
            # What an earlier mirror or program left may be what was wrong: this one gets another,
            # clean chance.
            went_on = False

    def _complete(self, url: str, part: Partial, file: DataFile) -> None:
        """Download what is missing at the end of `part`, in a few attempts."""
        if file.size is not None and part.size > file.size:
            part.restart()
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(min(self.pause_seconds * 2 ** (attempt - 1), LONGEST_PAUSE_SECONDS))
            try:
                if not part.size or part.size != file.size:
                    self._receive(url, part, file)
                return
            except _Failed as failed:
                if failed.final or attempt == self.attempts - 1:
                    raise

    def _receive(self, url: str, part: Partial, file: DataFile) -> None:
        """One request for all that is missing, and its answer."""
        asked = {"Range": f"bytes={part.size}-"} if part.size else {}
        try:
            with self._network(part):
                headers = {"User-Agent": "flockstep", **asked}
                response = _opener().open(
                    request.Request(url, headers=headers), timeout=self.timeout
                )
        except HTTPError as error:
            with error:
                _refused(error, part, file)
            return
        with response:
            total = _total(response, part, file)
            self._copy(response, part, file, total)

    def _copy(
        self, response: HTTPResponse, part: Partial, file: DataFile, total: int | None
    ) -> None:
        most = self.limit_bytes if total is None else total
        if file.size is None and most > self.limit_bytes:
            raise _Failed(f"must have at most {self.limit_bytes} bytes (got {most})", final=True)
        self.watch(file.name, part.size, total)
        while part.size < most:
            with self._network(part):
                chunk = response.read1(min(CHUNK_BYTES, most - part.size))
            if not chunk:
                break
            part.write(chunk)
            self.watch(file.name, part.size, total)
        if total is None and part.size == most:
            part.restart()
            raise _Failed(f"must have less than {most} bytes (got no end)", final=True)
        if total is not None and part.size < total:
            raise _Failed(f"ended after {part.size} of {total} bytes")

    @contextmanager
    def _network(self, part: Partial) -> Iterator[None]:
        """Makes reasons of the network's errors; those that are answers stay what they are."""
        try:
            yield
        except HTTPError:
            raise
        except (OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError):
                raise _Failed(f"stalled for {self.timeout:g} s after {part.size} bytes") from error
            raise _Failed(" ".join(f"{type(reason).__name__}: {reason}".split())) from error


def _total(response: HTTPResponse, part: Partial, file: DataFile) -> int | None:
    """How long the whole file is, if that is known. The answer must go on where `part` ends, or
    start anew.
    """
    length = response.length
    if response.status == HTTPStatus.PARTIAL_CONTENT:
        answered = response.headers.get("Content-Range", "")
        begin, length = _range(answered)
        if begin != part.size:
            asked = f"bytes={part.size}-"
            part.restart()  # the next attempt asks for no range
            raise _Failed(f"must answer {asked} with that range (got {answered!r})")
    elif response.status != HTTPStatus.OK:
        raise _Failed(f"must answer with 200 or 206 (got {response.status})", final=True)
    if length is not None and file.size is not None and length != file.size:
        raise _Failed(f"must have {file.size} bytes (got {length})", final=True)
    if response.status == HTTPStatus.OK and part.size:
        part.restart()
    return length if file.size is None else file.size


def _range(header: str) -> tuple[int | None, int | None]:
    """`bytes 5-9/10` is (5, 10): where a range begins, and the length of the whole file."""
    match = re.fullmatch(r"bytes (?:([0-9]+)-[0-9]+|\*)/(?:([0-9]+)|\*)", header.strip())
    begin, length = match.groups() if match else (None, None)
    return int(begin) if begin else None, int(length) if length else None


def _refused(error: HTTPError, part: Partial, file: DataFile) -> None:
    """Makes a reason of an answer that is an error, unless it says that nothing is missing."""
    reason = (
        f"{error.code} {HTTPStatus(error.code).phrase}"
        if error.code in set(HTTPStatus)
        else str(error.code)
    )
    if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and part.size:
        if file.size is None and _range(error.headers.get("Content-Range", ""))[1] == part.size:
            return
        part.restart()
        raise _Failed(reason)
    passing = error.code >= 500 or error.code in (
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_MANY_REQUESTS,
    )
    raise _Failed(reason, final=not passing)


class _OnlyHttp(request.HTTPRedirectHandler):
    """Follows a redirect only to where a mirror may be: never to a file of this machine."""

    def http_error_302(
        self, req: request.Request, fp: Any, code: int, msg: str, headers: HTTPMessage
    ) -> Any:
        target = urljoin(req.full_url, headers.get("Location", ""))
        if not target.lower().startswith(SCHEMES):
            fp.close()
            raise _Failed(f"must redirect to http or https (got {target!r})", final=True)
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _opener() -> request.OpenerDirector:
    """Like urllib's own, without what it can open beyond http and https."""
    opener = request.OpenerDirector()
    errors = (request.HTTPDefaultErrorHandler, request.HTTPErrorProcessor, request.UnknownHandler)
    for handler in (
        request.ProxyHandler,
        request.HTTPHandler,
        request.HTTPSHandler,
        _OnlyHttp,
        *errors,
    ):
        opener.add_handler(handler())
    return opener
