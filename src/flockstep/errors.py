"""Everything Flockstep raises on purpose.

FlockstepError
├── InvalidField     a value breaks the rule of its field        (also a ValueError)
├── UnknownName      no such strategy, task, backend, …          (also a ValueError)
├── SpecError        a run cannot be written as text, or read    (also a ValueError)
├── MismatchError    workers called different collectives, or with different tensors
├── DeadlockError    every worker waits for another
├── WorkerError      a worker's own code raised                  (also of the type that it raised)
├── WorkerLost       a worker's process ended without a word, or is frozen
├── NonFiniteLoss    a loss became infinite or not a number
├── DataError        a file of a data set is missing, damaged or not what it should be
└── ResultError      a folder does not hold a result that can be read
"""

from __future__ import annotations

from collections.abc import Iterable


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


class NonFiniteLoss(FlockstepError):
    """Training cannot go on from an infinite or undefined loss."""


class DataError(FlockstepError):
    """A file of a data set is missing, damaged or cannot be fetched. The message names the file,
    rule and value.
    """


class ResultError(FlockstepError):
    """A result folder cannot be read."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """The error for `name`, with every name that would have worked."""
    return UnknownName(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}")


def worker_error(rank: int, error: BaseException) -> FlockstepError:
    """What `launch` raises when the program of `rank` raised `error`.

    The new error is of the old error's type too, so `except ValueError` around a launch catches
    what it would catch around a plain call. Errors of this library name the rank themselves and
    stay as they are."""
    if isinstance(error, FlockstepError):
        return error
    message = f"rank {rank} raised {type(error).__name__}: {error}"
    combined = WorkerError(message)
    if isinstance(error, Exception):  # SystemExit must not end the caller
        try:
            combined = _alike(error)(message)
        except Exception:  # noqa: BLE001
            # A class may forbid subclasses in any way: the plain WorkerError says all.
            combined = WorkerError(message)
        combined.__dict__.update(error.__dict__)
    combined.rank = rank
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
