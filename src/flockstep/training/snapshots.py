"""Checkpoints of a simulated run. Nobody meets, and the run is the same with them and without.

A run in virtual time cannot stop at a moment: some worker is always in the middle of a step. So
each worker is copied at the end of a step, and its journal holds what it has heard since
(`backends/sim/journal.py`). When the last one has been copied, the copies, the journals and the
state between the workers are one checkpoint.

Workers that meet in their steps are copied after the same step, so that their copies alone are a
state of the run, too. Others that end another step before the last one is copied are copied again,
so that no journal is longer than a step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from flockstep.checkpoints import Part, Writer, joined, load_part, part_of, parted, read_part
from flockstep.strategies import save_state
from flockstep.training.job import Job, Keeping
from flockstep.training.keeper import close
from flockstep.worker import Worker

if TYPE_CHECKING:
    from flockstep.training.board import Board
    from flockstep.training.observer import Observer


class Snapshots:
    """What takes checkpoints of all simulated workers of a run. Its methods are called on their
    threads.
    """

    def __init__(self, job: Job, keeping: Keeping, board: Board, workers: int) -> None:
        self._job = job
        self._keeping = keeping
        self._board = board
        self._writer = Writer(keeping.folder, keeping.keep)
        self._copies: dict[int, Part] = {}
        self._copied_after: dict[int, int] = {}  # which step
        self._observers: dict[int, tuple[Observer, dict[str, Any]]] = {}
        self._ended: set[int] = set()
        self._lost: set[int] = set()
        self._worker: Worker | None = None  # the last that was copied
        self._seen: set[int] = set()  # ranks that have ended a step
        self._is_open = False  # copies are being collected
        self._step = 0  # after which those are copied who meet in their steps
        self._steps = [0 if job.start is None else job.start.steps] * workers
        self._epochs = [0] * workers  # of streams
        before = job.resumed.number if isinstance(job.resumed, Resumed) else 0
        self._number = before  # of those that were taken, or passed over
        self._due = time.monotonic() + keeping.every.count  # if they go by time
        self._pass_over()

    def after_step(self, worker: Worker, observer: Observer) -> None:
        """A worker is between two steps."""
        comm = worker.comm
        with comm.standing_still():
            if comm.is_in_the_past:  # of a run that goes on: it knows what comes next
                return
            self._count(worker)
            if not self._is_open and self._is_due(observer.changes_within_steps):
                self._is_open = True
                steps = self._of_those_left(self._steps)
                is_ahead = steps.count(worker.steps) == 1 and worker.steps == max(steps)
                self._step = max(steps) + (not is_ahead)  # which all have before them
            if not self._is_open:
                comm.keep_journal(False)
            elif observer.changes_within_steps or worker.steps == self._step:
                comm.keep_journal(True)
                self._copy(worker, observer, is_over=False)

    def at_end(self, worker: Worker, observer: Observer) -> None:
        """A worker has taken its last step. All later checkpoints have it as it is."""
        with worker.comm.standing_still():
            self._count(worker)
            if observer.changes_within_steps:
                self._ended.add(worker.comm.rank)
                worker.comm.keep_journal(True)
                self._copy(worker, observer, is_over=True)

    def lose(self, rank: int) -> None:
        """A worker is dead, and stays so in all later checkpoints."""
        self._lost.add(rank)
        self._copies.pop(rank, None)
        if self._is_open and self._worker is not None:
            self._write_if_all_came(self._worker)

    def join(self) -> None:
        """Wait for what is being written."""
        self._writer.join()

    def close(self) -> None:
        """See that all is written."""
        close(self._writer)

    def _of_those_left(self, counts: list[int]) -> list[int]:
        return [count for rank, count in enumerate(counts) if rank not in self._lost]

    def _count(self, worker: Worker) -> None:
        self._seen.add(worker.comm.rank)
        self._steps[worker.comm.rank] = worker.steps
        self._epochs[worker.comm.rank] = worker.course.epochs_ended

    def _is_due(self, of_all: bool) -> bool:
        """`of_all`: whether steps and epochs are those of all workers together, not of the first
        to get there.
        """
        is_first_step = len(self._seen | self._lost) < len(self._steps)
        if is_first_step or self._writer.is_busy or self._board.final is not None:
            return False
        self._writer.wait()  # for its complaint, if it has one
        every = self._keeping.every
        if every.unit == "seconds":
            return time.monotonic() >= self._due
        return self._has_come_to(self._number + 1, of_all)

    def _has_come_to(self, number: int, of_all: bool = False) -> bool:
        every, taken = self._keeping.every, self._of_those_left(self._steps)
        if every.unit == "epochs" and self._job.timetable is None:
            epochs = self._of_those_left(self._epochs)
            reached = min(epochs) if of_all else max(epochs)
            return reached >= number * every.count
        goal, end = self._job.step_of(every, number), self._job.steps
        steps = sum(taken) if of_all else max(taken) * len(taken)
        return steps >= len(taken) * goal and (end is None or goal < end)

    def _pass_over(self, of_all: bool = False) -> None:
        """What the run has come to is done."""
        if self._keeping.every.unit != "seconds":
            while self._has_come_to(self._number + 1, of_all):
                self._number += 1

    def _copy(self, worker: Worker, observer: Observer, is_over: bool) -> None:
        rank = worker.comm.rank
        self._copies[rank] = part_of(worker, is_over=is_over)
        self._copied_after[rank] = worker.steps
        self._observers[rank] = observer, observer.saved()
        self._worker = worker
        if self._is_open:
            self._write_if_all_came(worker)

    def _write_if_all_came(self, worker: Worker) -> None:
        if self._copies and len(self._copies.keys() | self._lost) == len(self._steps):
            self._write(worker)

    def _write(self, worker: Worker) -> None:
        """All copies are there."""
        world, copies = worker.comm.saved_world(), self._copies
        self._copies = {rank: copy for rank, copy in copies.items() if rank in self._ended}
        self._is_open = False
        if world is None:  # somebody has made a comm: once more
            return
        if self._board.final is not None:  # the run is over
            return
        observers = {
            rank: observer.saved() if observer.changes_within_steps else saved
            for rank, (observer, saved) in sorted(self._observers.items())
            if rank in copies
        }
        changes_within_steps = self._observers[worker.comm.rank][0].changes_within_steps
        self._pass_over(of_all=changes_within_steps)
        run = save_state(
            {
                "world": world,
                "observers": observers,
                "board": self._board.saved(),
                "number": self._number,
            }
        )
        parts = {"run": run} | {str(rank): copies[rank] for rank in sorted(copies)}
        step = max(self._copied_after[rank] for rank in copies)
        self._writer.write(step, 0, joined(parts), [0], self._keeping.about)
        self._due = time.monotonic() + self._keeping.every.count


class Resumed:
    """A simulated run that goes on from a checkpoint, as it was read from its file."""

    def __init__(self, part: Part) -> None:
        self._parts = parted(part)
        self._run = read_part(self._parts["run"])
        self.number: int = self._run["number"]  # of checkpoints so far
        self._is_begun = False

    def go_on(self, worker: Worker, observer: Observer, board: Board) -> bool:
        """Put a worker where it was, together with all others. Return whether its last step was
        behind it.
        """
        comm = worker.comm
        with comm.standing_still():
            is_first, self._is_begun = not self._is_begun, True
        is_left = str(comm.rank) in self._parts
        data: dict[str, Any] = {"comm": None}
        if is_left:
            data = read_part(self._parts.pop(str(comm.rank)))
        if is_first:
            board.load(self._run["board"])
        comm.go_back(data["comm"], self._run["world"] if is_first else None)  # the lost end here
        load_part(worker, data)
        observer.load(self._run["observers"][comm.rank])
        is_over: bool = data["is_over"]
        return is_over
