"""Two LeNets for images of 28×28."""

from __future__ import annotations

from torch import Tensor, nn


class LeNet5(nn.Module):
    """Two convolutions and three linear layers, 61,706 parameters.

    Paper: LeCun et al., "Gradient-based learning applied to document recognition", 1998; with ReLU
    and max-pooling in place of the sigmoids and the trained subsampling, and every map of the
    second convolution seeing every map of the first, as is usual today."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class LeNet(nn.Module):
    """The wide LeNet, convolutions to 20 and 50 maps and a linear layer of 500: 656,080 parameters.

    Paper: Ye, Han, Sun, Lv, "PSO-PS: Parameter Synchronization with Particle Swarm Optimization for
    Distributed Training of Deep Neural Networks", 2020, which trains "LeNet, 0.665 M parameters" on
    MNIST. Unclear: the paper gives the count and no layers. Chosen: the 20–50–500 LeNet that came
    with many frameworks, padded by 2 before its first convolution (28 → 14 → 10 → 5), which comes
    closest, 1.3 % below; ReLU after every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1250, 500), nn.ReLU(), nn.Linear(500, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits
