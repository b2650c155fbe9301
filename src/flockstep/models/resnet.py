"""Residual networks for images of 32×32 with three colours and ten classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from flockstep.models.initialisation import he_initialise
from flockstep.models.normalisation import normalisation_layer

# From so many channels to so many, at half the height and width.
Shortcut = Callable[[int, int], nn.Module]


class ResNet20(nn.Module):
    """Three stages of three blocks with 16, 32 and 64 channels: 269,722 parameters.

    Paper: He et al., "Deep residual learning for image recognition", 2015, section 4.2, with option
    A: where the channels grow, the shortcut takes every other pixel and adds channels of zeros, and
    has no parameters. Unclear: on which side the zeros go. Chosen: after the given channels.

    Fields:
        normalisation: "batch" as in the paper, or "group" (as many parameters, no buffers).
    """

    def __init__(self, normalisation: str = "batch") -> None:
        super().__init__()
        self.layers = _network((16, 32, 64), 3, PaddedShortcut, normalisation)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class ResNet18(nn.Module):
    """Four stages of two blocks with 64, 128, 256 and 512 channels: 11,173,962 parameters.

    Paper: He et al., 2015, whose ResNet-18 is for ImageNet. For images of 32×32 the convolution of
    7×7 with stride 2 and the max-pooling after it give way to one convolution of 3×3, as is usual
    for CIFAR; the shortcuts are 1×1 projections where the channels grow (option B). A normalisation
    follows every convolution, and none has a bias.

    Fields:
        normalisation: "batch" as in the paper, or "group" (as many parameters, no buffers).
    """

    def __init__(self, normalisation: str = "batch") -> None:
        super().__init__()

        def projection(inputs: int, outputs: int) -> nn.Module:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)
            return nn.Sequential(convolution, normalisation_layer(normalisation, outputs))

        self.layers = _network((64, 128, 256, 512), 2, projection, normalisation)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class Block(nn.Module):
    """Two convolutions of 3×3 around a shortcut: ReLU(shortcut(x) + residual(x))."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, shortcut: nn.Module, normalisation: str
    ) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _convolution(inputs, outputs, stride),
            normalisation_layer(normalisation, outputs),
            nn.ReLU(),
            _convolution(outputs, outputs),
            normalisation_layer(normalisation, outputs),
        )
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x))


class PaddedShortcut(nn.Module):
    """Option A: every other pixel, and channels of zeros after the given ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.zeros = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.zeros))


def _network(
    widths: Sequence[int], blocks: int, shortcut: Shortcut, normalisation: str
) -> nn.Sequential:
    """A convolution, a stage of `blocks` for each width, the mean over all pixels, a linear
    layer.
    """
    first, last = widths[0], widths[-1]
    layers = [_convolution(3, first), normalisation_layer(normalisation, first), nn.ReLU()]
    layers += [Block(first, first, 1, nn.Identity(), normalisation) for _ in range(blocks)]
    for inputs, outputs in pairwise(widths):
        layers.append(Block(inputs, outputs, 2, shortcut(inputs, outputs), normalisation))
        layers += [
            Block(outputs, outputs, 1, nn.Identity(), normalisation) for _ in range(blocks - 1)
        ]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10))
    he_initialise(network)
    return network


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
