"""One replica of the model with its optimizer, its data and its strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flockstep.comm import Comm, broadcast_from_first
from flockstep.data import (
    Assignment,
    BatchSize,
    Disjoint,
    Sampling,
    Timetable,
    batches,
)
from flockstep.errors import NonFiniteLoss
from flockstep.fields import require, require_integer
from flockstep.flat import FlatModel, outside_tensors
from flockstep.schedules import Paced, Progress, Schedule
from flockstep.strategies import Strategy

LOSS_MEMORY = 0.9


class Worker:
    """Makes an ordinary training loop one of many that learn together.

        worker = fs.Worker(comm, model, optimizer, strategy=fs.LocalSGD(period=8))
        for x, y in worker.batches(dataset, batch_size=32, epochs=2):
            loss = cross_entropy(model(x), y)
            loss.backward()
            worker.step(loss)        # in place of optimizer.step() and optimizer.zero_grad()
        model = worker.finish()      # the model that represents the run

    All workers start from the parameters and buffers of rank 0, or of the lowest rank that is not
    lost. A worker that is alone trains plainly: its strategy has nobody to talk to and is not
    asked.

    `schedule` sets the learning rate before every step, as `fs.Cosine()` says, or `fs.Warmup(5) *
    fs.StepDecay()`."""

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy[Any],
        schedule: Schedule | None = None,
    ) -> None:
        require(
            schedule is None or isinstance(schedule, Schedule),
            "schedule",
            "be one such as fs.Cosine()",
            schedule,
        )
        self.comm = comm
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.schedule = schedule
        self._paced = optimizer if isinstance(optimizer, Paced) else None
        self.flat = FlatModel(model, comm.empty)
        for group in optimizer.param_groups:
            known = all(self.flat.owns(parameter) for parameter in group["params"])
            require(
                known, "optimizer", "hold parameters of the model only", type(optimizer).__name__
            )
        self.steps = 0
        self.epoch = 0
        self.samples = 0
        self.total_steps: int | None = None
        self._timetable: Timetable | None = None
        self._batches_taken = self._epochs_before = 0
        self._passes = 0
        self._relative_size = 1.0
        self.loss = math.nan
        self.smooth_loss = math.nan
        self.accuracy: float | None = None
        with torch.no_grad(), comm.unmetered():
            for tensor in (self.flat.state, *outside_tensors(model)):
                broadcast_from_first(comm, tensor, range(comm.size))
            self.state = None if self.is_alone else strategy.init(self)
        self._open_step()

    @property
    def is_alone(self) -> bool:
        return self.comm.size == 1

    def batches(
        self,
        dataset: Any,
        batch_size: BatchSize,
        epochs: int = 1,
        assignment: Assignment | None = None,
        sampling: Sampling | None = None,
        *,
        resume_at: int = 0,
    ) -> Iterator[Any]:
        """This worker's batches. All workers get the same number of them, in every epoch.

        An epoch here is a pass over this worker's own samples, of which `assignment` gives it
        C·N/M. `worker.epoch` counts how often all workers together have gone over the data,
        whatever the overlap.

        `dataset` may be tensors or arrays, a tuple, list or dict of these, or any torch Dataset; of
        an IterableDataset each worker takes every M-th sample. `batch_size` is a number, or
        `fs.BatchGrowth`. With `resume_at` steps taken by an earlier run, the loop goes on with the
        very next batch, and the worker counts as if it had taken them."""
        require_integer("resume_at", resume_at, 0)
        size, rank, seed = self.comm.size, self.comm.rank, self.comm.seed
        plan = batches.plan(
            dataset,
            batch_size,
            epochs,
            assignment or Disjoint(),
            sampling,
            workers=size,
            rank=rank,
            seed=seed,
        )
        self._timetable, self._batches_taken = plan.timetable, resume_at
        self.total_steps = None if plan.timetable is None else self.steps + plan.timetable.steps
        self._epochs_before, first_pass = self.epoch, self._passes
        samples, epochs_done, passes = plan.done_in(resume_at)
        self.steps += resume_at
        self.samples += samples
        self.epoch += epochs_done
        self._passes += passes
        for batch in plan.batches(resume_at, first_pass):
            self.samples += batch.samples
            self._batches_taken += 1
            self._relative_size = batch.relative_size
            yield batch.data
            self.epoch += batch.ends_epoch
            self._passes += batch.ends_pass

    @property
    def progress(self) -> Progress:
        """How far the training has come, for schedules."""
        if self._timetable is None:
            return Progress(self.steps, self.total_steps, self.epoch)
        # By batches rather than steps: gradients of several may be gathered for one step.
        epoch = self._timetable.epochs_done(max(0, self._batches_taken - 1))
        return Progress(self.steps, self.total_steps, self._epochs_before + epoch)

    def adjust_loss(self, loss: Tensor, batch: Any) -> Tensor:
        """The loss with what the strategy adds to it. Call it before `backward`; most strategies
        add nothing.
        """
        return loss if self.is_alone else self.strategy.on_loss(self, self.state, loss, batch)

    def step(self, loss: Tensor | float, accuracy: float | None = None) -> None:
        """Use the gradients: exchange as the strategy says, step, and clear them for the next
        step.
        """
        self._record(loss.item() if isinstance(loss, Tensor) else loss, accuracy)
        self.comm.elapse(times=self._relative_size)
        self.flat.collect_gradients()
        self._set_rates()
        with torch.no_grad():
            if self.is_alone:
                self.optimizer.step()
            else:
                self.strategy.on_gradients(self, self.state)
                self.strategy.optimizer_step(self, self.state)
            self.flat.gradients.zero_()
            self.steps += 1
            if not self.is_alone:
                self.strategy.after_step(self, self.state)
        self._open_step()

    def finish(self) -> nn.Module:
        """End the training: make this worker's model the one that represents the run, and return
        it.
        """
        if not self.is_alone:
            with torch.no_grad():
                self.strategy.finish(self, self.state)
        return self.model

    def _open_step(self) -> None:
        if not self.is_alone:
            with torch.no_grad():
                self.strategy.before_step(self, self.state)

    def _set_rates(self) -> None:
        """What changes in the course of the training: an optimizer that has stages, and the
        learning rate.
        """
        if self._paced is not None:
            self._paced.at(self.progress)
        if self.schedule is not None:
            self.schedule.apply(self.optimizer, self.progress)

    def _record(self, loss: float, accuracy: float | None) -> None:
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"rank {self.comm.rank}: the loss is {loss} at step {self.steps + 1} "
                f"with {self.strategy!r}"
            )
        self.loss, self.accuracy = loss, accuracy
        first = math.isnan(self.smooth_loss)
        self.smooth_loss = (
            loss if first else LOSS_MEMORY * self.smooth_loss + (1 - LOSS_MEMORY) * loss
        )
