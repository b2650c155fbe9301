"""What one worker did and when, to be looked at as a track of a timeline."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

COMPUTING, WAITING, SENDING, DROPPED = range(4)
EVENT_KINDS = ("computing", "waiting", "sending", "dropped")
COLUMNS = ("kind", "name", "start", "duration", "bytes", "peer", "step")

# Over all workers: a file of some 75 MB, which a browser still opens.
MOST_EVENTS = 600_000
LEAST_EVENTS_PER_WORKER = 500


def events_per_worker(workers: int) -> int:
    """How many events a worker may record, so that the file of all of them can be opened."""
    return max(LEAST_EVENTS_PER_WORKER, MOST_EVENTS // workers)


class Trace:
    """The events of one worker, in the order of time: what it did, for how long, in which step.

    `comm.meter.trace = Trace(limit)` starts it. After `limit` events, more are only counted.
    """

    def __init__(self, limit: int = MOST_EVENTS) -> None:
        self.limit = limit
        self.events = 0
        self.dropped = 0
        self.computing_since = 0.0
        self._dropped_from = 0.0
        self._rows = array("d")
        self._names: dict[str, int] = {}
        self._now: Callable[[], float] | None = None
        self._step = 0

    def begin(self, now: Callable[[], float], is_virtual: bool) -> None:
        """Called by the meter that it is given to: computing begins now, on the meter's clock."""
        self._now = now
        self._names.setdefault("virtual" if is_virtual else "wall", 0)
        self.computing_since = now()

    def computed(self, until: float, step: int) -> None:
        """The worker has computed since its last call."""
        self._step = step
        if until > self.computing_since:
            self.add(COMPUTING, EVENT_KINDS[COMPUTING], self.computing_since, until, 0, -1, step)

    def add(
        self, kind: int, name: str, start: float, end: float, nbytes: int, peer: int, step: int
    ) -> None:
        if self.events == self.limit:
            if not self.dropped:
                self._dropped_from = start
            self.dropped += 1
            return
        self.events += 1
        number = self._names.setdefault(name, len(self._names))
        self._rows.extend((kind, number, start, end - start, nbytes, peer, step))

    def table(self) -> tuple[Tensor, list[str]]:
        """A row of `COLUMNS` per event, times in seconds, and the names, by number.

        The first name says which clock it is, "virtual" or "wall". What was computed since the last
        call belongs to it. Where events were dropped, a last row says since when, and in the place
        of bytes how many.
        """
        if self._now is not None:
            now = self._now()
            self.computed(now, self._step)
            self.computing_since = now
        rows = self._rows
        if self.dropped:
            told = (DROPPED, 0, self._dropped_from, 0.0, self.dropped, -1, self._step)
            rows = rows + array("d", told)
        table = torch.from_numpy(np.array(rows)).view(-1, len(COLUMNS))
        return table, list(self._names)
