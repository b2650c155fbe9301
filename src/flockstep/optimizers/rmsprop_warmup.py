"""RMSprop that becomes momentum SGD."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from flockstep.fields import require_number, require_rate
from flockstep.optimizers.foreach import ForeachOptimizer, Settings
from flockstep.schedules import Progress


class RMSpropWarmup(ForeachOptimizer):
    """RMSprop at the start, where large batches are hard to begin with, sliding into momentum SGD.

        m ← μ₂m + (1 − μ₂)g²;     Δ ← μ₁Δ − (α + (1 − α)·(η_R/η) / (√m + ε)) g;     x ← x + ηΔ

        α = ½·exp(2(e − c)/p)  before epoch c;     ½ + (e − c)/p  from there;     1  from c + p/2 on

    `at(progress)` says where in the slide it is; the training loop calls it before every step.
    While α is near 0 this is RMSprop with momentum and rate η_R, while α is 1 it is torch's SGD
    with momentum, and keeps no m.

    Choices: writings of the linear part differ; its slope here is that of the exponential where
    they meet, 1/p, so that α rises smoothly and to no more than 1. η in η_R/η is the base rate, so
    that a schedule scales both parts alike. Weight decay is that of torch's SGD: βx is added to g
    first.

    Fields:
        params: parameters, or groups of them with settings of their own.
        lr: η, the rate of SGD.
        momentum: μ₁.
        weight_decay: β.
        rmsprop_lr: η_R, the rate of RMSprop.
        smoothing: μ₂, of the average of squares.
        eps: ε.
        center: c, the epoch at which the two weigh the same.
        period: p, how many epochs the slide takes, about.

    Paper: Akiba, Suzuki and Fukuda, "Extremely Large Minibatch SGD: Training ResNet-50 on ImageNet
    in 15 Minutes", 2017. The defaults but that of `weight_decay` are its values.

    Example:
        optimizer = fs.RMSpropWarmup(model.parameters(), lr=0.8)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        rmsprop_lr: float = 3e-4,
        smoothing: float = 0.99,
        eps: float = 1e-8,
        center: float = 10.0,
        period: float = 5.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "rmsprop_lr": rmsprop_lr,
            "smoothing": smoothing,
            "eps": eps,
            "center": center,
            "period": period,
        }
        super().__init__(params, defaults)

    def at(self, progress: Progress) -> None:
        """Go to the place in the slide that belongs to the moment."""
        for group in self.param_groups:
            group["sgd_share"] = sgd_share(progress.epoch, group["center"], group["period"])
            if group["sgd_share"] == 1:
                for parameter in group["params"]:
                    if parameter in self.state:
                        self.state[parameter].pop("square_avg", None)

    def add_param_group(self, param_group: Settings) -> None:
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        added.setdefault("sgd_share", sgd_share(0.0, added["center"], added["period"]))

    def _check(self, settings: Settings) -> None:
        require_rate("lr", settings["lr"])
        require_number("momentum", settings["momentum"], at_least=0, below=1)
        require_number("weight_decay", settings["weight_decay"], at_least=0, finite=True)
        require_number("rmsprop_lr", settings["rmsprop_lr"], at_least=0, finite=True)
        require_number("smoothing", settings["smoothing"], at_least=0, below=1)
        require_number("eps", settings["eps"], above=0, finite=True)
        require_number("center", settings["center"], at_least=0, finite=True)
        require_number("period", settings["period"], above=0, finite=True)

    def _update(self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        if group["sgd_share"] < 1:
            gradients = self._mixed(group, parameters, gradients)
        velocities = self._kept(parameters, "momentum_buffer")  # −Δ, what torch's SGD keeps
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, gradients)
        torch._foreach_add_(parameters, velocities, alpha=-float(group["lr"]))

    def _mixed(
        self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        """(α + (1 − α)·(η_R/η) / (√m + ε)) g"""
        share, base = (
            group["sgd_share"],
            float(group["initial_lr"] if "initial_lr" in group else group["lr"]),
        )
        squares = self._kept(parameters, "square_avg")
        torch._foreach_mul_(squares, group["smoothing"])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["smoothing"])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        mixed = list(torch._foreach_div(gradients, roots))
        # η = 0: nothing moves.
        torch._foreach_mul_(mixed, (1 - share) * group["rmsprop_lr"] / base if base else 0.0)
        torch._foreach_add_(mixed, gradients, alpha=share)
        return mixed


def sgd_share(epoch: float, center: float, period: float) -> float:
    """α, the weight of SGD: near 0 long before the centre, ½ there, 1 half a period later and
    from then on.
    """
    along = (epoch - center) / period
    return math.exp(2 * along) / 2 if along < 0 else min(1.0, 0.5 + along)
