"""What a strategy is: frozen hyper-parameters, and hooks that say when and how replicas
influence each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from flockstep.errors import InvalidField, nearest
from flockstep.strategies._state import load_state, save_state

if TYPE_CHECKING:
    from flockstep.worker import Worker

State = TypeVar("State")


class Strategy(Generic[State]):
    """Base class. A method is a frozen dataclass that overrides the moments it needs; the others do
    nothing.

    The spec is shared by all workers and never changes; what changes lives in the state that `init`
    returns, one for each worker, and nowhere else, so that a run can be saved. Hooks are plain
    blocking code of one worker, run without gradients. They talk to the others through
    `worker.comm` and change `worker.flat.state`, `.parameters` and `.gradients` in place. They are
    only called where there is more than one worker."""

    def __init_subclass__(cls, **how: Any) -> None:
        super().__init_subclass__(**how)
        _require_known_hooks(cls)

    name: ClassVar[str]
    """The name on the command line."""

    revision: ClassVar[int] = 0
    """Raised when the same fields come to give another outcome. Part of a run's id, so that records
    of before are not taken for those of now."""

    codec_revision: ClassVar[int] = 0
    """The same, where only runs with a codec have come to another outcome."""

    shares_tensors: ClassVar[bool] = False
    """Whether its workers talk through shared tensors, whose links they share: the ids of simulated
    runs then contain the revision of the network's model."""

    @property
    def needs_accuracy(self) -> bool:
        """Whether `worker.step` must be told the accuracy on each batch, which costs a loop
        something.
        """
        return False

    @property
    def needs_loss_after_step(self) -> bool:
        """Whether `finish` asks for `worker.loss_after_step`: how good the parameters have become
        on the last batch, at the cost of one more forward pass.
        """
        return False

    @property
    def needs_length(self) -> bool:
        """Whether the method goes by `worker.total_steps`, which must then not change later."""
        return False

    @property
    def needs_rate(self) -> bool:
        """Whether the method asks for the learning rate, which not every optimizer tells."""
        return False

    @property
    def waits(self) -> bool:
        """Whether a worker may ever wait for a step of another.

        If so, all workers must take the same number of steps, and who is stopped early must be
        stopped with all others, after the same step. That is the safe answer; a method whose
        workers never wait before `finish` says False."""
        return True

    def next_synchronisation(self, steps: int, total_steps: int | None) -> int | None:
        """The first step from `steps` on after which all replicas are equal, in a training of
        `total_steps`, if that is known; None: no such step can be told. For looks that take place
        there (`look_at="synchronisation"`).
        """
        return None

    def require_optimizer(self, optimizer: Optimizer) -> None:
        """Complain of an optimizer that the method cannot work with."""

    def init(self, worker: Worker) -> State:
        """The worker's state: data, and handles that are marked with `fs.handle()`. All replicas
        are equal at this moment, and what it moves is not counted.
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

    def replica(self, worker: Worker, state: State) -> Tensor:
        """The flat state of the worker's own model, between two steps. Another than
        `worker.flat.state` where a method has moved that already, for the next gradient.
        """
        return worker.flat.state

    def preview(self, worker: Worker, state: State) -> Tensor:
        """The flat state of the model that stands for the run at this moment: to the bit what
        `finish` would now leave in `worker.flat.state`, in a tensor that the caller may keep.

        All workers call it together, off the meter, and may talk to each other. It changes nothing.
        By default it runs `finish` and undoes what that did to `worker.flat.state` and to the data
        of the strategy's state. A method whose `finish` does more (to shared tensors, turns, hooks)
        says its own preview, and finishes with it."""
        if type(self).finish is Strategy.finish:
            return worker.flat.state.clone()
        before = worker.flat.state.clone()
        tensors, values = save_state(state, type(self).__name__)
        try:
            self.finish(worker, state)
            return worker.flat.state.clone()
        finally:
            worker.flat.state.copy_(before)
            load_state(state, tensors, values)

    def finish(self, worker: Worker, state: State) -> None:
        """Make `worker.flat.state` that of the model that represents the run, on every worker."""


HOOKS = [name for name in vars(Strategy) if not name.startswith("_")]


def _require_known_hooks(strategy: type[Strategy[Any]]) -> None:
    """What is nearly called like a hook would never be called."""
    for name, value in vars(strategy).items():
        is_own = not name.startswith("_") and name not in HOOKS
        if is_own and (callable(value) or isinstance(value, property)):
            near = nearest(name, HOOKS, likeness=0.87)
            if near is not None:
                raise InvalidField(
                    f"{strategy.__name__}.{name} must have another name: it is no hook, and would "
                    f"never be called. Did you mean {near!r}? (got {name!r})"
                )
