"""Checkpoints in a folder: safetensors and JSON, written aside, whole or not there.

    FOLDER/0001-000003-step-1200/part-0.safetensors     tensors, by path
                                 part-0.json            values, by path; what it is part of

The first number is that of the run's life, which is a new one whenever it goes on, the second that
of the checkpoint in it. Steps would not do: later lives may count fewer, on more workers.

Every process writes the part of its own workers, each file under another name first. A part is
there when its JSON is, and a checkpoint is whole when all the parts are there that it says it has.
Nobody has to wait for anybody, and who is killed at any moment leaves the last whole one as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flockstep.checkpoints.part import Part
from flockstep.errors import CheckpointError
from flockstep.folders import why_not

FORMAT = 1
KIND = "flockstep checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole.

    Fields:
        path: its folder.
        life: in which life of its run it was taken.
        serial: the number of those in this life.
        step: of the worker that had come furthest.
        parts: the number of each.
        about: what the run says of itself.
    """

    path: Path
    life: int
    serial: int
    step: int
    parts: tuple[int, ...]
    about: dict[str, Any]

    def read(self, number: int) -> Part:
        """The part of that number, checked."""
        return _read(self.path, number)


def require_folder(folder: Path) -> None:
    """Complain of a folder in which no checkpoint can be written."""
    reason = why_not(folder)
    if reason is not None:
        raise CheckpointError(
            f"'checkpoint' must be a folder that takes files (got {str(folder)!r}: {reason})"
        )


def newest(folder: Path) -> Checkpoint | None:
    """The last whole checkpoint in the folder, if there is one."""
    return next(_whole(folder), None)


def _numbers(path: Path) -> tuple[int, int]:
    """Life and serial of a checkpoint's folder."""
    life, serial, *_ = path.name.split("-")
    return int(life), int(serial)


def drop_older(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` whole checkpoints, and what is not whole before the last."""
    whole = _whole(folder, is_strict=False)
    kept = [each.path for _, each in zip(range(keep), whole, strict=False)]
    for path in _folders(folder):
        if kept and path not in kept and path.name < kept[0].name:
            shutil.rmtree(path, ignore_errors=True)  # the processes of all workers do the same


def drop_unfinished(folder: Path) -> None:
    """Remove what was begun after the last whole checkpoint, by a run that was stopped: a run that
    goes on might come to the same step, and its parts must not be taken for those.
    """
    last = newest(folder)
    for path in _folders(folder):
        if last is None or path.name > last.path.name:
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise CheckpointError(f"{str(path)!r} cannot be removed: {error}") from error


def _folders(folder: Path) -> list[Path]:
    """The newest first."""
    return sorted(folder.glob("????-??????-step-*"), reverse=True)


def _whole(folder: Path, is_strict: bool = True) -> Iterator[Checkpoint]:
    """The newest first. `is_strict`: complain of what is damaged, in place of passing over it."""
    for path in _folders(folder):
        described = next(iter(sorted(path.glob("part-*.json"))), None)
        if described is None:
            continue
        try:
            about = _described(described)
        except CheckpointError:
            if is_strict and described.exists():  # else somebody is removing it
                raise
            continue
        numbers = tuple(about["parts"])
        if all((path / f"part-{number}.json").exists() for number in numbers):
            yield Checkpoint(path, *_numbers(path), about["step"], numbers, about["about"])


def _described(path: Path) -> dict[str, Any]:
    """What a part's JSON says, if it is one that this version reads."""
    try:
        text = path.read_text()
        content = json.loads(text)
        kind, version = content["kind"], content["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{str(path)!r} is damaged, or no part of a checkpoint: {error!r}"
        ) from error
    if kind != KIND:
        raise CheckpointError(f"{str(path)!r} is no part of a checkpoint (its kind is {kind!r})")
    if version != FORMAT:
        raise CheckpointError(f"{str(path)!r} has format {version!r}, this version reads {FORMAT}")
    if content.get("checksum") != _checksum_of(content):
        raise CheckpointError(f"{str(path)!r} is damaged: its checksum is another")
    return content  # type: ignore[no-any-return]


def _checksum_of(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def _read(path: Path, number: int) -> Part:
    file = path / f"part-{number}.safetensors"
    content = _described(path / f"part-{number}.json")
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != content["sha256"]:
            raise CheckpointError(f"{str(file)!r} is damaged: its checksum is another")
        return load_file(file), content["values"]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{str(file)!r} is damaged: {error}") from error


def write_part(
    path: Path, step: int, number: int, part: Part, parts: Sequence[int], about: dict[str, Any]
) -> None:
    """Write one part of a checkpoint into its folder."""
    file = path / f"part-{number}.safetensors"
    tensors, values = part
    try:
        path.mkdir(parents=True, exist_ok=True)
        unfinished = path / f".part-{number}.safetensors"
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, unfinished)
        with unfinished.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            os.fsync(opened.fileno())
        unfinished.replace(file)
        content: dict[str, Any] = {
            "kind": KIND, "format": FORMAT, "step": step, "parts": [*parts], "about": about,
            "sha256": digest, "values": values,
        }  # fmt: skip
        unfinished = path / f".part-{number}.json"
        with unfinished.open("w") as opened:
            json.dump(content | {"checksum": _checksum_of(content)}, opened)
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.replace(path / f"part-{number}.json")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be written: {error}") from error


class Writer:
    """Writes the parts of one process aside, one at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        before = newest(folder)
        self._life = 1 if before is None else before.life + 1
        self._serial = 0
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def write(
        self, step: int, number: int, part: Part, parts: Sequence[int], about: dict[str, Any]
    ) -> None:
        """Begin to write a part, when the one before is written."""
        self.wait()
        self._serial += 1  # the same on all workers: all take part in every one
        path = self.folder / f"{self._life:04d}-{self._serial:06d}-step-{step}"

        def work() -> None:
            try:
                write_part(path, step, number, part, parts, about)
                drop_older(self.folder, self.keep)
            except Exception as error:  # noqa: BLE001
                # Raised where the run next asks for this writer.
                self._error = CheckpointError(f"no checkpoint in {str(path)!r}: {error}")

        self._thread = threading.Thread(target=work, name="flockstep-checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Wait until all is written, or could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until all is written. Complain if it could not be."""
        self.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
