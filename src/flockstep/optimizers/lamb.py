"""Layer-wise rates for Adam."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from flockstep.fields import require, require_flag, require_number, require_rate
from flockstep.optimizers.foreach import (
    ForeachOptimizer,
    Settings,
    is_vector,
    norms,
)


class LAMB(ForeachOptimizer):
    """Adam with decoupled weight decay in which every layer's step is in proportion to the size of
    its weights.

        m ← β₁m + (1 − β₁)g;     v ← β₂v + (1 − β₂)g²;     m̂ = m/(1 − β₁ᵗ);     v̂ = v/(1 − β₂ᵗ)
        u = m̂/(√v̂ + ε) + λx;     x ← x − η · (‖x‖/‖u‖) · u

    Choices: the paper allows any scaling function φ(‖x‖); it is the identity here. The bias of both
    averages is corrected as in the paper's Algorithm 2, though the paper finds warm-up to do as
    well. A layer is a tensor of parameters. Tensors of at most one dimension (biases,
    normalisation) are not adapted: their steps are those of AdamW; they decay like the others, and
    a group with weight_decay=0 spares them. The ratio is 1 also where ‖x‖ or ‖u‖ is 0. Norms are
    taken in single precision at least.

    Fields:
        params: parameters, or groups of them with settings of their own.
        lr: η, the global rate.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        adapt_vectors: whether tensors of at most one dimension are adapted, too.

    Paper: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
        2020.

    Example:
        optimizer = fs.LAMB(model.parameters(), lr=2e-3, weight_decay=0.01)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt_vectors: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adapt_vectors": adapt_vectors,
        }
        super().__init__(params, defaults)

    def _check(self, settings: Settings) -> None:
        betas = settings["betas"]
        require_rate("lr", settings["lr"])
        require(
            isinstance(betas, tuple | list) and len(betas) == 2, "betas", "be two numbers", betas
        )
        for beta in betas:
            require_number("betas", beta, at_least=0, below=1)
        require_number("eps", settings["eps"], above=0, finite=True)
        require_number("weight_decay", settings["weight_decay"], at_least=0, finite=True)
        require_flag("adapt_vectors", settings["adapt_vectors"])

    def _update(self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        rate, (beta1, beta2) = float(group["lr"]), group["betas"]
        means, squares = self._kept(parameters, "exp_avg"), self._kept(parameters, "exp_avg_sq")
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

        counts = self._counted(parameters)
        roots = torch._foreach_sqrt(torch._foreach_div(squares, (1 - beta2**counts).tolist()))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, (1 - beta1**counts).tolist())
        torch._foreach_div_(updates, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])

        if group["adapt_vectors"] or not is_vector(parameters[0]):
            size, length = norms(parameters), norms(updates)
            ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
            torch._foreach_mul_(updates, (rate * ratio).unbind())
        else:
            torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(parameters, updates)

    def _counted(self, parameters: list[Tensor]) -> Tensor:
        """How many steps each parameter has seen, this one included. Counts wait in main memory,
        as torch's own do.
        """
        for parameter in parameters:
            self.state[parameter].setdefault("step", torch.zeros((), dtype=torch.float32))
        counts = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(counts, 1)
        return torch.stack(counts).double()
