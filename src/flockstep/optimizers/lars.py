"""Layer-wise rates for momentum SGD."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from flockstep.fields import require_flag, require_number, require_rate
from flockstep.optimizers.foreach import (
    ForeachOptimizer,
    Settings,
    is_vector,
    norms,
)


class LARS(ForeachOptimizer):
    """Momentum SGD in which every layer's step is in proportion to the size of its weights.

        λ = τ · ‖x‖ / (‖g‖ + β‖x‖ + ε);     v ← μv + ηλ(g + βx);     x ← x − v

    As in the paper, momentum gathers steps that are multiplied with the rate already (torch's SGD
    multiplies what it gathered): after a drop of the rate v still carries some of the larger steps.

    Choices: a layer is a tensor of parameters. Tensors of at most one dimension (biases,
    normalisation) are not adapted, λ = 1, but decay like the others; a group with weight_decay=0
    spares them. λ = 1 also where ‖x‖ or ‖g‖ is 0. ε is not in the paper. Norms are taken in single
    precision at least.

    Fields:
        params: parameters, or groups of them with settings of their own.
        lr: η, the global rate.
        momentum: μ.
        weight_decay: β.
        trust: τ, the trust coefficient (η in the paper).
        eps: ε, against a division by almost nothing.
        adapt_vectors: whether tensors of at most one dimension are adapted, too.

    Paper: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017.

    Example:
        optimizer = fs.LARS(model.parameters(), lr=2.0, weight_decay=5e-4)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 1e-8,
        adapt_vectors: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "eps": eps,
            "adapt_vectors": adapt_vectors,
        }
        super().__init__(params, defaults)

    def _check(self, settings: Settings) -> None:
        require_rate("lr", settings["lr"])
        require_number("momentum", settings["momentum"], at_least=0, below=1)
        require_number("weight_decay", settings["weight_decay"], at_least=0, finite=True)
        require_number("trust", settings["trust"], above=0, finite=True)
        require_number("eps", settings["eps"], at_least=0, finite=True)
        require_flag("adapt_vectors", settings["adapt_vectors"])

    def _update(self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        rate, decay = float(group["lr"]), group["weight_decay"]
        decayed = torch._foreach_add(gradients, parameters, alpha=decay) if decay else gradients
        if group["adapt_vectors"] or not is_vector(parameters[0]):
            size, slope = norms(parameters), norms(gradients)
            adapted = group["trust"] * size / (slope + decay * size + group["eps"])
            ratio = torch.where((size > 0) & (slope > 0), adapted, 1.0)
            steps = torch._foreach_mul(decayed, (rate * ratio).unbind())
        else:
            steps = torch._foreach_mul(decayed, rate)
        velocities = self._kept(parameters, "momentum_buffer")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, steps)
        torch._foreach_sub_(parameters, velocities)
