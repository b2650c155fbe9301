"""One worker's part in looking at the run, and in ending it when its budget is used up.

A look is of the whole run at one moment, and costs the run nothing. What "one moment" means
depends on the strategy:

- Workers that wait for each other (`Strategy.waits`) are looked at, and stopped, after the same
  step: `InStep`.
- Workers that never wait are looked at when the clock shows the same time for all of them:
  `OnTheClock`, and `Simulated` in virtual time.

And how it is done depends on the backend. Where time passes by itself, all workers hold their
clocks, work out the representative together, share the scoring, and go on as if nothing had been.
In the simulator nobody stops: each worker leaves a copy of its data when its time has come, and
the copies are judged aside (`board.py`). Waiting for each other there would change the order in
which messages arrive, and with it the run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from flockstep.errors import FlockstepError
from flockstep.result import Look
from flockstep.strategies import save_state
from flockstep.training.board import Board, Copy
from flockstep.training.figures import Figures, Table
from flockstep.training.job import Job
from flockstep.training.pace import steps_in_all, steps_until
from flockstep.training.scoring import judged, of_all_replicas
from flockstep.worker import Worker

FUTILE_STEPS = 2000
NEAR_ENOUGH = 0.02  # of the steps between two looks: one that comes so much too early is on time


def observer_of(worker: Worker, job: Job) -> Observer:
    """The observer for this strategy on this backend."""
    # A strategy of somebody else may keep in its state what is not data, and not marked as such:
    # it says so now rather than at the first look.
    save_state(worker.state, type(worker.strategy).__name__)
    if worker.comm.size == 1 or worker.strategy.waits or job.timetable is None:
        return InStep(worker, job)
    return OnTheClock(worker, job) if job.board is None else Simulated(worker, job, job.board)


class Observer(ABC):
    """Asked after every step whether it is time to look, or to end.

    Fields:
        history: the looks so far; in the simulator they are on the board instead.
        final: the figures and the representative's state of a run that has reached its target.
    """

    def __init__(self, worker: Worker, job: Job) -> None:
        self.worker = worker
        self.job = job
        self.spec = job.spec
        self.history: list[Look] = []
        self.final: tuple[Table, Tensor] | None = None
        self.losses: list[float] = []

    def after_step(self) -> bool:
        """Look if it is time to. Return whether the run ends here for this worker."""
        self.losses.append(self.worker.loss)
        return self._after_step()

    @abstractmethod
    def _after_step(self) -> bool: ...

    def leave(self) -> None:
        """This worker has taken its last step; others may still have to be looked at."""

    def end(self) -> Table:
        """The figures of all workers at the end of the run."""
        if self.final is not None:
            return self.final[0]
        comm = self.worker.comm
        figures = Figures.of(self.worker, self.losses, is_done=True)
        with comm.unmetered():
            return Table.of(comm.all_gather(figures.told()))

    def measured(self) -> dict[str, Any]:
        """What is measured of the replicas as they stand at the end, before they become one."""
        with self.worker.comm.unmetered():
            return of_all_replicas(self.worker, self.job.task, self.spec.measure)

    def copy(self, with_shared: bool) -> Copy:
        """This worker's data at this moment, for the board."""
        return Copy.of(self.worker, self._figures(), with_shared)

    def _figures(self, is_done: bool = False) -> Figures:
        return Figures.of(self.worker, self.losses, is_done)

    def _gather(self, is_done: bool = False) -> Table:
        """All workers tell each other how far they are. Called off the clock."""
        return Table.of(self.worker.comm.all_gather(self._figures(is_done).told()))

    @torch.no_grad()
    def _look_together(self, table: Table, seconds: float | None = None) -> None:
        """All workers look at the run and know what they see. Called off the clock."""
        worker, job = self.worker, self.job
        shown = worker.preview()
        look = table.look(job.epoch_at(worker, table), seconds)
        look = judged(worker, job.task, table, look, shown, self.spec.measure)
        self.history.append(look)
        self.losses.clear()
        if job.is_reached_by(look):
            self.final = table, shown


