"""A plain multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from flockstep.fields import require


class MLP(nn.Module):
    """Linear layers of the given widths with ReLU between them; inputs are flattened.

    Widths a, b, c, … make (a + 1)·b + (b + 1)·c + … parameters.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        require(
            len(widths) >= 2, "widths", "be at least two, of the input and of the output", widths
        )
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits
