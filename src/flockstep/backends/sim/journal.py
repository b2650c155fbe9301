"""What simulated workers hear from each other, written down and told again.

A run can be saved at any moment, but a program cannot be saved in the middle of a step. So a worker
is copied at the end of a step, and from there on its journal holds what its calls gave it. A worker
that goes on from the copy computes the same step again and makes the same calls; as long as there
are entries it is told what it was told then, at the same times, and touches nobody. Behind the last
entry it is where it was at the moment of the save, and its calls have effects again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flockstep.comm import Meter
from flockstep.errors import FlockstepError


@dataclass(frozen=True)
class Entry:
    """A call that has had its effect.

    Fields:
        call: its name.
        clock: of the caller when it goes on, in ticks.
        sent: what the call has told the meter so far, in ticks.
        heard: what it brought.
        changes: of the shared tensor by others, as the caller learned; None: it learned nothing.
        again: bytes of the call so far that were lost and sent once more.
        lost: the rank of the worker of whose loss it told the caller, in place of anything else.
    """

    call: str
    clock: int
    sent: float
    heard: list[Tensor]
    changes: int | None
    again: int = 0
    lost: int | None = None


class Journal:
    """The calls of one worker: those that are written down, and those that are told again."""

    def __init__(self) -> None:
        self.changes: int | None = None  # that the call under way has learned of
        self._written: list[Entry] | None = None  # None: nobody wants to know
        self._past: deque[Entry] = deque()
        self._is_whole = True

    def keep(self, is_on: bool) -> None:
        """Write down what comes from now on, or no more. What came before is forgotten."""
        self._written = [] if is_on else None
        self._is_whole = True

    def written(self) -> list[dict[str, Any]] | None:
        """What was written down, as plain data; None where a call brought what is no data: a new
        comm or shared tensor.
        """
        return [vars(entry) for entry in self._written or ()] if self._is_whole else None

    def go_back(self, entries: Iterable[dict[str, Any]]) -> None:
        """Tell the next calls what was written down."""
        self._past = deque(Entry(**entry) for entry in entries)

    @property
    def is_in_the_past(self) -> bool:
        return bool(self._past)

    def write(
        self, call: str, clock: int, meter: Meter, heard: list[Any], lost: int | None = None
    ) -> None:
        """A call has its outcome."""
        changes, self.changes = self.changes, None
        if self._written is None:
            return
        if all(isinstance(each, Tensor) for each in heard):
            copies = [each.clone() for each in heard]
            sent, again = meter.sent_in_call, meter.again_in_call
            self._written.append(Entry(call, clock, sent, copies, changes, again, lost))
        else:
            self._is_whole = False

    def tell(self, rank: int, call: str, meter: Meter, heard: list[Any]) -> Entry:
        """The outcome of a call that was made before."""
        entry = self._past.popleft()
        if entry.call != call:
            raise FlockstepError(
                f"rank {rank} goes on from a checkpoint, but not as it did before: it called "
                f"{call} in place of {entry.call}"
            )
        if heard:
            for own, told in zip(heard, entry.heard, strict=True):
                own.copy_(told)
        else:
            heard.extend(entry.heard)
        meter.sent_in_call = entry.sent
        meter.sent_again(entry.again - meter.again_in_call)
        return entry
