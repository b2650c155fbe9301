"""A small convolutional network for the 8×8 digits."""

from __future__ import annotations

from torch import Tensor, nn


class DigitsCNN(nn.Module):
    """Two convolutions of 3×3 to 32 and 64 maps and a linear layer: 29,066 parameters.

    Takes (batch, 64), as scikit-learn gives the digits, or (batch, 1, 8, 8). After no paper: the
    smallest network with the layers of a real one, for runs of seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x.reshape(len(x), 1, 8, 8))
        return logits
