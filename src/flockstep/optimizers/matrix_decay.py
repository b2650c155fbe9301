"""Weight decay that spares what is no matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

from flockstep.optimizers.foreach import is_vector

Decay = Literal["all", "weights"]
"""What decays: all parameters, or weights alone: no biases, nor scales of normalisation."""


def sparing_vectors(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups in which tensors of fewer than two dimensions (biases, normalisation) do not decay;
    those that decay come first.
    """
    groups: list[dict[str, Any]] = []
    given = list(params)
    for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
        of_group = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        of_group = list(of_group)
        weights = [parameter for parameter in of_group if not is_vector(parameter)]
        vectors = [parameter for parameter in of_group if is_vector(parameter)]
        groups.append({**group, "params": weights})
        groups.append({**group, "params": vectors, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def adamw_on_matrices(
    params: ParamsT,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> AdamW:
    """AdamW with weight decay on matrices alone: `adamw(decay=weights)` by another name.

    Fields:
        params: parameters, or groups of them with settings of their own.
        lr, betas, eps: as AdamW has them.
        weight_decay: of parameters with two dimensions or more; that of the others is 0.

    Example:
        optimizer = fs.OptimizerSpec("adamw_on_matrices", weight_decay=0.1)(model.parameters())
    """
    groups = sparing_vectors(params)
    return AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
