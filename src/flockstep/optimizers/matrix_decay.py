"""AdamW that spares what is no matrix."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT


def adamw_on_matrices(
    params: ParamsT,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> AdamW:
    """AdamW with weight decay on matrices alone: not on biases and the scales of normalisation.

    Fields:
        params: parameters, or groups of them with settings of their own.
        lr, betas, eps: as AdamW has them.
        weight_decay: of parameters with two dimensions or more; that of the others is 0.

    Example:
        optimizer = fs.OptimizerSpec("adamw_on_matrices", weight_decay=0.1)(model.parameters())
    """
    groups: list[dict[str, Any]] = []
    given: list[Any] = list(params)
    for group in given if isinstance(given[0], dict) else [{"params": given}]:
        of_group = list(group["params"])
        matrices = [parameter for parameter in of_group if parameter.ndim > 1]
        others = [parameter for parameter in of_group if parameter.ndim <= 1]
        groups.append({"weight_decay": weight_decay, **group, "params": matrices})
        groups.append({**group, "params": others, "weight_decay": 0.0})

    return AdamW(groups, lr=lr, betas=betas, eps=eps)
