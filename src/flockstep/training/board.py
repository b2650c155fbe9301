"""Looks at a simulated run: copies of all workers, judged aside.

Nobody waits and no message is sent, so the run is the same bit for bit with looks and without. The
representative is what the strategy itself makes of the copies: its own `preview`, run by stand-ins
that have the workers' data, in a small simulation of their own.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flockstep.backends import run_aside
from flockstep.comm import Comm, SharedTensor
from flockstep.flat import FlatModel
from flockstep.result import Look
from flockstep.strategies import Strategy, load_state, save_state, shared_tensors
from flockstep.training.budget import multiple_from, next_multiple
from flockstep.training.distances import of_replicas_here
from flockstep.training.figures import Figures, Table
from flockstep.training.job import Final, Job
from flockstep.training.positions import position_of
from flockstep.training.recalibrating import recalibrated
from flockstep.training.reporting import tell_look
from flockstep.training.scoring import of_replicas, of_table
from flockstep.worker import StandIn, Worker

T = TypeVar("T")


@dataclass(frozen=True)
class Copy:
    """All data of one worker at one moment."""

    figures: Figures
    flat: Tensor
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    shared: dict[str, str]  # the identities of its shared tensors, by path
    counters: dict[str, Any]
    moved_from: Tensor | None = None  # where the worker's own model is, if that is not `flat`

    @property
    def replica(self) -> Tensor:
        """The flat state of the worker's own model."""
        return self.flat if self.moved_from is None else self.moved_from

    @classmethod
    def of(cls, worker: Worker, figures: Figures) -> Copy:
        tensors, values = save_state(worker.state)
        replica = worker.replica()
        return cls(
            figures,
            worker.flat.state.detach().clone(),
            tensors,
            values,
            {path: tensor.identity for path, tensor in shared_tensors(worker.state).items()},
            worker.counters(),
            None if replica is worker.flat.state else replica.detach().clone(),
        )

    def saved(self) -> dict[str, Any]:
        return vars(self) | {
            "figures": dataclasses.astuple(self.figures),
            "values": json.dumps(self.values),
        }

    @classmethod
    def load(cls, saved: dict[str, Any]) -> Copy:
        figures, values = Figures(*saved["figures"]), json.loads(saved["values"])
        return cls(**saved | {"figures": figures, "values": values})


OF_BOARDS = ("last_step", "_steps", "_clocks", "_bytes", "_epochs", "_looks", "_due", "_lost")

Take = Callable[[float | None], Copy]
"""Makes a copy of a worker that is at rest, for a look at a moment; None: of just now."""


@dataclass
class Pending:
    """A look for which not all workers have left their copies yet."""

    number: int
    seconds: float | None
    shared: dict[str, Tensor]  # the values of all shared tensors at that moment, by identity
    copies: dict[int, Copy] = field(default_factory=dict)

    def saved(self) -> dict[str, Any]:
        copies = {rank: each.saved() for rank, each in self.copies.items()}
        return vars(self) | {"copies": copies}

    @classmethod
    def load(cls, saved: dict[str, Any]) -> Pending:
        copies = {rank: Copy.load(each) for rank, each in saved["copies"].items()}
        return cls(**saved | {"copies": copies})


