"""The clock of a run where time passes by itself."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the run began, less those for which this worker's clock was held.

    A look at the run must cost it nothing. So all workers hold their clocks while they look, and
    let them go in the order in which they had stopped: what comes after is what would have come.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._held_at: float | None = None

    def start(self) -> None:
        """From now on it goes, from zero."""
        self._began = time.monotonic()

    def now(self) -> float:
        return (time.monotonic() if self._held_at is None else self._held_at) - self._began

    def catch_up(self, seconds: float) -> None:
        """Go on to `seconds` at once, if it is not that late yet."""
        self._began -= max(0.0, seconds - self.now())

    def go_on_at(self, seconds: float) -> None:
        """Show `seconds` now, held or not."""
        self._began += self.now() - seconds

    def hold(self) -> None:
        if self._held_at is None:
            self._held_at = time.monotonic()

    def release(self) -> None:
        if self._held_at is not None:
            self._began += time.monotonic() - self._held_at
            self._held_at = None
