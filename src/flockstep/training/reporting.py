"""Looks on their way to the process that launched the run, as they happen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

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

    def complete(self, history: Iterable[Look]) -> None:
        """Report what was not told: that of the final model, or what a worker could not tell that
        was lost.
        """
        for look in history:
            if _text(look) not in self._reported:
                self._report(look)

    def _report(self, look: Look) -> None:
        self._reported.add(_text(look))
        self._is_reached |= self._job.is_reached_by(look)
        self._on_look(look)


def _text(look: Look) -> str:
    return json.dumps(dict(look))
