"""What optimizers share whose step is a few operations on lists of tensors, whatever the number
of parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flockstep.errors import InvalidField

Settings = dict[str, Any]
Lists = tuple[list[Tensor], list[Tensor]]


class ForeachOptimizer(Optimizer, ABC):
    """Base class: checks settings, also those of single groups, and hands out the parameters in
    lists that are alike.

    All tensors of a list have one device, one dtype, and are either all vectors (biases,
    normalisation) or none."""

    def __init__(self, params: ParamsT, defaults: Settings) -> None:
        self._check(defaults)
        super().__init__(params, defaults)

    @abstractmethod
    def _check(self, settings: Settings) -> None:
        """Raise InvalidField if a setting breaks its rule."""

    @abstractmethod
    def _update(self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """One step of parameters that are alike."""

    def add_param_group(self, param_group: Settings) -> None:
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all parameters that have a gradient. Returns what `closure` does, which is called
        first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters, gradients in _alike(group["params"]):
                self._update(group, parameters, gradients)
        return loss

    def _kept(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        """What the state holds of each parameter under a name: zeros at first."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]


def is_vector(tensor: Tensor) -> bool:
    """Whether it is a bias or belongs to a normalisation, as far as its shape tells."""
    return tensor.ndim <= 1


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """‖x‖ of each tensor, in single precision at least."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(list(tensors), dtype=dtype))


def _alike(parameters: list[Tensor]) -> Iterator[Lists]:
    lists: dict[tuple[torch.device, torch.dtype, bool], Lists] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise InvalidField(
                f"'params' must have dense gradients (got one of layout {gradient.layout})"
            )
        kind = parameter.device, parameter.dtype, is_vector(parameter)
        alike, gradients = lists.setdefault(kind, ([], []))
        alike.append(parameter)
        gradients.append(gradient)
    yield from lists.values()
