"""What may happen to a worker's gradients beside the strategy's exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from flockstep.fields import require, require_number

OnGradients = Callable[[Tensor], None]
"""Called with the flat gradients that the step will use, which it may change in place."""


@dataclass(frozen=True)
class Clipping:
    """The largest norm that the gradients of a step may have."""

    max_norm: float
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        require_number("max_norm", self.max_norm, above=0)
        require_number("norm_type", self.norm_type, above=0)

    def clip(self, parameters: Iterable[Tensor]) -> float:
        """Return the norm that the gradients had."""
        norm = nn.utils.clip_grad_norm_(parameters, self.max_norm, self.norm_type)
        return norm.item()


def unscale(
    scaler: GradScaler,
    optimizer: Optimizer,
    gradients: Tensor,
    agree: Callable[[bool], bool],
) -> bool:
    """Undo the scaling, and let the scaler find its next scale. Return whether the gradients can be
    used: no worker that `agree` asks has found one that is not finite.
    """
    is_useless = agree(not bool(gradients.isfinite().all()))
    if is_useless:
        gradients.fill_(math.inf)  # every worker's scaler finds what one of them has found
    scaler.unscale_(optimizer)
    scaler.update()
    return not is_useless


def require_scaler(scaler: object) -> None:
    rule = "be a torch.amp.GradScaler"
    require(scaler is None or isinstance(scaler, GradScaler), "scaler", rule, scaler)
