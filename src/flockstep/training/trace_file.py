"""A run's trace as a file for https://ui.perfetto.dev or chrome://tracing.

The format is that of Chrome's trace events (the "Trace Event Format" of the Chromium project), as a
JSON object: one process, one thread per worker, and a complete event (`"ph": "X"`) for each time
that it computed, waited or sent. Times are microseconds of the run's clock.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

from torch import Tensor

from flockstep.comm import EVENT_KINDS
from flockstep.errors import InvalidField
from flockstep.fields import require

Track = tuple[Tensor, list[str]]
"""What a worker's `Trace.table()` gives."""

PROCESS = 1  # some viewers take process 0 for the system's own
ROWS_AT_ONCE = 4096


def require_trace_path(path: str | Path) -> Path:
    """The file to write, if a trace can be written there: that which a link points to. To be asked
    before a long run begins.
    """
    place = Path(os.path.realpath(path))
    with _named(path):
        require(place.parent.is_dir(), "trace", "be a file in a folder that exists", str(path))
        require(not place.is_dir(), "trace", "be a file, not a folder", str(path))
        is_ordinary = place.is_file() or not os.path.lexists(place)
        require(is_ordinary, "trace", "be an ordinary file, if it is there already", str(path))
        unfinished = _unfinished(place)
        unfinished.open("ab").close()  # some folders take no files, whatever their permissions say
        unfinished.unlink(missing_ok=True)
    return place


def write_trace(path: str | Path, tracks: Sequence[Track | None], title: str = "flockstep") -> None:
    """Write the tracks of all ranks, in their order; None for a worker that was lost with its own.

    A name that ends in `.gz` is compressed. The file is there when it is whole, or not at all.
    """
    place = require_trace_path(path)
    unfinished = _unfinished(place)
    with _named(path):
        try:
            with _opened(unfinished, Path(path).suffix == ".gz") as file:
                _write(file, tracks, title)
            unfinished.replace(place)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """What the system says against the file is an error of the argument."""
    try:
        yield
    except OSError as error:
        raise InvalidField(
            f"'trace' must be a file that can be written (got {str(path)!r}: {error.strerror})"
        ) from error


def _unfinished(place: Path) -> Path:
    return place.with_name(place.name + ".part")


def _opened(path: Path, is_compressed: bool) -> TextIO:
    if is_compressed:
        return cast(TextIO, gzip.open(path, "wt", compresslevel=5, encoding="utf-8"))
    return path.open("w", encoding="utf-8")


def _write(file: TextIO, tracks: Sequence[Track | None], title: str) -> None:
    """Piece by piece: of a thousand workers the whole would take gigabytes."""
    clocks = [names[0] for _, names in filter(None, tracks)]
    other = {"title": title, "workers": len(tracks), "clock": clocks[0] if clocks else "none"}
    file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n')
    file.write(_metadata("process_name", 0, {"name": title}))
    for rank, track in enumerate(tracks):
        lost = " (lost)" if track is None else ""
        file.write(",\n" + _metadata("thread_name", rank, {"name": f"rank {rank}{lost}"}))
        file.write(",\n" + _metadata("thread_sort_index", rank, {"sort_index": rank}))
        if track is not None:
            for event in _events(rank, *track):
                file.write(",\n" + event)
    file.write("\n]}\n")


def _metadata(name: str, rank: int, args: dict[str, object]) -> str:
    event = {"ph": "M", "pid": PROCESS, "tid": rank, "ts": 0, "name": name, "args": args}
    return json.dumps(event, separators=(",", ":"))


def _events(rank: int, rows: Tensor, names: list[str]) -> Iterator[str]:
    texts = [json.dumps(name) for name in names]
    where = f'"pid":{PROCESS},"tid":{rank}'
    free = 0  # nanoseconds; rounding must not make an event begin before the last one has ended
    for some in rows.split(ROWS_AT_ONCE):
        for kind, name, start, duration, nbytes, peer, step in some.tolist():
            begin = max(free, round(start * 1e9))
            free = max(begin, round((start + duration) * 1e9))
            time = f'"ts":{_microseconds(begin)}'
            category = EVENT_KINDS[int(kind)]
            if category == "dropped":
                text = json.dumps(f"{int(nbytes)} later events were dropped")
                args = f'"args":{{"events":{int(nbytes)}}}'
                yield f'{{"ph":"i","s":"t",{where},{time},"name":{text},"cat":"dropped",{args}}}'
                continue
            args = f'"step":{int(step)}'
            if category != "computing":
                args += f',"bytes":{int(nbytes)}'
            if peer >= 0:
                args += f',"peer":{int(peer)}'
            yield (
                f'{{"ph":"X",{where},{time},"dur":{_microseconds(free - begin)},'
                f'"name":{texts[int(name)]},"cat":"{category}","args":{{{args}}}}}'
            )


def _microseconds(nanoseconds: int) -> str:
    whole, rest = divmod(nanoseconds, 1000)
    return f"{whole}.{rest:03d}" if rest else str(whole)
