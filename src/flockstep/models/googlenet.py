"""The batch-normalised Inception network, for pictures of 224×224."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flockstep.fields import require_integer
from flockstep.models.initialisation import he_initialise


class GoogLeNetV2(nn.Module):
    """Ten Inception modules with batch normalisation: 11,194,984 parameters.

    Paper: Ioffe & Szegedy, "Batch normalization: accelerating deep network training by reducing
    internal covariate shift", 2015, the table of its appendix. It takes pictures of any size from
    32×32 on.

    Unclear: in modules 4c and 4d the table's filters give 608 channels, with a projection to 128
    after the pooling, and its outputs are 576. Chosen: the outputs, so a projection to 96, which
    the outputs of the modules behind them need, too. Its first convolution is "separable" in the
    text; chosen: a plain one. No auxiliary classifiers: the table has none.

    Counted: 2.02 G multiply-adds, 4.04 G FLOPs, 361 per parameter. Ioffe & Szegedy print 13.6 M
    parameters, 21 % more than the layers of their table have. Wongpanich, You & Demmel (2020) have
    13.5 M and 9.7 G FLOPs, which make 718.5, and print 736; where their FLOPs, 2.4 times those of
    this network, come from they do not say.

    Fields:
        classes: that it tells apart.
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        require_integer("classes", classes, 1)
        self.layers = nn.Sequential(
            *_convolved(3, 64, 7, stride=2),
            nn.MaxPool2d(3, stride=2, padding=1),
            *_convolved(64, 64, 1),
            *_convolved(64, 192, 3),
            nn.MaxPool2d(3, stride=2, padding=1),
            # Inputs; 1×1; before the 3×3 and of it; before two of 3×3 and of these; projection.
            Inception(192, 64, (64, 64), (64, 96), 32),
            Inception(256, 64, (64, 96), (64, 96), 64),
            Halving(320, (128, 160), (64, 96)),
            Inception(576, 224, (64, 96), (96, 128), 128),
            Inception(576, 192, (96, 128), (96, 128), 128),
            Inception(576, 160, (128, 160), (128, 160), 96),
            Inception(576, 96, (128, 192), (160, 192), 96),
            Halving(576, (128, 192), (192, 256)),
            Inception(1024, 352, (192, 320), (160, 224), 128),
            Inception(1024, 352, (192, 320), (192, 224), 128, pooling="max"),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(1024, classes),
        )
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class Branches(nn.Module):
    """What each branch makes of the input, side by side as channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class Inception(Branches):
    """1×1; 3×3; two of 3×3 in a row; pooling with a projection. Height and width stay.

    `single` and `double` are the channels before the convolutions of 3×3, and after each of them.
    """

    def __init__(
        self,
        inputs: int,
        plain: int,
        single: tuple[int, int],
        double: tuple[int, int],
        projected: int,
        pooling: str = "mean",
    ) -> None:
        pool = nn.MaxPool2d if pooling == "max" else nn.AvgPool2d
        super().__init__(
            nn.Sequential(*_convolved(inputs, plain, 1)),
            _single(inputs, *single),
            _double(inputs, *double),
            nn.Sequential(pool(3, stride=1, padding=1), *_convolved(inputs, projected, 1)),
        )


class Halving(Branches):
    """3×3; two of 3×3 in a row; max-pooling. Each halves height and width."""

    def __init__(self, inputs: int, single: tuple[int, int], double: tuple[int, int]) -> None:
        super().__init__(
            _single(inputs, *single, stride=2),
            _double(inputs, *double, stride=2),
            nn.MaxPool2d(3, stride=2, padding=1),
        )


def _single(inputs: int, reduced: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        *_convolved(inputs, reduced, 1), *_convolved(reduced, outputs, 3, stride=stride)
    )


def _double(inputs: int, reduced: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        *_convolved(inputs, reduced, 1),
        *_convolved(reduced, outputs, 3),
        *_convolved(outputs, outputs, 3, stride=stride),
    )


def _convolved(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size but for its stride, batch normalisation, ReLU."""
    padding = kernel // 2
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
