"""What a worker's program comes to, on its way from the worker to the launcher."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from flockstep.backends.base import Stopped
from flockstep.errors import FlockstepError, WorkerError, worker_error

Packed = TypeVar("Packed")
"""An outcome as it travels: a place in shared memory, or an object of Ray's store."""


@dataclass
class Outcome:
    """A value, or an error with its traceback."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def outcome_of(program: Callable[[], Any]) -> Outcome:
    """In the worker: run the program, and keep what it returns or raises."""
    try:
        return Outcome(program())
    except Stopped:
        raise
    except BaseException as error:  # noqa: BLE001
        # Whatever ended the program is the launcher's to raise.
        return Outcome(error=error, trace=traceback.format_exc())


def packed(
    outcome: Outcome,
    rank: int,
    pack: Callable[[Outcome], Packed],
    unpack: Callable[[Packed], Any],
) -> Packed:
    """In the worker: the outcome as it travels, or why it cannot."""
    try:
        sent = pack(outcome)
        if outcome.error is not None:
            unpack(sent)  # many exceptions go into a pickle and do not come out again
        return sent
    except Exception as error:  # noqa: BLE001
        # Pickle raises whatever the objects it meets raise.
        if outcome.error is None:
            instead: FlockstepError = FlockstepError(
                f"rank {rank} cannot send what its program returned: {error}"
            )
        else:
            instead = WorkerError(str(worker_error(rank, outcome.error)), rank)
        return pack(Outcome(error=instead, trace=outcome.trace))


def result_of(rank: int, sent: Packed, unpack: Callable[[Packed], Outcome]) -> Any:
    """In the launcher: what the program of `rank` returned; raises what it raised."""
    try:
        outcome = unpack(sent)
    except Exception as unreadable:  # whatever the objects in the pickle raise
        raise FlockstepError(
            f"what rank {rank} returned cannot be read here: {unreadable}"
        ) from unreadable
    if outcome.error is None:
        return outcome.value
    error = worker_error(rank, outcome.error)
    (error.__cause__ or error).add_note(f"In the process of rank {rank}:\n{outcome.trace}")
    raise error
