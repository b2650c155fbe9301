"""A worker's process slot: how processes wait for each other, and what the others and the launcher
can see of it.

State that processes tell each other stands in the arena, every word with a single writer. To wait
is to look at it, and to sleep at a pipe until somebody who changed it wakes the sleeper. No wake-up
is lost: a sleeper says that it sleeps before it looks the last time, a writer looks who sleeps
after it wrote. Sleepers look up ten times a second all the same. That makes deadlock a fact that
the launcher can see: when all workers wait, and each has looked again since then in vain, nobody
is left who could change anything."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from flockstep.backends.base import lost_worker, source_line
from flockstep.backends.local.arena import Arena
from flockstep.comm import Meter
from flockstep.errors import WorkerLost

LOOK_MILLISECONDS = 100
TEXT_BYTES = 1024
# Columns of the status table, one row per worker. The last three are the launcher's: for how long
# it had not moved when it was given up, or zero; how it ended; and when that was noticed, or zero.
# Times are nanoseconds of the system's clock. TOLD is the place of the last text for the launcher,
# which stands beside the place of the one before.
(
    STATE, STEPS, WAITS, LOOKS, OUTCOME, BEGAN, TOLD, PROCESS, BEATS, FROZEN, EXIT_CODE, MISSED_AT,
) = range(12)  # fmt: skip
COLUMNS = 16  # two lines of the cache
STARTING, RUNNING, WAITING, ENDED = range(4)


class StatusTable:
    """The status of every worker, where the launcher can read it."""

    def __init__(self, arena: Arena, offset: int, workers: int) -> None:
        size = workers * COLUMNS
        self.rows = arena.words(offset, size).reshape(workers, COLUMNS)
        self.missed = self.rows[:, MISSED_AT]
        self._texts = arena.bytes(offset + 8 * size, workers * TEXT_BYTES).reshape(
            workers, TEXT_BYTES
        )

    @staticmethod
    def nbytes(workers: int) -> int:
        return workers * (8 * COLUMNS + TEXT_BYTES)

    def lose(self, rank: int, exit_code: int) -> None:
        """Let everybody know that this worker's process has ended. Only then: what it wrote must
        not change later.
        """
        self.rows[rank, EXIT_CODE] = exit_code
        self.missed[rank] = time.monotonic_ns()  # last: it says that the rest is there

    def loss(self, rank: int, first_rank: int = 0) -> WorkerLost:
        """The error for a worker that is lost."""
        row = self.rows[rank]
        # Empty if this one was lost before the clock started.
        began = [began for began in self.rows[:, BEGAN].tolist() if began]
        seconds = max(0, int(row[MISSED_AT]) - min(began)) / 1e9 if began else 0.0
        frozen = int(row[FROZEN]) / 1e9 or None
        return lost_worker(first_rank + rank, int(row[EXIT_CODE]), int(row[STEPS]), seconds, frozen)

    def say(self, rank: int, text: str) -> None:
        encoded = text.encode()[: TEXT_BYTES - 1] + b"\0"
        self._texts[rank, : len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)

    def said(self, rank: int) -> str:
        text: bytes = self._texts[rank].tobytes()
        return text.split(b"\0", 1)[0].decode(errors="replace")


@dataclass(frozen=True)
class WakeupPipes:
    """One pipe per worker: (the end at which it sleeps, the end at which others wake it)."""

    pipes: list[tuple[int, int]]

    @classmethod
    def create(cls, workers: int) -> WakeupPipes:
        pipes = [os.pipe() for _ in range(workers)]
        for ends in pipes:
            for end in ends:
                os.set_blocking(end, False)
        return cls(pipes)

    def close(self) -> None:
        for ends in self.pipes:
            for end in ends:
                os.close(end)


class ProcessSlot:
    """One worker's place in the run."""

    def __init__(self, arena: Arena, table: StatusTable, pipes: WakeupPipes, rank: int) -> None:
        self.arena = arena
        self.status_table = table
        self.rank = rank
        self.meter = Meter()
        self.status = table.rows[rank]
        self._states = table.rows[:, STATE]
        self._read_ends = [read_end for read_end, _ in pipes.pipes]
        self._write_ends = [write_end for _, write_end in pipes.pipes]
        self._poll = select.poll()
        self._poll.register(self._read_ends[rank], select.POLLIN)
        self._fence = threading.Lock()

    def wait(self, is_ready: Callable[[], bool], call: str) -> None:
        """Return once `is_ready()`. `call` is what the worker waits in, for those who ask why
        nothing moves.
        """
        if is_ready():
            return
        began = time.monotonic()
        status = self.status
        status[WAITS] += 1
        status[STATE] = WAITING
        timeout = 0
        while True:
            # A system call: what is written above is seen before what is read below.
            woken = self._poll.poll(timeout)
            if woken:
                self._drain()
            if is_ready():
                break
            if timeout and not woken:
                if not status[LOOKS]:
                    self.status_table.say(self.rank, f"{call} at {source_line(sys._getframe(1))}")
                status[LOOKS] += 1
            timeout = LOOK_MILLISECONDS
        status[STATE] = RUNNING
        status[LOOKS] = 0
        self.meter.waited(time.monotonic() - began)

    def wake(self, ranks: Iterable[int]) -> None:
        """Wake those of `ranks` that sleep. Call it after writing what they wait for."""
        # Taking a lock is a memory fence: the write comes before the look at who sleeps.
        with self._fence:
            sleeping = self._states == WAITING
        for rank in ranks:
            if sleeping[rank] and rank != self.rank:
                try:
                    os.write(self._write_ends[rank], b"\0")
                except BlockingIOError:
                    pass  # a full pipe wakes already

    def _drain(self) -> None:
        try:
            os.read(self._read_ends[self.rank], 4096)
        except BlockingIOError:
            pass  # one wake-up too many: it was taken before
