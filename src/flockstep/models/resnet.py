"""Residual networks: for images of 32×32 with three colours and ten classes, and for ImageNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from flockstep.fields import require_choice, require_integer
from flockstep.models.initialisation import he_initialise
from flockstep.models.normalisation import normalisation_layer

# From so many channels to so many, at half the height and width.
Shortcut = Callable[[int, int], nn.Module]

STRIDES_IN = ("1x1", "3x3")


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


class ResNet50(nn.Module):
    """Four stages of 3, 4, 6 and 3 bottlenecks, for pictures of 224×224: 25,557,032 parameters.

    Paper: He et al., "Deep residual learning for image recognition", 2015, table 1, with option B:
    projections where the channels grow. It takes pictures of any size from 32×32 on.

    Fields:
        normalisation: "batch" as in the paper, or "group" (as many parameters, no buffers).
        classes: that it tells apart.
        stride_in: which convolution of a stage's first bottleneck halves height and width. "1x1",
            the first, as in the paper: 3.86 G multiply-adds, 7.7 G FLOPs, 302 per parameter. "3x3",
            the second, as Goyal et al. (2017) and most programs have it: 4.09 G, 8.2 G, 320.
    """

    def __init__(
        self, normalisation: str = "batch", classes: int = 1000, stride_in: str = "1x1"
    ) -> None:
        super().__init__()
        require_integer("classes", classes, 1)
        require_choice("stride_in", stride_in, STRIDES_IN)
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            normalisation_layer(normalisation, 64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        inputs = 64
        for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(inputs, width, stride, stride_in, normalisation))
                inputs = 4 * width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
        self.layers = nn.Sequential(*layers)
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class Bottleneck(nn.Module):
    """1×1 to few channels, 3×3, 1×1 to four times as many: ReLU(shortcut(x) + residual(x))."""

    def __init__(
        self, inputs: int, width: int, stride: int, stride_in: str, normalisation: str
    ) -> None:
        super().__init__()
        outputs = 4 * width
        narrow, middle = (stride, 1) if stride_in == "1x1" else (1, stride)
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, width, 1, stride=narrow, bias=False),
            normalisation_layer(normalisation, width),
            nn.ReLU(),
            _convolution(width, width, middle),
            normalisation_layer(normalisation, width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            normalisation_layer(normalisation, outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, normalisation_layer(normalisation, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x))


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
