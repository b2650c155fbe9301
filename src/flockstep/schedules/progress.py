"""How far a training has come: what schedules go by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flockstep.errors import InvalidField


@dataclass(frozen=True)
class Progress:
    """The moment before a step.

    Fields:
        step: optimizer steps taken so far.
        total_steps: of the whole training; None where nobody knows.
        epoch: how often all workers together have gone over the data so far, a fraction too.
    """

    step: int
    total_steps: int | None
    epoch: float

    @property
    def fraction(self) -> float:
        """The share of all steps that is taken, from 0 to 1; 1 after the end, too."""
        if self.total_steps is None:
            raise InvalidField(
                "'total_steps' must be known (got None): "
                "take batches from worker.batches, or set worker.total_steps"
            )
        return min(1.0, self.step / max(1, self.total_steps))


@runtime_checkable
class Paced(Protocol):
    """An optimizer that changes in the course of the training."""

    def at(self, progress: Progress) -> None:
        """Called before every step."""
