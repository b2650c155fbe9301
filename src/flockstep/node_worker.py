"""A worker whose gradients are computed by another framework than PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flockstep.errors import FlockstepError, InvalidField
from flockstep.fields import number_in, require
from flockstep.flat import FlatTensors
from flockstep.gradients import Clipping
from flockstep.node import Node, NodeOptimizer
from flockstep.same_model import Form
from flockstep.schedules import Schedule
from flockstep.strategies import Strategy
from flockstep.worker import Worker


class NodeWorker(Worker):
    """Makes a loop in any framework one of many that learn together, as `fs.Worker` does for
    PyTorch.

        worker = fs.NodeWorker(comm, node, strategy=fs.LocalSGD(period=8))
        for batch in worker.batches(dataset, batch_size=32, epochs=2):
            loss, gradients = …          # at what the node was last shown
            worker.step(loss, gradients)
        model = worker.finish()

    `node` is an `fs.Node`. `fs.jax.Worker` and `fs.numpy.Worker` bring theirs. All else is as with
    `fs.Worker`, less what needs torch modules.
    """

    def __init__(
        self,
        comm: Any,
        node: Node,
        strategy: Strategy[Any],
        schedule: Schedule | None = None,
        weight_decay_schedule: Schedule | None = None,
    ) -> None:
        require(isinstance(node, Node), "node", "be an fs.Node", node)
        self.node = node
        _require_no_module(strategy)
        if "lr" not in node.settings:
            rule = "be known: give lr=, the rate that the optimizer was made with,"
            require(schedule is None, "lr", f"{rule} for a schedule", None)
            asks = isinstance(strategy, Strategy) and strategy.needs_rate
            require(not asks, "lr", f"{rule} for {strategy!r}", None)
        optimizer = NodeOptimizer(node)
        self._set_up(comm, optimizer, strategy, schedule, weight_decay_schedule)

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise FlockstepError(
                f"{type(self.strategy).__name__} asks for worker.model, a torch module, which a "
                f"{type(self.node).__name__} has not: train it with fs.Worker"
            )
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def _made_flat(self) -> FlatTensors:
        node = self.node
        flat = FlatTensors(
            node.shapes, node.buffer_elements, node.dtype, torch.device("cpu"), self.comm.empty
        )
        with torch.no_grad():
            node.fill(flat.state)
        self.optimizer.flat = flat
        self.optimizer.where = self._where
        return flat

    def _form(self) -> Form:
        return Form.of(type(self.node).__name__, self.node.dtype, self.node.leaves())

    def _where(self) -> str:
        return f"rank {self.comm.rank}, step {self.steps + 1}"

    def outside_tensors(self) -> list[Tensor]:
        return []

    def _clip(self, clipping: Clipping) -> float:
        holder = self.flat.parameters.detach()
        holder.grad = self.flat.gradients
        return clipping.clip([holder])

    def _batch(self, data: Any) -> Any:
        return self.node.batch(data)

    def _computed_again(self) -> float:
        assert self._again is not None
        self.node.show(self.flat.state)
        return number_in("loss", self._again())

    def step(  # type: ignore[override]  # gradients are handed over where no module holds them
        self,
        loss: Any,
        gradients: Any,
        accuracy: Any = None,
        *,
        buffers: Any = None,
        again: Callable[[], Any] | None = None,
    ) -> None:
        """Use the gradients: exchange as the strategy says, and step.

        `buffers` are those that the forward pass has left, statistics of batch normalisation, say.
        `again` computes the loss of this batch once more, for methods that ask how good the
        parameters have become.
        """
        accuracy = None if accuracy is None else number_in("accuracy", accuracy)
        self._hear(loss, accuracy, again)
        self.node.loss = self.loss
        try:
            with torch.no_grad():
                self.node.gather(gradients, self.flat.gradients)
                if buffers is not None:
                    self.node.gather_buffers(buffers, self.flat.buffers)
        except InvalidField as error:
            raise InvalidField(f"{self._where()}: {error}") from None
        if self.course.weight != 1:
            self.flat.gradients.mul_(self.course.weight)
        self._take_step()
        self.course.use()
        self._open_step()

    def finish(self) -> Any:
        """End the training, and return the model that represents the run."""
        self._end()
        self.note_changes()
        return self.node.model_of(self.flat.state)

    def snapshot(self) -> Any:
        """A copy of the model that stands for the run now; all workers call it together, after the
        same step. It costs the run nothing.
        """
        with torch.no_grad(), self.comm.off_the_clock():
            return self.node.model_of(self.preview())

    def note_changes(self) -> None:
        super().note_changes()
        self.node.show(self.flat.state)


def _require_no_module(strategy: Any) -> None:
    """Refuse what works on torch's losses and modules."""
    is_changed = getattr(type(strategy), "on_loss", Strategy.on_loss) is not Strategy.on_loss
    rule = "be one without 'on_loss', which changes a loss of torch's: use fs.Worker"
    require(not is_changed, "strategy", rule, strategy)
