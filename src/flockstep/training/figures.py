"""What a worker tells of itself at a look, and what a look says of all of them."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from flockstep.comm import Gathered, staleness_from
from flockstep.result import Look
from flockstep.worker import Worker


@dataclass(frozen=True)
class Figures:
    """One worker's figures at one moment, counted from the start of the run.

    Fields:
        staleness_counts: how many updates had which staleness, by the meter's places, up to the
            last one that is not empty; left out where nobody asks for it.
    """

    steps: float
    samples: float
    seconds: float
    bytes_sent: float
    exchanges: float
    seconds_waiting: float
    seconds_sending: float
    staleness_sum: float
    staleness_count: float
    staleness_max: float
    train_loss: float  # the mean over the steps since the last look; NaN if there was none
    epoch_loss: float  # the mean over the steps of an epoch
    is_done: float = False
    staleness_counts: Sequence[float] = ()

    @classmethod
    def of(
        cls,
        worker: Worker,
        losses: Collection[float] = (),
        last_losses: Collection[float] = (),
        is_done: bool = False,
        with_counts: bool = False,
    ) -> Figures:
        """`losses`: of the steps since the last look; `last_losses`: of those of an epoch."""
        meter = worker.comm.meter
        bytes_sent, exchanges = meter.before_call()
        return cls(
            worker.steps,
            worker.samples,
            worker.comm.now(),
            bytes_sent,
            exchanges,
            meter.seconds_waiting,
            meter.seconds_sending,
            meter.staleness_sum,
            meter.staleness_count,
            meter.staleness_max,
            fmean(losses) if losses else math.nan,
            fmean(last_losses) if last_losses else math.nan,
            is_done,
            tuple(meter.staleness_counts) if with_counts else (),
        )

    def told(self) -> Tensor:
        """As it travels: all in one row, the counts last, as many as there are."""
        *numbers, counts = dataclasses.astuple(self)
        return torch.tensor([*numbers, *counts], dtype=torch.float64)


NUMBERS = len(dataclasses.fields(Figures)) - 1  # before the counts


class EpochLosses:
    """One worker's losses of the last epoch: of as many of its last steps as the last whole epoch
    had, and of all until one has ended.
    """

    def __init__(self) -> None:
        self.losses: deque[float] = deque()
        self._epochs = 0
        self._length: int | None = None  # of the last whole epoch
        self._steps = 0  # since it ended

    def saved(self) -> dict[str, Any]:
        return vars(self) | {"losses": [*self.losses]}

    def load(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)
        self.losses = deque(saved["losses"])

    def add(self, worker: Worker) -> None:
        """The worker has taken a step."""
        self.losses.append(worker.loss)
        self._steps += 1
        kept = self._steps  # which the epoch under way will need when it ends
        if worker.course.epochs_ended > self._epochs:
            self._epochs = worker.course.epochs_ended
            self._length, self._steps = self._steps, 0
        if self._length is not None:
            while len(self.losses) > max(kept, self._length):
                self.losses.popleft()


class Table:
    """The figures of all workers that are there, in rank order.

    Fields:
        staleness_counts: of all workers together. Those of each are not kept: every worker has a
            table of all.
    """

    def __init__(
        self,
        figures: Sequence[Figures],
        ranks: Sequence[int],
        staleness_counts: Sequence[float] = (),
    ) -> None:
        self.figures = figures
        self.ranks = ranks
        self.staleness_counts = staleness_counts

    @classmethod
    def of(cls, told: Gathered) -> Table:
        figures = [Figures(*row[:NUMBERS].tolist()) for row in told]
        return cls(figures, told.ranks, _summed(row[NUMBERS:].tolist() for row in told))

    @classmethod
    def of_figures(cls, figures: Sequence[Figures], ranks: Sequence[int] | None = None) -> Table:
        """Of workers with these ranks; None: none of them is lost."""
        counts = _summed(each.staleness_counts for each in figures)
        return cls(figures, range(len(figures)) if ranks is None else ranks, counts)

    def saved(self) -> dict[str, Any]:
        return {
            "figures": [dataclasses.astuple(each) for each in self.figures],
            "ranks": [*self.ranks],
            "staleness_counts": [*self.staleness_counts],
        }

    @classmethod
    def load(cls, saved: dict[str, Any]) -> Table:
        figures = [Figures(*each) for each in saved["figures"]]
        return cls(figures, saved["ranks"], saved.get("staleness_counts", ()))

    @property
    def seconds(self) -> float:
        """The clock of the worker that has come furthest."""
        return max(each.seconds for each in self.figures)

    @property
    def bytes_sent(self) -> int:
        return int(sum(each.bytes_sent for each in self.figures))

    @property
    def steps(self) -> float:
        """Of all workers together."""
        return sum(each.steps for each in self.figures)

    @property
    def first_seconds(self) -> float:
        """The clock of the last of those who have steps left."""
        return min((each.seconds for each in self.figures if not each.is_done), default=math.inf)

    def moment_of(self, goal: float, before: Table, of: str = "steps") -> float:
        """When the workers together will have reached `goal` of a figure, if each goes on at the
        pace that it had since `before`, from where it is by its own clock. Infinity: never.
        """
        known = dict(zip(before.ranks, before.figures, strict=True))
        left, paces, offset = goal, 0.0, 0.0
        for rank, each in zip(self.ranks, self.figures, strict=True):
            left -= getattr(each, of)
            last = known.get(rank)
            if last is None or each.is_done or each.seconds <= last.seconds:
                continue
            pace = (getattr(each, of) - getattr(last, of)) / (each.seconds - last.seconds)
            paces += pace
            offset += pace * each.seconds
        return (left + offset) / paces if paces else math.inf

    def caught_up(self) -> Table:
        """The same at the time of the furthest clock: who has no steps left waits until then."""
        until = self.seconds
        figures = [
            dataclasses.replace(
                each,
                seconds=until,
                seconds_waiting=each.seconds_waiting + until - each.seconds,
            )
            if each.is_done
            else each
            for each in self.figures
        ]
        return Table(figures, self.ranks, self.staleness_counts)

    @property
    def all_are_done(self) -> bool:
        return all(each.is_done for each in self.figures)

    @property
    def train_loss(self) -> float | None:
        return _mean([each.train_loss for each in self.figures])

    def metrics(self) -> dict[str, Any]:
        """The run's figures, from those of the workers that have come to its end."""
        return {
            "train_loss": _mean([each.epoch_loss for each in self.figures]),
            "seconds": self.seconds,
            "bytes_sent": self.bytes_sent,
            "exchanges": int(max(each.exchanges for each in self.figures)),
            "steps": int(max(each.steps for each in self.figures)),
            "samples": int(sum(each.samples for each in self.figures)),
        }

    def look(self, epoch: float, seconds: float | None = None) -> Look:
        """A look without scores. `seconds`: when it was, if that is not the furthest clock."""
        return Look(
            step=int(self.steps) // len(self.figures),
            epoch=epoch,
            samples=int(sum(each.samples for each in self.figures)),
            seconds=self.seconds if seconds is None else seconds,
            bytes_sent=self.bytes_sent,
            train_loss=self.train_loss,
        )

    def staleness(self) -> dict[str, Any]:
        """Of all updates of shared tensors so far; nothing where nothing was updated."""
        updates = sum(each.staleness_count for each in self.figures)
        if not updates:
            return {}
        return {
            "staleness_mean": sum(each.staleness_sum for each in self.figures) / updates,
            "staleness_max": int(max(each.staleness_max for each in self.figures)),
            "staleness_histogram": [
                [staleness_from(place), int(count)]
                for place, count in enumerate(self.staleness_counts)
                if count
            ],
        }

    def shares_of_time(self) -> dict[str, Any]:
        """What part of its time so far each worker computed, waited and sent."""
        waiting, sending = [], []
        for each in self.figures:
            whole = each.seconds or 1.0
            waiting.append(each.seconds_waiting / whole)
            sending.append(each.seconds_sending / whole)
        return {
            "computing": [1 - a - b for a, b in zip(waiting, sending, strict=True)],
            "waiting": waiting,
            "sending": sending,
        }


def _mean(losses: Sequence[float]) -> float | None:
    """Over the workers that have one."""
    known = [loss for loss in losses if not math.isnan(loss)]
    return fmean(known) if known else None


def _summed(rows: Iterable[Sequence[float]]) -> list[float]:
    """Place by place; short rows end in zeros."""
    total: list[float] = []
    for row in rows:
        total = [a + b for a, b in zip_longest(total, row, fillvalue=0.0)]
    return total
