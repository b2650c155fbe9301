"""How a process that is frozen is told from one that is slow.

Every process that is watched gives a sign of life ten times per `patience`, from a thread of its
own: whatever its program does meanwhile, sleeping or computing for hours, the signs go on. They end
when the process does not run at all: it was stopped, or its machine is swapped out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from flockstep.fields import require_number

PATIENCE_SECONDS = 300.0
SIGNS_PER_PATIENCE = 10
SHORTEST_PAUSE = 0.05


def require_patience(value: float | None) -> None:
    """Seconds, or None for ever."""
    if value is not None:
        require_number("patience", value, above=0, finite=True)


def pause_between_signs(patience: float) -> float:
    return max(SHORTEST_PAUSE, patience / SIGNS_PER_PATIENCE)


class Heartbeat:
    """Calls `beat` now and then while inside. None for `patience`: never.

    A beat that cannot be given any more, as there is nobody to give it to, is the last one."""

    def __init__(self, patience: float | None, beat: Callable[[], None]) -> None:
        self._patience = patience
        self._beat = beat
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flockstep heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._patience is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        if self._patience is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._patience is not None
        pause = pause_between_signs(self._patience)
        while True:
            try:
                self._beat()
            except OSError:
                return  # whoever listens on that connection notices, and does what is due
            if self._is_over.wait(pause):
                return


class Watchdog:
    """Knows who has given no sign of life for `patience` seconds. None: watches nobody.

    Only time in which it was awake itself counts. A launcher that was stopped by Ctrl-Z, or slept
    with its machine, finds all signs old, and must not blame those who had nobody to give them to.
    """

    def __init__(self, patience: float | None) -> None:
        self._patience = patience
        self._looked_at = time.monotonic()
        self._signs: Mapping[int, object] = {}
        self._still: dict[int, float] = {}  # seconds without a new sign

    def look(self, signs: Callable[[], Mapping[int, object]]) -> dict[int, float]:
        """Who is frozen, and for how many seconds. Call it as often as you like.

        `signs()` has, by rank, something of everybody who is watched that changes while it
        lives."""
        if self._patience is None:
            return {}
        pause = pause_between_signs(self._patience)
        passed = time.monotonic() - self._looked_at
        if passed < pause:
            return {}
        self._looked_at += passed
        awake = min(passed, 2 * pause)

        seen = signs()
        still: dict[int, float] = {}
        for rank, sign in seen.items():
            is_new = rank not in self._signs or self._signs[rank] != sign
            still[rank] = 0.0 if is_new else self._still[rank] + awake
        self._signs, self._still = seen, still
        return {rank: seconds for rank, seconds in still.items() if seconds >= self._patience}
