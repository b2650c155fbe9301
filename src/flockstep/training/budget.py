"""When a run ends whose budget is one of seconds or bytes."""

from __future__ import annotations

import math
from typing import Any

from flockstep.errors import FlockstepError
from flockstep.spec import RunSpec
from flockstep.training.figures import Figures, Table
from flockstep.worker import Worker

FUTILE_STEPS = 2000


class Agreement:
    """Workers that wait for each other must end, and be looked at, after the same step.

    Where that depends on the clock or on bytes they have to agree on the step. So now and then they
    meet off the clock, tell each other how far they are, and work out from their pace after which
    step to meet next: half-way to the goal, so that there are few meetings, and most of them near
    the end. Between two of them nothing is sent.

    Fields:
        look_every: seconds between two looks; infinity: looks do not go by time.
        budget: the spec whose seconds or bytes end the run; None: something else sees to that.
    """

    def __init__(self, worker: Worker, look_every: float, budget: RunSpec | None = None) -> None:
        self._worker = worker
        self._look_every = self._look_at = look_every
        self._seconds = None if budget is None else budget.seconds
        self._bytes = None if budget is None else budget.bytes
        has_goal = self._seconds is not None or self._bytes is not None
        self._next = 1 if has_goal or look_every < math.inf else 0
        self._steps_before = 0  # that others have taken

    def pass_over(self, steps: int) -> None:
        """The run begins with so many steps taken."""
        self._steps_before = steps

    def saved(self) -> dict[str, Any]:
        return {
            "next": self._next,
            "look_at": self._look_at,
            "steps_before": self._steps_before,
        }

    def load(self, saved: dict[str, Any]) -> None:
        self._next, self._look_at = saved["next"], saved["look_at"]
        self._steps_before = saved["steps_before"]

    def after_step(self) -> tuple[bool, bool]:
        """Whether the budget is used up, and whether it is time for a look."""
        steps = self._worker.steps - self._steps_before
        if steps != self._next:
            return False, False
        comm = self._worker.comm
        with comm.off_the_clock():
            told = comm.all_gather(Figures.of(self._worker).told())
        table = Table.of(told)
        goals = self._goals(table)
        is_over = any(is_used_up(self._worker, goal, reached) for goal, reached in goals)
        is_time = table.seconds >= self._look_at
        if is_time:
            self._look_at = next_multiple(table.seconds, self._look_every)
        if self._look_at < math.inf:
            goals.append((self._look_at, table.seconds))
        waits = [_half_way(goal, reached, steps) for goal, reached in goals]
        self._next = steps + min(waits)
        return is_over, is_time

    def _goals(self, table: Table) -> list[tuple[float, float]]:
        """The budget, and how much of it is used."""
        pairs = ((self._seconds, table.seconds), (self._bytes, table.bytes_sent))
        return [(goal, reached) for goal, reached in pairs if goal is not None]


def next_multiple(seconds: float, every: float) -> float:
    """The first multiple of `every` after that time. 0.3 is the third of 0.1, whatever 3 × 0.1
    is in binary.
    """
    passed = math.floor(seconds / every * (1 + 1e-12))
    return round((passed + 1) * every, 12)


def multiple_from(seconds: float, every: float) -> float:
    """The first multiple of `every` at or after that time."""
    return round(math.ceil(seconds / every * (1 - 1e-12)) * every, 12)


def is_used_up(worker: Worker, limit: float, reached: float) -> bool:
    """Whether the limit is reached; if not, how long the training will be is estimated anew."""
    steps = worker.steps
    if not reached and steps >= FUTILE_STEPS:
        raise FlockstepError(
            f"rank {worker.comm.rank}: the budget has no end: {worker.strategy!r} has used none of "
            f"it in {steps} steps"
        )
    if reached:  # before that, the end is out of sight
        worker.total_steps = max(steps, math.ceil(steps * limit / reached))
    return reached >= limit


def _half_way(goal: float, reached: float, steps: int) -> int:
    """In how many steps half of what is left will be reached, by the pace of the steps so far."""
    if not reached:
        return max(1, steps)
    left = (goal - reached) / (reached / steps)
    return max(1, math.floor(left / 2))
