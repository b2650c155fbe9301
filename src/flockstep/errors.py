"""Everything Flockstep raises on purpose.

FlockstepError
├── InvalidField     a value breaks the rule of its field        (also a ValueError)
├── UnknownName      no such strategy, task, backend, …          (also a ValueError)
├── SpecError        a run cannot be written as text, or read    (also a ValueError)
├── MismatchError    workers called different collectives, or with different tensors
├── DeadlockError    every worker waits for another
├── WorkerError      a worker's own code raised                  (also of the type that it raised)
├── WorkerLost       a worker's process ended without a word, or is frozen
├── MessageLost      the network has lost a message that was allowed to be lost
├── NonFiniteLoss    a loss became infinite or not a number
├── DataError        a file of a data set is missing, damaged or not what it should be
├── ResultError      a folder does not hold a result that can be read, or takes none
├── RecordError      a record of a study cannot be read, or not be written
└── CheckpointError  a run cannot be saved, or go on from what a folder holds
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FlockstepError(Exception):
    """The parent of all errors of this library."""


class InvalidField(FlockstepError, ValueError):
    """A value breaks the rule of its field: `'period' must be at least 1 (got 0)`."""


class UnknownName(FlockstepError, ValueError):
    """A name that is not in its table; the message lists the known ones."""


class SpecError(FlockstepError, ValueError):
    """A run cannot be written as text, or a file of one cannot be read."""


class MismatchError(FlockstepError):
    """Workers of one group disagree about the call they make together."""


class DeadlockError(FlockstepError):
    """No worker can go on. The message names each rank, its call and its source line."""


class WorkerError(FlockstepError):
    """A worker's program raised; `rank` says which worker, `__cause__` is what it raised."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class WorkerLost(FlockstepError):
    """A worker's process ended without a result: killed, crashed or exited; or it was given up as
    it had not moved for longer than the backend's patience.

    `step` is its last one, `seconds` the time of the run at which it was missed, `frozen_seconds`
    how long it had not moved; None where that is not known, or not so."""

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        exit_code: int | None = None,
        step: int | None = None,
        seconds: float | None = None,
        frozen_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.step = step
        self.seconds = seconds
        self.frozen_seconds = frozen_seconds


class MessageLost(FlockstepError):
    """The network has lost a message for which both sides had said that it may be lost. Whoever
    waited for it goes on without it.
    """


class NonFiniteLoss(FlockstepError):
    """Training cannot go on from an infinite or undefined loss."""


class DataError(FlockstepError):
    """A file of a data set is missing, damaged or cannot be fetched. The message names the file,
    rule and value.
    """


class ResultError(FlockstepError):
    """A result folder cannot be read, or not be written."""


class CheckpointError(FlockstepError):
    """A checkpoint cannot be written, or a run not go on from it. The message names the file."""


class RecordError(FlockstepError):
    """A record of a study cannot be read, or not be written. The message names file and field."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """The error for `name`, with the one that was probably meant, and every name that would have
    worked.
    """
    names = sorted(known)
    hint = did_you_mean(name, names)
    return UnknownName(f"unknown {kind} {name!r}; {hint}known: {', '.join(names)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'wan-100m'? `, or nothing where no name is near."""
    near = nearest(name, known)
    return "" if near is None else f"did you mean {near!r}? "


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The name that is most like `name`, in small or capital letters; None where none is alike."""
    by_letters = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), by_letters, n=1, cutoff=likeness)
    return by_letters[found[0]] if found else None


def plain_spelling(name: str) -> str:
    """What all spellings of a name have in common: LocalSGD, local_sgd and local-sgd are one."""
    return name.replace("_", "").replace("-", "").lower()


def worker_error(rank: int, error: BaseException) -> FlockstepError:
    """What `launch` raises when the program of `rank` raised `error`."""
    combined = own_code_error(f"rank {rank}", error)
    if isinstance(combined, WorkerError):
        combined.rank = rank
    return combined


def own_code_error(whose: str, error: BaseException) -> FlockstepError:
    """What is raised where code of the user's own raised `error`: `rank 3 raised ValueError: …`.

    The new error is of the old error's type too, so `except ValueError` around a launch catches
    what it would catch around a plain call. Errors of this library name the rank themselves and
    stay as they are."""
    if isinstance(error, FlockstepError):
        return error
    message = f"{whose} raised {type(error).__name__}: {error}"
    combined = WorkerError(message)
    if isinstance(error, Exception):  # SystemExit must not end the caller
        try:
            combined = _alike(error)(message)
        except Exception:  # noqa: BLE001
            # A class may forbid subclasses in any way: the plain WorkerError says all.
            combined = WorkerError(message)
        combined.__dict__.update(error.__dict__)
    combined.__cause__ = error
    return combined


def _alike(error: Exception) -> type[WorkerError]:
    """A WorkerError that is of the error's type too, whatever that type's constructor and text
    need.
    """
    members = {
        "__module__": __name__,
        "__init__": Exception.__init__,
        "__str__": lambda self: self.args[0],
    }
    return type("WorkerError", (WorkerError, type(error)), members)
