"""One replica of the model with its optimizer, its data and its strategy."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flockstep.comm import Comm, broadcast_from_first
from flockstep.data import Assignment, BatchSize, Course, Disjoint, Sampling, plan_batches
from flockstep.errors import FlockstepError, NonFiniteLoss
from flockstep.fields import require, require_integer
from flockstep.flat import FlatModel, outside_tensors
from flockstep.schedules import Paced, Progress, Schedule
from flockstep.strategies import Strategy

LOSS_MEMORY = 0.9
OF_THE_COURSE = ("epoch", "samples")
COUNTERS = ("steps", "total_steps", "loss", "smooth_loss", "accuracy", *OF_THE_COURSE)


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
        # Alone there is nobody to talk to: the hooks of the base class do nothing but step.
        self._hooks: Strategy[Any] = strategy if comm.size > 1 else Strategy()
        self.schedule = schedule
        self._paced = optimizer if isinstance(optimizer, Paced) else None
        self.flat = FlatModel(model, comm.empty)
        for group in optimizer.param_groups:
            known = all(self.flat.owns(parameter) for parameter in group["params"])
            require(
                known, "optimizer", "hold parameters of the model only", type(optimizer).__name__
            )
        self.steps = 0
        self.total_steps: int | None = None
        self.course = Course()
        self.loss = math.nan
        self.smooth_loss = math.nan
        self.accuracy: float | None = None
        with torch.no_grad(), comm.unmetered():
            for tensor in (self.flat.state, *outside_tensors(model)):
                broadcast_from_first(comm, tensor, range(comm.size))
            self.state = self._hooks.init(self)
        self._open_step()

    @property
    def epoch(self) -> int:
        """How often all workers together have gone over the data."""
        return self.course.epoch

    @property
    def samples(self) -> int:
        """That this worker has taken."""
        return self.course.samples

    @property
    def progress(self) -> Progress:
        """How far the training has come, for schedules."""
        return Progress(self.steps, self.total_steps, self.course.epochs_done)

    def batches(
        self,
        dataset: Any,
        batch_size: BatchSize,
        epochs: int = 1,
        assignment: Assignment | None = None,
        sampling: Sampling | None = None,
        *,
        steps: int | None = None,
        resume_at: int = 0,
    ) -> Iterator[Any]:
        """This worker's batches. All workers get the same number of them, in every epoch.

        An epoch here is a pass over this worker's own samples, of which `assignment` gives it
        C·N/M. `worker.epoch` counts how often all workers together have gone over the data,
        whatever the overlap.

        `dataset` may be tensors or arrays, a tuple, list or dict of these, or any torch Dataset; of
        an IterableDataset each worker takes every M-th sample. `batch_size` is a number, or
        `fs.BatchGrowth`. With `steps` the loop ends after so many batches, if it has not ended
        before. With `resume_at` steps taken by an earlier run, the loop goes on with the very next
        batch, and the worker counts as if it had taken them: `steps` includes them.
        """
        require_integer("resume_at", resume_at, 0)
        if steps is not None:
            require_integer("steps", steps, 1)
        plan = plan_batches(
            dataset,
            batch_size,
            epochs,
            assignment or Disjoint(),
            sampling,
            workers=self.comm.size,
            rank=self.comm.rank,
            seed=self.comm.seed,
        )
        known = None if plan.timetable is None else plan.timetable.steps
        ends_after = min((each for each in (known, steps) if each is not None), default=None)
        self.total_steps = None if ends_after is None else self.steps + ends_after
        first_pass = self.course.begin(plan, resume_at)
        self.steps += resume_at
        if steps is not None and resume_at >= steps:
            return
        for batch in plan.batches(resume_at, first_pass):
            self.course.take(batch)
            yield batch.data
            self.course.used(batch)
            if self.course.taken == steps:
                return

    def adjust_loss(self, loss: Tensor, batch: Any) -> Tensor:
        """The loss with what the strategy adds to it. Call it before `backward`; most strategies
        add nothing.
        """
        return self._hooks.on_loss(self, self.state, loss, batch)

    def step(self, loss: Tensor | float, accuracy: float | None = None) -> None:
        """Use the gradients: exchange as the strategy says, step, and clear them for the next
        step.
        """
        self._record(loss.item() if isinstance(loss, Tensor) else loss, accuracy)
        self.comm.elapse(times=self.course.relative_size)
        self.flat.collect_gradients()
        self._set_rates()
        with torch.no_grad():
            self._hooks.on_gradients(self, self.state)
            self._hooks.optimizer_step(self, self.state)
            self.flat.gradients.zero_()
            self.steps += 1
            self._hooks.after_step(self, self.state)
        self._open_step()

    def finish(self) -> nn.Module:
        """End the training: make this worker's model the one that represents the run, and return
        it.
        """
        with torch.no_grad():
            self._hooks.finish(self, self.state)
        return self.model

    def preview(self) -> Tensor:
        """The flat state of the model that stands for the run now; all workers call it together."""
        return self._hooks.preview(self, self.state)

    def counters(self) -> dict[str, Any]:
        """What hooks of a strategy may ask of a worker, beside its model."""
        return {name: getattr(self, name) for name in COUNTERS}

    def _open_step(self) -> None:
        with torch.no_grad():
            self._hooks.before_step(self, self.state)

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


class StandIn(Worker):
    """What a strategy sees of a worker, at a moment that may be over: data without a training.

    Its flat state is a copy, its comm its own. The model is made when a strategy asks for it.
    """

    def __init__(
        self, comm: Comm, like: Worker, state: Tensor, counters: Mapping[str, Any]
    ) -> None:
        self.comm = comm
        self.strategy = like.strategy
        self.schedule = like.schedule
        self.flat = like.flat.copy_with(state)
        self.course = Course()
        for name in OF_THE_COURSE:
            setattr(self.course, name, counters[name])
        for name in counters.keys() - set(OF_THE_COURSE):
            setattr(self, name, counters[name])
        self._like = like

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            self.model = copy.deepcopy(self._like.model)
            flat = FlatModel(self.model, self.comm.empty)
            flat.state.copy_(self.flat.state)
            self.flat = flat
            return self.model
        if name == "optimizer":
            raise FlockstepError(
                f"{type(self.strategy).__name__}: a look has no 'optimizer' of the workers': keep "
                "in the strategy's state what finish needs of it, or write a preview without it"
            )
        raise AttributeError(name)
