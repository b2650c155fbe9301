"""One worker's part in looking at the run.

A look is of the whole run at one moment, and costs the run nothing. What "one moment" means
depends on the strategy, and how it is done on the backend:

- `InStep`: workers that meet in their steps are looked at after the same step; any other cut
  could fall between two sides of an exchange. Where time passes by itself they hold their clocks,
  work out the representative together, share the scoring, and go on as if nothing had been.
- `OnTheClock`: workers that never wait do the same when their clocks show the same time.
- `Simulated`: in virtual time a moment is exact, for all who share tensors or never wait. Nobody
  stops there: each worker leaves a copy of its data, and the copies are judged aside (`board.py`).
  Waiting for each other would change the order in which calls are served, and with it the run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from flockstep.fields import require
from flockstep.result import Look
from flockstep.strategies import save_state, shared_tensors
from flockstep.training.board import Board, Copy
from flockstep.training.budget import Agreement, is_used_up, next_multiple
from flockstep.training.figures import EpochLosses, Figures, Table
from flockstep.training.job import Final, Job
from flockstep.training.keeper import NEAR_ENOUGH, keeper_of
from flockstep.training.recalibrating import recalibrated_together
from flockstep.training.reporting import tell_look
from flockstep.training.scoring import (
    judged,
    of_all_replicas,
    of_replicas,
    on_test_data,
    scores_of_all,
    shown_in,
)
from flockstep.worker import Worker

ON_THE_CLOCK = ("_look_at", "_count_at", "_is_over")
OF_REPLICAS = ("replicas", "spread", "distance", "positions")  # for which workers must meet
FEW_STEPS = 3  # whose end can be told from the pace of as many


def observer_of(worker: Worker, job: Job) -> Observer:
    """The observer for this strategy on this backend."""
    # A strategy of somebody else may keep in its state what is not data, and not marked as such:
    # it says so now rather than at the first look.
    save_state(worker.state, type(worker.strategy).__name__)
    waits = worker.comm.size == 1 or worker.strategy.waits or job.timetable is None
    if waits and (job.board is None or not shared_tensors(worker.state)):
        return InStep(worker, job)
    rule = f"be 'due' with {worker.strategy!r}, whose workers share tensors or never wait"
    require(job.spec.look_at == "due", "look_at", rule, job.spec.look_at)
    if job.board is None:
        return OnTheClock(worker, job)
    return Simulated(worker, job, job.board)


class Observer(ABC):
    """Asked after every step whether it is time to look, or to end.

    Fields:
        changes_within_steps: whether a look may come in the middle of this worker's step.
        history: the looks so far; in the simulator they are on the board instead.
        final: the look at which the run has reached its target.
    """

    changes_within_steps = False

    def __init__(self, worker: Worker, job: Job) -> None:
        self.worker = worker
        self.job = job
        self.spec = job.spec
        self.history: list[Look] = []
        self.final: Final | None = None
        self.losses: list[float] = []  # since the last look
        self.keeper = keeper_of(worker, job)
        self._last_epoch = EpochLosses()
        # Steps whose losses are counted: one that a run takes again, as it goes on from a
        # checkpoint, may be among them.
        self._counted = 0
        self._looks = 0
        if job.board is not None:
            worker.comm.watch_losses(job.board.lose)

    def after_step(self) -> bool:
        """Look if it is time to. Return whether the run ends here for this worker."""
        is_saved = self.job.snapshots is not None
        # Another lane may save this observer.
        with self.worker.comm.standing_still() if is_saved else nullcontext():
            if self._counted < self.worker.steps:
                self._counted = self.worker.steps
                self.losses.append(self.worker.loss)
                self._last_epoch.add(self.worker)
        return self._after_step()

    @abstractmethod
    def _after_step(self) -> bool: ...

    @abstractmethod
    def leave(self) -> None:
        """This worker has taken its last step; others may still have to be looked at."""

    def pass_over(self, steps: int) -> None:
        """The run begins with so many steps taken: looks before are nobody's."""
        if self.spec.look_every.unit != "seconds":
            end = math.inf if self.job.steps is None else self.job.steps
            while self.job.step_of_look(self._looks + 1) <= steps < end:
                self._looks += 1
        if self.keeper is not None:
            self.keeper.pass_over(steps)

    def saved(self) -> dict[str, Any]:
        """What goes on from a checkpoint."""
        return {
            "losses": [*self.losses],
            "counted": self._counted,
            "last_epoch": self._last_epoch.saved(),
            "looks": self._looks,
            "history": [dict(look) for look in self.history],
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.losses[:] = saved["losses"]
        self._counted = saved["counted"]
        self._last_epoch.load(saved["last_epoch"])
        self._looks = saved["looks"]
        self.history[:] = [Look(**row) for row in saved["history"]]

    def end(self) -> Table:
        """The figures of all workers at the end of the run."""
        comm = self.worker.comm
        with comm.unmetered():
            return Table.of(comm.all_gather(self._figures(is_done=True).told()))

    def measured(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is measured of the replicas as they stand at the end, before they become one: what
        the last look says of them, and the metrics, of data that nobody has seen before.
        """
        worker, job, task = self.worker, self.job, self.job.task
        measure = [each for each in job.measure if each in OF_REPLICAS]
        if not measure:
            return {}, {}  # nobody need meet for that
        found: dict[str, Any] = {}
        tested: dict[str, Any] = {}
        with worker.comm.off_the_clock(), shown_in(worker, worker.replica()):
            if "replicas" in measure:
                measure.remove("replicas")
                scores = scores_of_all(worker, task, task.watched)
                found |= of_replicas(scores)
                is_seen = task.watched is task.test
                tested = on_test_data(scores if is_seen else scores_of_all(worker, task, task.test))
            if "distance" in measure and job.board is not None:
                measure.remove("distance")
                found |= job.board.distances_at_end(worker)
            return found | of_all_replicas(worker, task, measure), tested

    def copy(self, seconds: float | None) -> Copy:
        """This worker's data at this moment, for the board. `seconds`: when the look is, if that
        is another one; workers that are looked at after the same step have no such.
        """
        copied = Copy.of(self.worker, self._figures())
        self.losses.clear()
        return copied

    def _figures(self, is_done: bool = False) -> Figures:
        with_counts = "staleness" in self.job.measure
        return Figures.of(self.worker, self.losses, self._last_epoch.losses, is_done, with_counts)

    def _gather(self, is_done: bool = False) -> Table:
        """All workers tell each other how far they are. Called off the clock."""
        return Table.of(self.worker.comm.all_gather(self._figures(is_done).told()))

    @torch.no_grad()
    def _look_together(self, table: Table, seconds: float | None = None) -> None:
        """All workers look at the run and know what they see. Called off the clock."""
        worker, job = self.worker, self.job
        shown = worker.preview()
        if job.recalibration is not None:
            shown = recalibrated_together(worker, shown, job.recalibration)
        look = table.look(job.epoch_at(worker, table), seconds)
        look = judged(worker, job, table, look, shown)
        self.history.append(look)
        if job.tells_looks and worker.comm.rank == table.ranks[0]:
            tell_look(worker.comm, look)
        self.losses.clear()
        if job.is_reached_by(look):
            self.final = Final(look, table, shown)


class InStep(Observer):
    """Workers that wait for each other: all are looked at after the same step."""

    def __init__(self, worker: Worker, job: Job) -> None:
        super().__init__(worker, job)
        every = job.spec.look_every
        self._agreement = Agreement(
            worker, every.count if every.unit == "seconds" else math.inf, job.spec
        )
        self._is_due = False  # a look, which may have to wait for the next synchronisation

    def _after_step(self) -> bool:
        if self.worker.steps == self.job.steps:
            return True  # what is seen here is the final model
        is_over, is_time = self._agreement.after_step()
        self._is_due |= is_time or self._is_step_of_a_look()
        if self._is_due and not is_over and self._is_moment_of_looks():
            self._is_due = False
            self._look()
            self._leave_out_passed_looks()
        is_over |= self.final is not None
        if self.keeper is not None and not is_over:
            self.keeper.in_step(self)
        return is_over

    def leave(self) -> None:
        """All leave together. A look that a loss has completed since the last may be left."""
        if self.job.board is not None:
            self.job.board.judge_complete(self.worker)

    def pass_over(self, steps: int) -> None:
        super().pass_over(steps)
        self._agreement.pass_over(steps)

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"agreement": self._agreement.saved(), "is_due": self._is_due}

    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        self._agreement.load(saved["agreement"])
        self._is_due = saved.get("is_due", False)  # which older checkpoints do not have

    def _is_moment_of_looks(self) -> bool:
        """Whether a look that is due can take place here."""
        if self.spec.look_at == "due":
            return True
        steps, strategy = self.worker.steps, self.worker.strategy
        return strategy.next_synchronisation(steps, self.job.steps) == steps

    def _leave_out_passed_looks(self) -> None:
        """Looks that became due while this one waited for its moment were at the same one."""
        while self.spec.look_every.unit != "seconds" and self._has_come_to(self._looks + 1):
            self._looks += 1

    def _is_step_of_a_look(self) -> bool:
        """Whether a look by steps or epochs is due."""
        return self.spec.look_every.unit != "seconds" and self._has_come_to(self._looks + 1)

    def _has_come_to(self, number: int) -> bool:
        every, worker = self.spec.look_every, self.worker
        if every.unit == "steps" or self.job.timetable is not None:
            return worker.steps >= self.job.step_of_look(number)
        # A stream tells no step in advance.
        return worker.course.epochs_ended >= number * every.count

    def _look(self) -> None:
        self._looks += 1
        comm, board, number = self.worker.comm, self.job.board, self._looks
        if board is None:
            with comm.off_the_clock():
                self._look_together(self._gather())
            return
        self.worker.counters()  # may compute, which nobody should wait for
        comm.in_order(lambda: board.bring(comm.rank, number, self.copy))
        board.judge_complete(self.worker)
        if self.spec.target is not None:
            with comm.unmetered():
                comm.barrier()  # until the last one has judged
            board.judge_complete(self.worker)  # if who was missing is lost
            self.final = board.final


class Simulated(Observer):
    """Simulated workers who share tensors, or never wait: each leaves copies of itself.

    They must not meet, not even for nothing: a worker that waited for another would go on behind
    what that one has done at later times. What they have to agree on they read from the board.
    After its call `in_order` a worker is the first in virtual time: nobody else changes anything,
    the board included, until it makes its next call.
    """

    changes_within_steps = True

    def __init__(self, worker: Worker, job: Job, board: Board) -> None:
        super().__init__(worker, job)
        self._board = board
        self._samples = 0  # of steps that are computed
        board.join(worker)
        worker.comm.watch_order(self._at_rest)
        with worker.comm.unmetered():
            worker.comm.barrier()  # until all have joined

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"samples": self._samples}

    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        self._samples = saved["samples"]

    def _at_rest(self) -> None:
        worker = self.worker
        self._board.at_rest(worker.comm.rank, worker.comm.now(), self.copy)
        self._samples = worker.samples

    def copy(self, seconds: float | None) -> Copy:
        figures = replace(self._figures(), samples=self._samples)
        self.losses.clear()
        return Copy.of(self.worker, figures if seconds is None else self._cut(figures, seconds))

    def _cut(self, figures: Figures, seconds: float) -> Figures:
        """The same with what the worker had waited and sent until `seconds`."""
        waiting, sending = self.worker.comm.meter.seconds_until(seconds)
        return replace(figures, seconds=seconds, seconds_waiting=waiting, seconds_sending=sending)

    def _after_step(self) -> bool:
        worker, board = self.worker, self._board
        worker.comm.in_order(_nothing)
        board.tick(worker, worker.comm.now(), self.copy)
        board.judge_complete(worker)
        if not worker.strategy.waits:
            return board.final is not None or self._budget_is_used_up()
        if board.last_step is None:
            self._agree_on_the_end()
        return board.last_step is not None and worker.steps >= board.last_step

    def _budget_is_used_up(self) -> bool:
        worker, spec = self.worker, self.spec
        if spec.seconds is not None:
            return is_used_up(worker, spec.seconds, worker.comm.now())
        return spec.bytes is not None and is_used_up(worker, spec.bytes, self._board.bytes_sent)

    def _agree_on_the_end(self) -> None:
        """Those who wait for each other end after the same step: after the first for which the
        budget will not do, if all of them can still end there.
        """
        worker, board, spec = self.worker, self._board, self.spec
        last_step = board.common_step(worker.comm.rank)
        is_over = board.final is not None
        if spec.seconds is not None:
            expected = board.seconds_at(last_step, worker.comm.now())
            is_over |= is_used_up(worker, spec.seconds, expected)
        elif spec.bytes is not None:
            is_over |= is_used_up(worker, spec.bytes, board.bytes_at(last_step))
        if is_over:
            board.last_step = last_step

    def leave(self) -> None:
        comm = self.worker.comm
        comm.in_order(_nothing)
        self._board.leave(comm.rank, self.copy)
        self._board.judge_complete(self.worker)
        with comm.unmetered():
            comm.barrier()  # the last may still see the target reached, for all
        self.final = self._board.final


def _nothing() -> None:
    pass


class OnTheClock(Observer):
    """Workers that never wait, where time passes by itself: they meet when their clocks show the
    time that they agreed on.

    A look after so many steps or epochs is due when all workers together have taken so many steps.
    When that will be follows from their pace. Before the first look it is known too little of, as
    the very first step takes longest: then they meet half-way, again and again.

    What all may send together they count when they meet: half-way, too, until it is used up.
    """

    def __init__(self, worker: Worker, job: Job) -> None:
        super().__init__(worker, job)
        every = job.spec.look_every
        self._by_time = every.unit == "seconds"
        self._end = math.inf if job.steps is None else job.steps
        # When to meet for the next look, and for the bytes; zero: after the first step.
        self._look_at = every.count if self._by_time else 0.0
        self._count_at = math.inf if job.spec.bytes is None else 0.0
        self._is_over = False  # the bytes are used up, as all have found together
        self._first: Table | None = None  # of their first meeting, and of their last
        self._last: Table | None = None
        self._paced_from: Table | None = None  # since when the pace of steps is measured

    def _after_step(self) -> bool:
        worker = self.worker
        is_due = worker.comm.now() >= min(self._look_at, self._count_at, self._save_at)
        if is_due and worker.steps != self.job.steps:
            self._meet(is_done=False)
        if self._is_over or self.final is not None:
            return True
        seconds = self.spec.seconds  # by each worker's own clock
        return seconds is not None and is_used_up(worker, seconds, worker.comm.now())

    def leave(self) -> None:
        while self.final is None and not self._meet(is_done=True).all_are_done:
            pass  # those who have steps left want to be looked at in between
        if self._last is not None:
            self.worker.comm.catch_up(self._last.seconds)

    def _meet(self, is_done: bool) -> Table:
        with self.worker.comm.off_the_clock(is_done):
            table = self._last = self._gather(is_done).caught_up()
            if not table.all_are_done:
                self._count_bytes(table)
                if not self._is_over:
                    self._look_if_due(table)
            self._first = self._first or table
            is_over = self._is_over or table.all_are_done or self.final is not None
            if self.keeper is not None and not is_over:
                self.keeper.on_the_clock(self, table, self._first, is_done)
        return table

    @property
    def _save_at(self) -> float:
        """When to meet for the next checkpoint."""
        return math.inf if self.keeper is None else self.keeper.moment

    def saved(self) -> dict[str, Any]:
        return (
            super().saved()
            | {name: getattr(self, name) for name in ON_THE_CLOCK}
            | {name: table and table.saved() for name, table in self._tables().items()}
        )

    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        for name in ON_THE_CLOCK:
            setattr(self, name, saved[name])
        for name in self._tables():
            setattr(self, name, saved[name] and Table.load(saved[name]))

    def _tables(self) -> dict[str, Table | None]:
        return {name: getattr(self, name) for name in ("_first", "_last", "_paced_from")}

    def _count_bytes(self, table: Table) -> None:
        """All end here if the bytes are used up. If not, they meet when half of the rest is."""
        limit, first, now = self.spec.bytes, self._first, table.seconds
        if limit is None:
            return
        self._is_over = is_used_up(self.worker, limit, table.bytes_sent)
        if first is None:
            self._count_at = now  # as soon as the pace is known
            return
        sent = table.bytes_sent
        self._count_at = table.moment_of((sent + limit) / 2, first, "bytes_sent")
        if self._count_at == math.inf:
            self._count_at = 2 * now - first.seconds  # nothing was sent so far: after as long again

    def _look_if_due(self, table: Table) -> None:
        if self._by_time:
            self._look_by_time(table)
        else:
            self._look_by_steps(table)

    def _look_by_time(self, table: Table) -> None:
        """A look is due when the clocks of all who have steps left have passed its time: a meeting
        for the bytes may be earlier.
        """
        every = self.spec.look_every.count
        if table.first_seconds >= self._look_at:
            self._look_together(table)
            # Who is slow may have passed several times. They are not made up for: the others would
            # stand there while its clock went on.
            self._look_at = next_multiple(table.seconds, every)

    def _look_by_steps(self, table: Table) -> None:
        before, goal = map(self.job.step_of_look, (self._looks, self._looks + 1))
        steps = table.steps / len(table.figures)
        is_due = goal < self._end and goal - steps <= NEAR_ENOUGH * (goal - before)
        if is_due:
            self._look_together(table)
            self._looks += 1
            goal = self._goal_beyond(steps)
        self._look_at = self._moment_of_look(table, steps, goal)
        if is_due or self._paced_from is None:
            self._paced_from = table

    def _goal_beyond(self, steps: float) -> int:
        """The step of the next look. Those that the workers have passed already are left out."""
        while (goal := self.job.step_of_look(self._looks + 1)) <= steps and goal < self._end:
            self._looks += 1
        return goal

    def _moment_of_look(self, table: Table, steps: float, goal: float) -> float:
        if goal >= self._end:
            return math.inf  # what is seen there is the final model
        if self._paced_from is None:
            return table.seconds  # one step more, and the pace is known
        if self._looks == 0 and goal - steps > FEW_STEPS:
            goal = (steps + goal) / 2
        return table.moment_of(goal * len(table.figures), self._paced_from)
