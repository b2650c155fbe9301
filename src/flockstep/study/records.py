"""Records: what one run of a study leaves, a file of its own, whole or not there.

A finished run is `ID.json`, a failed one `ID.failed.json`, where ID is that of its spec. So folders
of several machines merge by copying, and a failure never takes the place of a result. Of a study
that is done, `pack_records` makes one file, which is read as the others are.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import lzma
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flockstep.errors import FlockstepError, RecordError
from flockstep.folders import write_whole
from flockstep.result import as_json, versions
from flockstep.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
DONE, FAILED = ".json", ".failed.json"
UNFINISHED = ".part"
PACKED = "records.jsonl.xz"


@dataclass(frozen=True)
class Record:
    """One run: what it was, and what came of it or went wrong.

    Fields:
        id: of its spec.
        spec: as `RunSpec.to_json` writes it; None for a task that exists in a script only.
        seed: of the run.
        status: "done" or "failed".
        metrics, history, lost, config: as in `fs.Result`; without positions.
        error: type, message and traceback of what went wrong; None for a run that is done.
        timeline: of some runs, who computed, waited and sent in the beginning.
        versions, commit, host: what it was made with, and where.
        started: when, in UTC. wall_seconds: how long it took, data and start of workers included.
    """

    id: str
    spec: Mapping[str, Any] | None
    seed: int
    status: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    lost: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, str] | None = None
    timeline: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    host: Mapping[str, Any] = field(default_factory=dict)
    started: str = ""
    wall_seconds: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.status == "done"

    @property
    def file_name(self) -> str:
        return self.id + (DONE if self.is_done else FAILED)


def made_with() -> dict[str, Any]:
    """What a record says of the machine and the software."""
    return {
        "versions": versions() | {"python": platform.python_version()},
        "commit": _commit(),
        "host": {
            "name": platform.node(),
            "system": platform.system(),
            "machine": platform.machine(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }


@functools.cache
def processor() -> str:
    """The model, and the instructions that torch uses of it: the same runs have the same bits on
    machines where it is the same.
    """
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


@functools.cache
def _commit() -> str | None:
    """The commit of the checkout that this library runs from, with a + where it has been changed;
    None where it was installed otherwise.
    """
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return None  # there is no git


# ---- Writing


def write_record(folder: Path, record: Record) -> Path:
    """Put a record in its place, safe from a loss of power. One that is there already stays, but
    for a failure that is tried again.
    """
    text = json.dumps(_body_of(record), indent=1) + "\n"
    path = folder / record.file_name
    unfinished = folder / f"{record.file_name}.{os.getpid()}{UNFINISHED}"
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if record.is_done:
            with suppress(FileExistsError):  # the same run, by somebody else
                os.link(unfinished, path)
        else:
            unfinished.replace(path)
        _keep_folder(folder)
    except OSError as error:
        raise RecordError(f"{str(path)!r} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    if record.is_done:
        (folder / f"{record.id}{FAILED}").unlink(missing_ok=True)
    return path


def _body_of(record: Record) -> dict[str, Any]:
    content = {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}
    body: dict[str, Any] = json.loads(as_json({"schema": SCHEMA, **content}))
    return body | {"checksum": checksum_of(body)}


def pack_records(folder: str | Path) -> Path:
    """Put all records of a folder into one compressed file, a line each, in the order of their ids:
    a tenth of the size, and the same bytes for the same records. Studies go on from it, and
    reports are made of it, as from single files.

    Example:
        fs.pack_records("studies/results/period")
    """
    place = Path(folder)
    records = read_records(place)
    if not records:
        raise RecordError(f"{str(folder)!r} holds no records")
    lines = [json.dumps(_body_of(record)) + "\n" for _, record in sorted(records.items())]
    packed = lzma.compress("".join(lines).encode(), preset=6)
    try:
        write_whole(place / PACKED, packed)
    except OSError as error:
        raise RecordError(f"{str(place / PACKED)!r} cannot be written: {error.strerror}") from error
    for path in record_paths(place):
        path.unlink()
    return place / PACKED


def _keep_folder(folder: Path) -> None:
    """The name of a new file must outlive a loss of power, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum_of(body: Mapping[str, Any]) -> str:
    """16 hex digits of all but itself."""
    kept = {name: value for name, value in body.items() if name != "checksum"}
    text = json.dumps(kept, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def drop_unfinished(folder: Path) -> None:
    """What a run that was killed had begun to write."""
    for path in folder.glob(f"*{UNFINISHED}"):
        path.unlink(missing_ok=True)


# ---- Reading


def read_record(path: Path) -> Record:
    """A record, if it is whole, as it was written, and of this schema. Errors name the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    record = _parsed(text, repr(str(path)))
    if path.name != record.file_name:
        raise RecordError(
            f"{str(path)!r} holds another run: its field 'id' says {record.file_name!r}"
        )
    return record


def _parsed(text: str, where: str) -> Record:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise RecordError(f"{where} is truncated or no record: {error}") from error
    if not isinstance(body, dict) or "schema" not in body:
        raise RecordError(f"{where} is no record: it has no field 'schema'")
    if body["schema"] != SCHEMA:
        found = body["schema"]
        raise RecordError(f"{where} has schema {found!r}; this version reads {SCHEMA}")
    if body.get("checksum") != checksum_of(body):
        raise RecordError(
            f"{where} was edited or damaged: its field 'checksum' does not fit the rest"
        )
    known = {each.name for each in dataclasses.fields(Record)}
    fields = {name: value for name, value in body.items() if name not in ("schema", "checksum")}
    if set(fields) != known:
        odd = ", ".join(map(repr, sorted(set(fields) ^ known)))
        raise RecordError(f"{where} has other fields than a record: {odd}")
    return Record(**fields)


def _packed_records(folder: Path) -> list[Record]:
    """Those of the packed file, if there is one."""
    path = folder / PACKED
    try:
        written = path.stat()
    except OSError:
        return []
    return _unpacked(path, written.st_mtime_ns, written.st_size)


@functools.lru_cache(maxsize=4)  # a study reads its records several times
def _unpacked(path: Path, mtime_ns: int, size: int) -> list[Record]:
    try:
        lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    except OSError as error:
        raise RecordError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise RecordError(f"{str(path)!r} is truncated or damaged: {error}") from error
    where = repr(str(path))
    return [_parsed(line, f"{where}, line {number},") for number, line in enumerate(lines, 1)]


def record_paths(folder: Path) -> Iterator[Path]:
    """The files of records in a folder, by name."""
    yield from sorted(folder.glob(f"*{DONE}"))


def read_records(folder: Path, ids: Sequence[str] | None = None) -> dict[str, Record]:
    """The records in a folder by id; of these ids alone, if they are given. A finished run hides
    its earlier failure.
    """
    if ids is not None:
        paths = [folder / f"{each}{ending}" for each in ids for ending in (FAILED, DONE)]
        single = [read_record(path) for path in paths if path.exists()]
    else:
        single = [*map(read_record, record_paths(folder))]
    wanted = None if ids is None else {*ids}
    packed = [each for each in _packed_records(folder) if wanted is None or each.id in wanted]
    found = [*packed, *single]
    failed = {record.id: record for record in found if not record.is_done}
    return failed | {record.id: record for record in found if record.is_done}


def require_same_run(record: Record, spec: RunSpec) -> None:
    """The record under a spec's id is of that very spec."""
    if record.spec is None:
        return
    try:
        same = RunSpec.from_json(json.dumps(record.spec)).id == spec.id
    except FlockstepError as error:
        raise RecordError(
            f"record {record.id}: its field 'spec' cannot be read: {error}"
        ) from error
    if not same:
        raise RecordError(f"record {record.id}: its field 'spec' is of another run")


def load_records(folder: str | Path) -> pd.DataFrame:
    """All records of a folder as a table: a row for each run, with the fields of its spec, its
    metrics, and its looks in the column `history`.

    Example:
        runs = fs.load_records("results/mine")
        runs.groupby("strategy")["test_accuracy"].agg(["count", "mean", "std"])
    """
    import pandas as pd

    place = Path(folder)
    if not place.is_dir():
        raise RecordError(f"{str(folder)!r} is no folder")
    rows = [row_of(record) for record in read_records(place).values()]
    return pd.DataFrame(rows)


def row_of(record: Record) -> dict[str, Any]:
    """A record as one row: what it was, then what came of it."""
    spec = record.spec
    if spec is None:  # as far as its config says
        spec = {
            name: record.config.get(name) for name in ("task", "strategy", "workers", "backend")
        }
    told = {name: value for name, value in spec.items() if name not in ("version", "seed")}
    error = None if record.error is None else f"{record.error['type']}: {record.error['message']}"
    return {
        "id": record.id,
        **told,
        "workers": record.config.get("workers", told.get("workers")),
        "backend": record.config.get("backend", told.get("backend")),
        "seed": record.seed,
        "status": record.status,
        **record.metrics,
        "error": error,
        "started": record.started,
        "commit": record.commit,
        "host": record.host.get("name"),
        "history": record.history,
    }
