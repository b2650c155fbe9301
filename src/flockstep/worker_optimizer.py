"""A worker as the optimizer of somebody else's training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flockstep.errors import FlockstepError
from flockstep.fields import require
from flockstep.node import NodeOptimizer
from flockstep.worker import Worker


class WorkerOptimizer(Optimizer):
    """Stands where a loop wants an optimizer, and steps by `worker.step`.

        worker = fs.Worker(comm, model, optimizer, fs.LocalSGD(period=8))
        trainer = Trainer(model, …, optimizers=(fs.WorkerOptimizer(worker), None))
        trainer.train()
        model = worker.finish()

    Groups, state and defaults are those of `worker.optimizer`: what a learning-rate scheduler
    changes, or a checkpoint restores, is what the worker steps with.

    The loss of a step is what the closure returns that `step` is given, `optimizer.step(lambda:
    loss)`, as Lightning gives one. Without a closure it is the loss in what the model's forward
    passes have returned since the last step, as models of transformers do: their mean, or their sum
    where they are told `num_items_in_batch` of the whole step.

    The loop may clip gradients before `step`: each worker's own, before they are exchanged. Use
    `worker.clip_gradients` instead to clip what the step will use.

    Losses that are scaled (half precision with a GradScaler) are refused: a scaler leaves steps out
    on one worker alone.
    """

    # A GradScaler then always calls `step`, and says that it is there.
    _step_supports_amp_scaling = True

    def __init__(self, worker: Worker) -> None:
        require(isinstance(worker, Worker), "worker", "be an fs.Worker(…)", worker)
        if isinstance(worker.optimizer, NodeOptimizer):
            rule = "be one of a torch module: loops of others call worker.step(loss, gradients)"
            require(False, "worker", rule, f"one of a {type(worker.optimizer.node).__name__}")
        self.worker = worker
        self._losses: list[Tensor] = []  # of forward passes since the last step
        self._are_parts = False  # of a sum
        # Makes what belongs to an optimizer but its groups and its state.
        super().__setstate__({})
        worker.model.register_forward_hook(_LossWatch(self), with_kwargs=True)

    @property
    def _real(self) -> Optimizer:
        optimizer: Optimizer = self.worker.optimizer
        return optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._real.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.worker.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._real.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.worker.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self._real.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.worker.optimizer.load_state_dict(dict(state_dict))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Those of a step are gone already: `worker.step` clears them."""
        # They are views of one flat tensor, in which the next backward pass may add up again.
        self.worker.optimizer.zero_grad(set_to_none=False)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange as the strategy says, and step. Return what the closure has returned."""
        if hasattr(self, "found_inf"):
            raise FlockstepError(
                f"rank {self.worker.comm.rank}: fs.WorkerOptimizer cannot step with a scaled loss "
                "(float16 with a GradScaler): use bfloat16, or a loop of your own with "
                "worker.step(loss, scaler=scaler)"
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.worker.step(self._loss() if result is None else result)
        self._losses.clear()
        return result

    def see(self, kwargs: Mapping[str, Any], output: Any) -> None:
        """What a forward pass of the model has given."""
        loss = getattr(output, "loss", None)
        # Passes of an evaluation make no step.
        if isinstance(loss, Tensor) and loss.requires_grad:
            self._losses.append(loss.detach())
            self._are_parts = kwargs.get("num_items_in_batch") is not None

    def _loss(self) -> Tensor:
        if not self._losses:
            raise FlockstepError(
                f"rank {self.worker.comm.rank}: fs.WorkerOptimizer does not know the loss of step "
                f"{self.worker.steps + 1}: call optimizer.step(lambda: loss), or train a model "
                "whose forward pass returns an object with a 'loss'"
            )
        losses = torch.stack(self._losses)
        return losses.sum() if self._are_parts else losses.mean()


class _LossWatch:
    """Shows an optimizer the forward passes of its model. Copies of the model, and those that other
    processes get, are watched by nobody.
    """

    def __init__(self, optimizer: WorkerOptimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            optimizer.see(kwargs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _LossWatch, ()
