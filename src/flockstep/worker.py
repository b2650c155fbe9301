"""One replica of the model with its optimizer, its data and its strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flockstep.comm import Comm, broadcast_from_first
from flockstep.data import Assignment, Disjoint, batches
from flockstep.errors import NonFiniteLoss
from flockstep.fields import require
from flockstep.flat import FlatModel, outside_tensors
from flockstep.strategies.base import Strategy

LOSS_MEMORY = 0.9


class Worker:
    """Makes an ordinary training loop one of many that learn together.

        worker = fs.Worker(comm, model, optimizer, strategy=fs.LocalSGD(period=8))
        for x, y in worker.batches(dataset, batch_size=32, epochs=2):
            loss = cross_entropy(model(x), y)
            loss.backward()
            worker.step(loss)        # in place of optimizer.step() and optimizer.zero_grad()
        model = worker.finish()      # the model that represents the run

    All workers start from the parameters and buffers of rank 0, or of the lowest rank that is not lost. A worker that
    is alone trains plainly: its strategy has nobody to talk to and is not asked.
    """

    def __init__(self, comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy[Any]) -> None:
        self.comm = comm
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.flat = FlatModel(model, comm.empty)
        for group in optimizer.param_groups:
            known = all(self.flat.owns(parameter) for parameter in group["params"])
            require(known, "optimizer", "hold parameters of the model only", type(optimizer).__name__)
        self.steps = 0
        self.epoch = 0
        self.samples = 0
        self.total_steps: int | None = None
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
        batch_size: int,
        epochs: int = 1,
        assignment: Assignment | None = None,
    ) -> Iterator[Any]:
        """This worker's batches. All workers get the same number of them, in every epoch."""
        assignment = assignment or Disjoint()
        plan = batches.plan(dataset, batch_size, assignment, self.comm.size, self.comm.rank, self.comm.seed)
        self.total_steps = self.steps + plan.steps_per_epoch * epochs
        for _ in range(epochs):
            for batch, samples in plan.epoch(self.epoch):
                self.samples += samples
                yield batch
            self.epoch += 1

    def adjust_loss(self, loss: Tensor, batch: Any) -> Tensor:
        """The loss with what the strategy adds to it. Call it before `backward`; most strategies add nothing."""
        return loss if self.is_alone else self.strategy.on_loss(self, self.state, loss, batch)

    def step(self, loss: Tensor | float, accuracy: float | None = None) -> None:
        """Use the gradients: exchange as the strategy says, step, and clear them for the next step."""
        self._record(loss.item() if isinstance(loss, Tensor) else loss, accuracy)
        self.comm.elapse()
        self.flat.collect_gradients()
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
        """End the training: make this worker's model the one that represents the run, and return it."""
        if not self.is_alone:
            with torch.no_grad():
                self.strategy.finish(self, self.state)
        return self.model

    def _open_step(self) -> None:
        if not self.is_alone:
            with torch.no_grad():
                self.strategy.before_step(self, self.state)

    def _record(self, loss: float, accuracy: float | None) -> None:
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"rank {self.comm.rank}: the loss is {loss} at step {self.steps + 1} with {self.strategy!r}"
            )
        self.loss, self.accuracy = loss, accuracy
        first = math.isnan(self.smooth_loss)
        self.smooth_loss = loss if first else LOSS_MEMORY * self.smooth_loss + (1 - LOSS_MEMORY) * loss
