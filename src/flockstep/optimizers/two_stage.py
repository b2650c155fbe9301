"""One optimizer to warm up with, another one from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flockstep.errors import InvalidField
from flockstep.fields import require, require_number
from flockstep.schedules import Progress

Make = Callable[[Any], Optimizer]


class TwoStage(Optimizer):
    """An optimizer for the first epochs, then another one on the same parameters.

        epoch < k: first;     epoch ≥ k: second, with a state as fresh as if it were new

    `at(progress)` switches when it is time; the training loop calls it before every step.
    Parameters stay where the first optimizer left them, and its state is dropped. Groups, rates and
    state are those of the active optimizer, so schedules and strategies act on that one; what a
    group of `params` sets itself counts in both stages.

    Fields:
        params: parameters, or groups of them with settings of their own.
        first: makes the optimizer to warm up with from parameters, such as
            functools.partial(torch.optim.SGD, lr=0.1).
        second: makes the one after it, such as functools.partial(torch.optim.Adam, lr=1e-3).
        warmup_epochs: k.

    Example:
        first, second = partial(SGD, lr=0.1), partial(Adam, lr=1e-3)
        optimizer = fs.TwoStage(model.parameters(), first, second, warmup_epochs=5)
    """

    def __init__(self, params: ParamsT, first: Make, second: Make, warmup_epochs: float) -> None:
        require_number("warmup_epochs", warmup_epochs, at_least=0, finite=True)
        groups = _groups(params)
        stages = []
        for field, make in (("first", first), ("second", second)):
            require(callable(make), field, "be callable", make)
            # Optimizers write into the groups that they are given.
            made = make([dict(group) for group in groups])
            require(isinstance(made, Optimizer), field, "make an optimizer", made)
            stages.append(made)
        super().__init__(groups, {})
        self.warmup_epochs = warmup_epochs
        # The second has no state before its first step: it need not be made anew.
        self._stages = stages
        self._enter(0)

    @property
    def active(self) -> Optimizer:
        """The optimizer of the present stage."""
        return self._stages[self._stage]

    def at(self, progress: Progress) -> None:
        """Switch, once, when the warm-up is over."""
        if self._stage == 0 and progress.epoch >= self.warmup_epochs:
            self._enter(1)
        follow = getattr(self.active, "at", None)  # a stage may slide itself
        if follow is not None:
            follow(progress)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return self.active.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_stages" not in self.__dict__:  # called by the constructor of the base class
            super().add_param_group(param_group)
            return
        (group,) = _groups([param_group])
        for stage in self._stages:
            stage.add_param_group(dict(group))

    def state_dict(self) -> dict[str, Any]:
        """That of the active optimizer, and which one that is."""
        return {**self.active.state_dict(), "stage": self._stage}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        stage = state_dict.get("stage")
        if stage not in (0, 1):
            raise InvalidField(
                f"'stage' of the state must be 0 or 1, as a TwoStage saves it (got {stage!r})"
            )
        self._stages[stage].load_state_dict(
            {name: value for name, value in state_dict.items() if name != "stage"}
        )
        self._enter(stage)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "warmup_epochs": self.warmup_epochs,
            "_stages": self._stages,
            "_stage": self._stage,
            "defaults": {},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enter(self._stage)

    def _enter(self, stage: int) -> None:
        """Make a stage the active one, and drop the state of the other."""
        self._stage = stage
        self._stages[1 - stage].state.clear()
        self.defaults, self.param_groups, self.state = (
            self.active.defaults,
            self.active.param_groups,
            self.active.state,
        )


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups that can be read more than once, from whatever an optimizer takes."""
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    return [
        {
            **group,
            "params": [params] if isinstance(params := group["params"], Tensor) else list(params),
        }
        for group in groups
    ]
