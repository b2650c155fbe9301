"""Caffe's cifar10_full, for images of 32×32 with three colours."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class LocalResponseNorm(nn.Module):
    """Caffe's local response normalisation within a channel: y = x · (1 + α · mean of x² over a
    window)^(−β).

    The window is `size`×`size` around each pixel; what lies outside the image counts as zero and in
    the mean. `nn.LocalResponseNorm` is the other kind, across channels."""

    def __init__(self, size: int = 3, alpha: float = 5e-5, beta: float = 0.75) -> None:
        super().__init__()
        self.size, self.alpha, self.beta = size, alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        power = F.avg_pool2d(x * x, self.size, stride=1, padding=self.size // 2)
        return x * (1 + self.alpha * power) ** -self.beta


class Cifar10Full(nn.Module):
    """Three convolutions of 5×5, pooling of overlapping windows, one linear layer.

    It has 89,578 parameters.

    Source: Caffe's examples/cifar10/cifar10_full_train_test.prototxt (Jia et al., 2014), after A.
    Krizhevsky's cuda-convnet; with its initialisation, Gaussians of the given deviations and biases
    of 0. The first layer's 0.0001 is meant for pixels of 0 … 255 less the mean image: on inputs of
    unit scale the network hardly starts to learn. Caffe's rates per layer (biases learn at twice
    the rate, the last layer decays 250 times faster) are the optimizer's affair and not part of
    this model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _gaussian(nn.Conv2d(3, 32, 5, padding=2), 0.0001),
            nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(), LocalResponseNorm(),
            _gaussian(nn.Conv2d(32, 32, 5, padding=2), 0.01),
            nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True), LocalResponseNorm(),
            _gaussian(nn.Conv2d(32, 64, 5, padding=2), 0.01),
            nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
            nn.Flatten(),
            _gaussian(nn.Linear(1024, 10), 0.01),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def _gaussian(layer: nn.Conv2d | nn.Linear, deviation: float) -> nn.Module:
    """The layer with weights from N(0, deviation²) and biases of 0."""
    nn.init.normal_(layer.weight, std=deviation)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
