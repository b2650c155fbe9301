"""A densely connected network for images of 32×32 with three colours and ten classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flockstep.fields import require_integer
from flockstep.models.initialisation import he_initialise
from flockstep.models.normalisation import normalisation_layer


class DenseNet40(nn.Module):
    """Three dense blocks of twelve layers, each layer fed with all before it: 1,019,722 parameters
    at growth 12.

    Paper: Huang et al., "Densely connected convolutional networks", 2017: the plain form, without
    bottleneck and without compression, its first convolution to 16 channels. The dropout of 0.2
    that the paper adds where the images are not augmented is left out. Unclear: the text gives a
    transition as normalisation, 1×1 convolution and pooling. Chosen: with a ReLU after the
    normalisation, as in the authors' program and in every other layer.

    Fields:
        normalisation: "batch" as in the paper, or "group" (as many parameters, no buffers).
        growth: the channels that each layer adds.
    """

    def __init__(self, normalisation: str = "batch", growth: int = 12) -> None:
        super().__init__()
        require_integer("growth", growth, 1)
        channels = 16
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for block in range(3):
            if block > 0:
                layers += [_composite(normalisation, channels, channels, 1), nn.AvgPool2d(2)]
            for _ in range(12):
                layers.append(DenseLayer(normalisation, channels, growth))
                channels += growth
        layers += [normalisation_layer(normalisation, channels), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        self.layers = nn.Sequential(*layers)
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class DenseLayer(nn.Module):
    """Passes its input on and adds `growth` channels that it computes from it."""

    def __init__(self, normalisation: str, channels: int, growth: int) -> None:
        super().__init__()
        self.addition = _composite(normalisation, channels, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.addition(x)], dim=1)


def _composite(normalisation: str, inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """The paper's H: normalisation, ReLU, convolution."""
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(normalisation_layer(normalisation, inputs), nn.ReLU(), convolution)