class Board:
    """Where simulated workers leave their copies.

    The moment t of a look cuts the run by the order of virtual time: what had arrived until t has
    happened, and nothing later. Shared tensors are copied when the cut is
    noticed, at the first event behind it; a worker, when it is next at rest: before its next call
    has an effect, or the step that it was computing at t.

    A look is of those who were there at its moment. Who is lost before it has left its copy for one
    after the same step is missing there; figures are of those who are left.
    """

    def __init__(self, job: Job, workers: int) -> None:
        self.history: dict[int, Look] = {}
        self.final: Final | None = None
        self.last_step: int | None = None  # after which all end who wait for each other
        self._job = job
        self._workers = workers
        self._shared: dict[str, SharedTensor] = {}
        self._pending: dict[int, Pending] = {}
        self._complete: list[Pending] = []
        self._left: dict[int, Take] = {}
        self._steps = [0] * workers
        self._clocks = [0.0] * workers
        self._bytes = [0] * workers
        self._epochs = [0] * workers  # of streams
        self._lost: list[int] = []
        self._looks = 0
        by_time = job.spec.look_every.unit == "seconds"
        self._due = job.spec.look_every.count if by_time else math.inf
        self._at_end: dict[int, Tensor] = {}
        self._distances: dict[str, Any] = {}
        self._judging = threading.Lock()
        self._model: tuple[nn.Module, FlatModel] | None = None

    def looks(self) -> list[Look]:
        return [look for _, look in sorted(self.history.items())]

    @property
    def bytes_sent(self) -> int:
        """By all workers that are left, as far as they have told."""
        return sum(self._of_those_left(self._bytes))

    def saved(self) -> dict[str, Any]:
        """What goes on from a checkpoint. For who holds the run still."""
        # In this order: a look that is judged meanwhile may be in both, and must not be in none.
        complete, history = [*self._complete], dict(self.history)
        return {
            "history": {number: dict(look) for number, look in history.items()},
            "pending": [each.saved() for each in self._pending.values()],
            "complete": [each.saved() for each in complete],
            **{name: copy.copy(getattr(self, name)) for name in OF_BOARDS},
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.history = {number: Look(**row) for number, row in saved["history"].items()}
        pending = map(Pending.load, saved["pending"])
        self._pending = {each.number: each for each in pending}
        self._complete = [*map(Pending.load, saved["complete"])]
        for name in OF_BOARDS:
            setattr(self, name, saved.get(name, []))  # older ones do not know of losses

    # --- in the order of virtual time -------------------------------------------------------------

    def join(self, worker: Worker) -> None:
        """A worker whose shared tensors are to be looked at."""
        for tensor in shared_tensors(worker.state).values():
            self._shared[tensor.identity] = tensor

    def lose(self, rank: int) -> None:
        """A worker is dead. It has left its copies for the looks of before."""
        if rank in self._lost:
            return
        self._lost.append(rank)
        self._left.pop(rank, None)
        for pending in [*self._pending.values()]:
            self._complete_if_all_came(pending)
        self._end_if_all_left()

    def _of_those_left(self, values: Sequence[T]) -> list[T]:
        """Of what there is one for each worker, those of the workers that are not lost."""
        return [value for rank, value in enumerate(values) if rank not in self._lost]

    def bring(self, rank: int, number: int, take: Take) -> None:
        """The copy of a worker that knows by itself when which look is due. It may come again,
        when it goes on from a checkpoint: the same copy, of the same look.
        """
        copied = take(None)
        is_complete = number in self.history or any(
            number == each.number for each in self._complete
        )
        pending = self._pending.get(number, Pending(number, seconds=None, shared={}))
        if not is_complete and rank not in pending.copies:
            self._pending[number] = pending
            self._put(pending, rank, lambda _: copied)

    def at_rest(self, rank: int, now: float, take: Take) -> None:
        """A worker is about to do something at time `now`, and has not done it yet."""
        if now > self._due:
            every = self._job.spec.look_every.count
            self._begin_look(self._due)
            self._due = max(next_multiple(self._due, every), multiple_from(now, every))
        self._put_all(rank, take)

    def tick(self, worker: Worker, now: float, take: Take) -> None:
        """A worker has taken a step."""
        rank = worker.comm.rank
        self._steps[rank] += 1
        self._clocks[rank] = now
        self._bytes[rank] = worker.comm.meter.bytes_sent
        self._epochs[rank] = worker.course.epochs_ended
        if self._is_step_of_a_look():
            self._begin_look(now)
            self._put_all(rank, take)

    def common_step(self, rank: int) -> int:
        """The first step after which all can end, if the worker that has just ticked is the first
        to do so: others are beyond the steps that they have taken.
        """
        others = [other for other in range(self._workers) if other not in (rank, *self._lost)]
        return max([self._steps[rank], *(self._steps[other] + 1 for other in others)])

    def seconds_at(self, step: int, now: float) -> float:
        """When the last worker will have taken so many steps, by the pace of each so far."""

        def expected(steps: int, clock: float) -> float:
            per_step = clock / steps if steps else 0.0
            return step * max(per_step, now / (steps + 1))  # the step under way is not done yet

        clocks = self._of_those_left(self._clocks)
        return max(map(expected, self._of_those_left(self._steps), clocks))

    def bytes_at(self, step: int) -> float:
        """What all workers will have sent then, by the pace of each so far."""
        left = self._of_those_left
        pairs = zip(left(self._bytes), left(self._steps), strict=True)
        return sum(sent * step / steps for sent, steps in pairs if steps)

    def leave(self, rank: int, take: Take) -> None:
        """A worker has taken its last step: it stays as it is for all looks to come, until the
        others have taken theirs.

        It is copied when a look asks for it, so that its last losses go to the next look alone, and
        to that of the end if no other comes.
        """
        self._put_all(rank, take)
        self._left[rank] = take
        self._end_if_all_left()

    def _end_if_all_left(self) -> None:
        if len(self._left) + len(self._lost) == self._workers:
            self._due = math.inf  # what is seen from here on is the final model

    def _is_step_of_a_look(self) -> bool:
        """Whether all workers together have taken as many steps as a look by steps or epochs
        wants.
        """
        job, every, number = self._job, self._job.spec.look_every, self._looks + 1
        if every.unit == "seconds":
            return False
        if every.unit == "epochs" and job.timetable is None:  # a stream tells no step in advance
            return min(self._of_those_left(self._epochs)) >= number * every.count
        step = job.step_of_look(number)
        is_last = job.steps is not None and step >= job.steps
        taken = self._of_those_left(self._steps)
        return not is_last and sum(taken) >= step * len(taken)

    def _begin_look(self, seconds: float) -> None:
        """The state of the run now is to be seen."""
        self._looks += 1
        shared = {identity: tensor.peek() for identity, tensor in self._shared.items()}
        self._pending[self._looks] = Pending(self._looks, seconds, shared)
        for rank, take in self._left.items():
            self._put(self._pending[self._looks], rank, take)

    def _put_all(self, rank: int, take: Take) -> None:
        """Leave a copy for every look that waits for one of this worker."""
        wanted = [each for each in self._pending.values() if rank not in each.copies]
        for pending in wanted:
            self._put(pending, rank, take)

    def _put(self, pending: Pending, rank: int, take: Take) -> None:
        pending.copies[rank] = take(pending.seconds)
        self._complete_if_all_came(pending)

    def _complete_if_all_came(self, pending: Pending) -> None:
        if len(pending.copies.keys() | {*self._lost}) == self._workers:
            del self._pending[pending.number]
            if pending.copies:
                self._complete.append(pending)

    # --- at the end -------------------------------------------------------------------------------

    def distances_at_end(self, worker: Worker) -> dict[str, Any]:
        """How far apart the replicas are. All workers call it together, off the clock; one of them
        works it out, since a thousand would have a thousand copies of a thousand replicas.
        """
        self._at_end[worker.comm.rank] = worker.flat.parameters
        worker.comm.barrier()
        if worker.comm.rank == worker.comm.members[0]:
            replicas = [self._at_end[rank] for rank in worker.comm.members]
            self._distances = of_replicas_here(replicas)
            self._at_end.clear()
        worker.comm.barrier()
        return self._distances

    # --- by whoever came last ---------------------------------------------------------------------

    def judge_complete(self, worker: Worker) -> None:
        """Judge the looks that are complete, in the caller's thread; its model is the pattern."""
        with self._judging, worker.comm.off_the_clock():
            while self._complete:  # and stays so until it is judged: a checkpoint may come between
                self._judge(self._complete[0], worker)
                self._complete.pop(0)

    @torch.no_grad()
    def _judge(self, pending: Pending, worker: Worker) -> None:
        job, measure = self._job, self._job.measure
        ranks = sorted(pending.copies)
        copies = [pending.copies[rank] for rank in ranks]
        table = Table.of_figures([each.figures for each in copies], ranks)
        shown = representative(
            job.spec.strategy, pending.copies, pending.shared, worker, self._workers
        )
        if job.recalibration is not None:
            shown = recalibrated(*self._own_model(worker), shown, job.recalibration)
        loss, accuracy = self._scores(shown, worker)
        look = table.look(job.epoch_at(worker, table), pending.seconds)
        look = replace(look, loss=loss, accuracy=accuracy, **of_table(table, measure))
        if job.training_sample is not None:
            with torch.random.fork_rng(devices=[]):  # what the data draw is nothing to the run
                _, known = self._scores(shown, worker, job.training_sample)
            look = replace(look, train_accuracy=known)
        if "replicas" in measure:
            scores = [self._scores(each.replica, worker)[1] for each in copies]
            look = replace(look, **of_replicas(scores))
        if "spread" in measure:
            replicas = torch.stack([_parameters(each, worker) for each in copies]).double()
            squares = (replicas - replicas.mean(0)).square().sum(1)
            look = replace(look, spread=float(squares.mean().sqrt()))
        if "distance" in measure:
            look = replace(look, **of_replicas_here([_parameters(each, worker) for each in copies]))
        if "positions" in measure:
            positions = [position_of(_parameters(each, worker)) for each in copies]
            look = replace(look, positions=positions)
        self.history[pending.number] = look
        if job.tells_looks:
            tell_look(worker.comm, look)
        if self.final is None and job.is_reached_by(look):
            self.final = Final(look, table, shown)

    def _scores(self, state: Tensor, worker: Worker, data: Any = None) -> tuple[float, float]:
        task = self._job.task
        model, flat = self._own_model(worker)
        flat.state.copy_(state)
        return task.evaluate(model, task.watched if data is None else data)

    def _own_model(self, worker: Worker) -> tuple[nn.Module, FlatModel]:
        """One in which others are judged."""
        if self._model is None:
            model = copy.deepcopy(worker.model)
            self._model = model, FlatModel(model, worker.comm.empty)
        return self._model


def _parameters(copied: Copy, worker: Worker) -> Tensor:
    return copied.replica[: worker.flat.count]


def representative(
    strategy: Strategy[Any],
    copies: dict[int, Copy],
    shared: dict[str, Tensor],
    worker: Worker,
    workers: int,
) -> Tensor:
    """The state that stands for the run of so many workers. `copies` are of those that are not
    lost; `shared`: the values of their shared tensors, by identity.
    """
    if workers == 1:
        return copies[0].flat
    first = copies[min(copies)]
    lost = {*range(workers)} - {*copies}
    writers: dict[str, int] = {}  # one of those who share a tensor
    for rank, each in sorted(copies.items()):
        for identity in each.shared.values():
            writers.setdefault(identity, rank)

    def preview(comm: Comm) -> Tensor:
        if comm.rank in lost:  # it was there when the strategy began, and is not any more
            with torch.no_grad(), comm.unmetered():
                strategy.init(StandIn(comm, worker, first.flat, first.counters))
            comm.elapse()
        own = copies[comm.rank]
        stand_in = StandIn(comm, worker, own.flat, own.counters)
        with torch.no_grad(), comm.unmetered():
            state = strategy.init(stand_in)
            load_state(state, own.tensors, own.values)
            for path, tensor in shared_tensors(state).items():
                identity = own.shared[path]
                if writers[identity] == comm.rank:
                    tensor.write(shared[identity])
            comm.barrier()
            return strategy.preview(stand_in, state)

    with torch.random.fork_rng(devices=[]):  # what `init` draws is nothing to the run
        shown: Tensor = run_aside(preview, workers, worker.comm.seed, lost)[min(copies)]
    return shown
