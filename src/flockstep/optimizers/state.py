"""What a strategy may do with the state that an optimizer keeps for its parameters, whatever the
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from flockstep.comm import Comm
from flockstep.errors import InvalidField
from flockstep.node import NodeOptimizer


def reset_state(optimizer: Optimizer | NodeOptimizer) -> None:
    """Forget momentum and all other state, as if the optimizer were new."""
    if isinstance(optimizer, NodeOptimizer):
        optimizer.node.reset_state()
    else:
        optimizer.state.clear()


def average_state(optimizer: Optimizer | NodeOptimizer, comm: Comm) -> None:
    """Average all floating-point state over the workers, in one all-reduce for each dtype."""
    change_state(optimizer, lambda flat: comm.all_reduce(flat, op="mean"))


def change_state(optimizer: Optimizer | NodeOptimizer, change: Callable[[Tensor], object]) -> None:
    """Have `change` change all floating-point state, one flat tensor for each dtype and device, in
    place.
    """
    if isinstance(optimizer, NodeOptimizer):
        state = optimizer.node.state_tensors()
        _change_tensors(state, change)
        optimizer.node.put_state_tensors(state)
    else:
        _change_tensors(_state_tensors(optimizer), change)


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor) and value.is_floating_point()
    ]


def _change_tensors(state: list[Tensor], change: Callable[[Tensor], object]) -> None:
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for value in state:
        alike.setdefault((value.dtype, value.device), []).append(value)
    for tensors in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        change(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(tensors, shaped)


def learning_rate(optimizer: Optimizer | NodeOptimizer) -> float:
    """η of the methods that need one: that of the first group of parameters."""
    if "lr" not in optimizer.param_groups[0]:
        raise InvalidField("'lr' must be known: give it to the worker (got None)")
    return float(optimizer.param_groups[0]["lr"])
