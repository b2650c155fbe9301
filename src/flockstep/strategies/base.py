"""What a strategy is: frozen hyper-parameters, and hooks that say when and how replicas
influence each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from flockstep.worker import Worker

State = TypeVar("State")


class Strategy(Generic[State]):
    """Base class. A method is a frozen dataclass that overrides the moments it needs; the others do
    nothing.

    The spec is shared by all workers and never changes; what changes lives in the state that `init`
    returns, one for each worker. Hooks are plain blocking code of one worker, run without
    gradients. They talk to the others through `worker.comm` and change `worker.flat.state`,
    `.parameters` and `.gradients` in place. They are only called where there is more than one
    worker."""

    name: ClassVar[str]
    """The name on the command line."""

    @property
    def needs_accuracy(self) -> bool:
        """Whether `worker.step` must be told the accuracy on each batch, which costs a loop
        something.
        """
        return False

    def init(self, worker: Worker) -> State:
        """The worker's state. All replicas are equal at this moment, and what it moves is not
        counted.
        """
        return None  # type: ignore[return-value]

    def before_step(self, worker: Worker, state: State) -> None:
        """Before the forward pass: read parameters, wait for others."""

    def on_loss(self, worker: Worker, state: State, loss: Tensor, batch: Any) -> Tensor:
        """After the forward pass, before the backward pass: add to the loss."""
        return loss

    def on_gradients(self, worker: Worker, state: State) -> None:
        """After the backward pass: change the gradients."""

    def optimizer_step(self, worker: Worker, state: State) -> None:
        """Move the parameters. A method may put its own rule here in place of the optimizer's."""
        worker.optimizer.step()

    def after_step(self, worker: Worker, state: State) -> None:
        """After the parameters have moved; `worker.steps` counts this step already."""

    def preview(self, worker: Worker, state: State) -> Tensor | None:
        """The flat state that stands for the run at this moment, for evaluation; None: this
        worker's own.
        """
        return None

    def finish(self, worker: Worker, state: State) -> None:
        """Make `worker.flat.state` that of the model that represents the run, on every worker."""
