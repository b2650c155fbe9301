"""When a run ends whose budget is one of seconds or bytes."""

from __future__ import annotations

import math

from flockstep.errors import FlockstepError
from flockstep.training.figures import Figures, Table
from flockstep.training.job import Job
from flockstep.worker import Worker

FUTILE_STEPS = 2000


def own_budget_is_used_up(worker: Worker, job: Job) -> bool:
    """For workers that never wait: each goes by its own clock, and by its share of the bytes."""
    spec, comm = job.spec, worker.comm
    if spec.seconds is not None:
        return _is_used_up(worker, spec.seconds, comm.now())
    if spec.bytes is not None:
        return _is_used_up(worker, spec.bytes / comm.size, comm.meter.bytes_sent)
    return False


def are_bytes_used_up(worker: Worker, limit: float, table: Table) -> bool:
    """For workers that never wait, when they meet: whether all together have sent so many bytes."""
    return _is_used_up(worker, limit, table.bytes_sent)


class Agreement:
    """Workers that wait for each other must end, and be looked at, after the same step.

    Where that depends on the clock or on bytes they have to agree on the step. So now and then they
    meet off the clock, tell each other how far they are, and work out from their pace after which
    step to meet next: half-way to the goal, so that there are few meetings, and most of them near
    the end. Between two of them nothing is sent.

    Fields:
        look_every: seconds between two looks; infinity: looks do not go by time.
        at_every_step: meet after each step.
    """

    def __init__(
        self, worker: Worker, job: Job, look_every: float = math.inf, at_every_step: bool = False
    ) -> None:
        self._worker = worker
        self._spec = job.spec
        self._look_every = self._look_at = look_every
        self._at_every_step = at_every_step
        has_goal = job.spec.seconds is not None or job.spec.bytes is not None
        self._next = 1 if has_goal or look_every < math.inf or at_every_step else 0

    def after_step(self, has_ended: bool = False) -> tuple[bool, bool]:
        """Whether the run is over, and whether it is time for a look. It is over when the budget is
        used up, or when one worker knew before this meeting that it `has_ended`.
        """
        steps = self._worker.steps
        if steps != self._next:
            return False, False
        comm = self._worker.comm
        with comm.off_the_clock():
            told = comm.all_gather(Figures.of(self._worker, (), has_ended).told())
        table = Table.of(told)
        goals = self._goals(table)
        is_over = any(_is_used_up(self._worker, goal, reached) for goal, reached in goals)
        is_over = is_over or any(each.is_done for each in table.figures)
        is_time = table.seconds >= self._look_at
        if is_time:
            passed = math.floor(table.seconds / self._look_every)
            self._look_at = (passed + 1) * self._look_every
        if self._look_at < math.inf:
            goals.append((self._look_at, table.seconds))
        waits = [_half_way(goal, reached, steps) for goal, reached in goals]
        self._next = steps + (1 if self._at_every_step else min(waits))
        return is_over, is_time

    def _goals(self, table: Table) -> list[tuple[float, float]]:
        """The budget, and how much of it is used."""
        pairs = ((self._spec.seconds, table.seconds), (self._spec.bytes, table.bytes_sent))
        return [(goal, reached) for goal, reached in pairs if goal is not None]


def _is_used_up(worker: Worker, limit: float, reached: float) -> bool:
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