class InStep(Observer):
    """Workers that wait for each other: all are looked at after the same step.

    Where a look or the end depends on the clock or on bytes, they have to agree on the step. So now
    and then they meet off the clock, tell each other how far they are, and work out from their pace
    after which step to meet next.
    """

    def __init__(self, worker: Worker, job: Job) -> None:
        super().__init__(worker, job)
        self._board = job.board
        self._looks = 0
        by_time = job.spec.look_every.unit == "seconds"
        self._due = job.spec.look_every.count if by_time else math.inf
        limited = job.spec.seconds is not None or job.spec.bytes is not None
        self._next_check = 1 if by_time or limited else 0

    def _after_step(self) -> bool:
        step = self.worker.steps
        if step == self.job.steps:
            return True  # what is seen here is the final model
        is_over, is_time = False, self._is_step_of_a_look()
        if step == self._next_check:
            with self.worker.comm.off_the_clock():
                table = self._gather()
            is_over = self._is_used_up(table)
            is_time |= table.seconds >= self._due
            self._next_check = step + self._steps_to_next_check(table)
        if is_time and not is_over:
            self._look()
        return is_over or self.final is not None

    def _is_step_of_a_look(self) -> bool:
        """Whether a look by steps or epochs is due."""
        every, table = self.spec.look_every, self.job.timetable
        if every.unit == "seconds":
            return False
        if every.unit == "steps" or table is not None:
            return self.worker.steps == self.job.step_of_look(self._looks + 1)
        ended = self.worker.course.epochs_ended  # of a stream, which tells no step in advance
        return ended >= (self._looks + 1) * every.count

    def _is_used_up(self, table: Table) -> bool:
        """Whether the budget is; if not, how long the training will be is estimated anew."""
        for limit, reached in self._limits(table):
            _require_an_end(self.worker, reached)
            self.worker.total_steps = steps_in_all(limit, reached, self.worker.steps)
            if reached >= limit:
                return True
        return False

    def _limits(self, table: Table) -> list[tuple[float, float]]:
        """The budget and how much of it is used, if it is one of seconds or bytes."""
        pairs = ((self.spec.seconds, table.seconds), (self.spec.bytes, table.bytes_sent))
        return [(limit, reached) for limit, reached in pairs if limit is not None]

    def _steps_to_next_check(self, table: Table) -> int:
        goals = self._limits(table)
        if table.seconds >= self._due:
            every = self.spec.look_every.count
            self._due = (math.floor(table.seconds / every) + 1) * every
        if self._due < math.inf:
            goals.append((self._due, table.seconds))
        return min(steps_until(goal, reached, self.worker.steps) for goal, reached in goals)

    def _look(self) -> None:
        self._looks += 1
        comm = self.worker.comm
        if self._board is None:
            with comm.off_the_clock():
                self._look_together(self._gather())
            return
        board, number = self._board, self._looks
        comm.in_order(lambda: board.bring(comm.rank, number, self.copy))
        self.losses.clear()
        board.judge_complete(self.worker)
        if self.spec.target is not None:
            with comm.unmetered():
                comm.barrier()  # until the last one has judged
            self.final = board.final


class Simulated(Observer):
    """Simulated workers that never wait: each leaves a copy when the common clock says so."""

    def __init__(self, worker: Worker, job: Job, board: Board) -> None:
        super().__init__(worker, job)
        self._board = board

    def _after_step(self) -> bool:
        worker, board = self.worker, self._board
        now = worker.comm.now()

        def tick() -> None:
            self.final = board.final  # first: what others see of this moment, all see alike
            if self.final is None and board.tick(worker.comm.rank, now, self.copy):
                self.losses.clear()

        worker.comm.in_order(tick)
        board.judge_complete(worker)
        return self.final is not None or own_budget_is_used_up(worker, self.job)

    def leave(self) -> None:
        rank = self.worker.comm.rank
        self.worker.comm.in_order(lambda: self._board.leave(rank, self.copy))
        self._board.judge_complete(self.worker)
        with self.worker.comm.unmetered():
            self.worker.comm.barrier()  # the last may still see the target reached, for all
        self.final = self._board.final


class OnTheClock(Observer):
    """Workers that never wait, where time passes by itself: they meet when their clocks show the
    time that they agreed on.

    A look that is due after so many steps or epochs is due when all workers together have taken so
    many steps. When that will be follows from their pace.
    """

    def __init__(self, worker: Worker, job: Job) -> None:
        super().__init__(worker, job)
        self._looks = 0
        by_time = job.spec.look_every.unit == "seconds"
        self._next_meeting = job.spec.look_every.count if by_time else 0.0

    def _after_step(self) -> bool:
        worker = self.worker
        if worker.comm.now() >= self._next_meeting and worker.steps != self.job.steps:
            self._meet(is_done=False)
        return self.final is not None or own_budget_is_used_up(worker, self.job)

    def leave(self) -> None:
        while self.final is None and not self._meet(is_done=True).all_are_done:
            pass  # those who have steps left want to be looked at in between

    def _meet(self, is_done: bool) -> Table:
        with self.worker.comm.off_the_clock(is_done):
            table = self._gather(is_done)
            if not table.all_are_done:
                self._look_if_due(table)
        return table

    def _look_if_due(self, table: Table) -> None:
        every = self.spec.look_every
        if every.unit == "seconds":
            self._look_together(table, seconds=self._next_meeting)
            passed = max(self._next_meeting, table.first_seconds)
            self._next_meeting = (math.floor(passed / every.count) + 1) * every.count
            return
        workers = len(table.figures)
        before, goal = (workers * self.job.step_of_look(self._looks + more) for more in (0, 1))
        if goal - table.steps <= NEAR_ENOUGH * (goal - before):
            self._look_together(table)
            self._looks += 1
            before, goal = goal, workers * self.job.step_of_look(self._looks + 1)
        seconds = (goal - table.steps) / table.steps_per_second
        is_guess = self._looks == 0  # by the first few steps: better look again half-way
        self._next_meeting = table.seconds + (seconds / 2 if is_guess else seconds)


def own_budget_is_used_up(worker: Worker, job: Job) -> bool:
    """For workers that never wait: each has its own clock, and its share of the bytes."""
    spec, comm = job.spec, worker.comm
    share = None if spec.bytes is None else spec.bytes / comm.size
    for limit, reached in ((spec.seconds, comm.now()), (share, comm.meter.bytes_sent)):
        if limit is not None:
            _require_an_end(worker, reached)
            worker.total_steps = steps_in_all(limit, reached, worker.steps)
            return reached >= limit
    return False


def _require_an_end(worker: Worker, reached: float) -> None:
    """A budget of which nothing is used after very many steps would never end."""
    if not reached and worker.steps >= FUTILE_STEPS:
        raise FlockstepError(
            f"rank {worker.comm.rank}: the budget has no end: {worker.strategy!r} has used none of "
            f"it in {worker.steps} steps"
        )
