"""Looks on their way to the process that launched the run, as they happen."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from flockstep.comm import Comm
from flockstep.result import Look
from flockstep.training.job import Job

OnLook = Callable[[Look], None]


def tell_look(comm: Comm, look: Look) -> None:
    """In a worker."""
    comm.tell(_text(look))


class Reporter:
    """In the launcher: calls `on_look` once with every look of the run's history."""

    def __init__(self, job: Job, on_look: OnLook) -> None:
        self._job = job
        self._on_look = on_look
        self._reported: set[str] = set()
        self._is_reached = False  # the target; looks that were under way then are not of the run

    def hear(self, text: str) -> None:
        if not self._is_reached:
            self._report(Look(**json.loads(text)))

    def complete(self, history: Sequence[Look], is_resumed: bool) -> None:
        """Report what was not told: that of the final model, or what a worker could not tell that
        was lost. Of a run that has gone on from a checkpoint, what lies before was told then.
        """
        told = [_text(look) in self._reported for look in history]
        first = (told.index(True) if any(told) else len(told) - 1) if is_resumed else 0
        for look, is_told in zip(history[first:], told[first:], strict=True):
            if not is_told:
                self._report(look)

    def _report(self, look: Look) -> None:
        self._reported.add(_text(look))
        self._is_reached |= self._job.is_reached_by(look)
        self._on_look(look)


def _text(look: Look) -> str:
    return json.dumps(dict(look))
