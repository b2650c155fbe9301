"""Batch normalisation over the batches of several workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from flockstep.comm import Comm
from flockstep.errors import FlockstepError
from flockstep.fields import require, require_model

Share = Callable[[], float]


def _equal_share() -> float:
    return 1.0


class GroupBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics are those of the samples of all workers of a comm.

        n = Σ_i n_i,     μ = (1/n) Σ_i Σ x,     σ² = (1/n) Σ_i Σ x² − μ²     (i: a worker)

    The gradient goes through μ and σ² to the samples of all. Every worker of the comm must put a
    batch through the model, and back, equally often; batches may differ in size. In evaluation
    mode, and in copies of the layer, nobody is asked.

    Bytes: one all-reduce of 2C + 1 numbers of 8 bytes per layer of C channels and forward pass, and
    one of 2C per backward pass.

    Fields:
        like: the layer whose parameters and statistics it takes over.
        comm: the workers that normalise together; None: each alone.
        share: gives what this worker's mean gradient counts for at the moment, where some count
            more than others, as with `fs.GlobalBatch`.

    Paper: Ying et al., "Image Classification at Supercomputer Scale", 2018.
    """

    def __init__(self, like: _BatchNorm, comm: Comm | None, share: Share = _equal_share) -> None:
        super().__init__(
            like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats
        )
        self._parameters.update(like._parameters)
        self._buffers.update(like._buffers)
        self.training = like.training
        self.comm = comm
        self.share = share

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no worker, and normalises alone."""
        return self.__dict__ | {"comm": None, "share": _equal_share}

    def _check_input_dim(self, x: Tensor) -> None:
        require(x.dim() >= 2, "input", "have at least two dimensions", x.dim())

    @property
    def meets_others(self) -> bool:
        """Whether its workers wait for each other while they train."""
        return self.comm is not None and self.comm.size > 1

    def forward(self, x: Tensor) -> Tensor:
        if self.comm is None or not self.meets_others or not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        mean, variance, count = self._statistics(x.detach(), self.comm)
        self._remember(mean, variance, count)
        dtype = _at_least_single(x)
        scale = (variance + self.eps).rsqrt()
        normalised: Tensor = _Normalised.apply(  # type: ignore[no-untyped-call]
            x,
            self.weight,
            self.bias,
            mean.to(dtype),
            scale.to(dtype),
            self.comm,
            count,
            self.share(),
        )
        return normalised

    @staticmethod
    def _statistics(x: Tensor, comm: Comm) -> tuple[Tensor, Tensor, float]:
        """μ, σ² and n. What travels is in double precision, so that σ² loses nothing where μ is
        large.
        """
        own = x.numel() // x.shape[1]
        sums = torch.cat([*_sums(x, own), x.new_tensor([own], dtype=torch.float64)])
        comm.all_reduce(sums)

        count = float(sums[-1])
        if count < 2:
            raise FlockstepError(
                f"rank {comm.rank}: batch normalisation needs more than one value per channel, "
                f"of all workers together (got {count:g})"
            )
        mean, squares = (sums[:-1] / count).chunk(2)
        return mean, (squares - mean**2).clamp_(min=0), count

    def _remember(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """As torch's own layers do: the running variance is the unbiased one."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # the mean of all so far
            momentum = 1.0 / float(self.num_batches_tracked or 1)
        unbiased = variance * count / (count - 1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalised(torch.autograd.Function):
    """y = w x̂ + b with x̂ = (x − μ)/σ, where μ and σ depend on the samples of all workers.

    All is computed in at least single precision and rounded once, at the end, as torch's own layers
    do: in half precision a sum over samples soon is infinite.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        comm: Comm,
        count: float,
        share: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.comm, ctx.count, ctx.share = comm, count, share

        result = (x - _along(mean, x)) * _along(scale, x)
        if weight is not None and bias is not None:
            result = result * _along(weight, x) + _along(bias, x)
        return result.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """∂L/∂x = (g − mean g − x̂ · mean g·x̂)/σ, with g = w ∂L/∂y and means over the samples of
        all workers; ∂L/∂b = Σ ∂L/∂y and ∂L/∂w = Σ x̂ ∂L/∂y over the worker's own.

        A worker's g is of its own loss, and counts for as much as its share of the loss of all."""
        x, weight, mean, scale = ctx.saved_tensors
        over = _samples_of(x)
        slope = slope.to(scale.dtype)
        normalised = (x - _along(mean, x)) * _along(scale, x)
        of_bias, of_weight = slope.sum(over), (slope * normalised).sum(over)

        factor = torch.ones_like(scale) if weight is None else weight.to(scale.dtype)
        sums = torch.cat([factor * of_bias, factor * of_weight]).double() * ctx.share
        ctx.comm.all_reduce(sums)
        means = (sums / (ctx.share * ctx.count)).to(scale.dtype)
        mean_slope, mean_along = (_along(each, x) for each in means.chunk(2))
        slope = slope * _along(factor, x)
        gradient = (slope - mean_slope - normalised * mean_along) * _along(scale, x)

        rest = (None,) * 5
        if weight is None:
            return gradient.to(x.dtype), None, None, *rest
        return gradient.to(x.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype), *rest


def _at_least_single(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _sums(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Σ x and Σ x² of each channel, in double precision, of which `x` itself needs no copy:

    Σ x = n m     and     Σ x² = n (v + m²),     with the mean m and the variance v of the n samples
    """
    if count == 0:  # nothing has no mean
        nothing = x.new_zeros(x.shape[1], dtype=torch.float64)
        return nothing, nothing
    over = _samples_of(x)
    near = x.mean(over, dtype=_at_least_single(x))
    # near is rounded; what is left of x beside it is small, and so are the errors of its moments
    variance, rest = torch.var_mean(x - _along(near, x), over, correction=0)
    mean = near.double() + rest.double()
    return count * mean, count * (variance.double() + mean**2)


def _samples_of(x: Tensor) -> list[int]:
    """All dimensions but that of channels."""
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _along(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel, in a shape that fits that of `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def distribute_batch_norm(model: nn.Module, comm: Comm, share: Share = _equal_share) -> nn.Module:
    """Make all batch normalisation of a model that of the workers of `comm` together; of a part of
    them with `comm.split(…)`. Changes `model` and returns it.

    Parameters and statistics stay the same tensors under the same names, so the optimizer may be
    there already. A layer that the model holds in several places stays one. Do it on all workers,
    before hooks are registered on these layers and before `fs.Worker` is made.

    Example:
        model = fs.distribute_batch_norm(model, comm.split(comm.rank // 4))
        worker = fs.Worker(comm, model, optimizer, fs.SyncSGD())
    """
    require_model(model)
    require(isinstance(comm, Comm), "comm", "be what a launched program is given", comm)
    _require_no_hooks(model)
    group_layer = {
        layer: GroupBatchNorm(layer, comm, share)
        for layer in model.modules()
        if isinstance(layer, _BatchNorm)
    }
    if isinstance(model, _BatchNorm):
        return group_layer[model]

    for parent in list(model.modules()):
        # not named_children(), which leaves out a child's second name
        for name, child in list(parent._modules.items()):
            if isinstance(child, _BatchNorm):
                setattr(parent, name, group_layer[child])
    return model


def _require_no_hooks(model: nn.Module) -> None:
    """Those of a layer that is replaced would be called no more."""
    hooked = [
        name or type(layer).__name__
        for name, layer in model.named_modules()
        if is_batch_norm(layer) and _has_hooks(layer)
    ]
    rule = "have no hooks on batch normalisation that is replaced: register them afterwards"
    require(not hooked, "model", rule, hooked)


def _has_hooks(layer: nn.Module) -> bool:
    return any(value for name, value in vars(layer).items() if "_hooks" in name)


def is_batch_norm(layer: nn.Module) -> bool:
    """Whether it normalises over the samples of a batch."""
    return isinstance(layer, _BatchNorm)
