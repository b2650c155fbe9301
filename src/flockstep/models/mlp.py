"""A plain multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from flockstep.fields import require, require_choice

INITIALISATIONS = ("torch", "he")


class MLP(nn.Module):
    """Linear layers of the given widths with ReLU between them; inputs are flattened. With
    `batch_norm`, batches are normalised before each ReLU.

    Widths a, b, c, … make (a + 1)·b + (b + 1)·c + … parameters.

    Fields:
        widths: of the input, of each layer, of the output.
        initialisation: "torch" for torch's own, or "he" for weights from N(0, 2 ÷ inputs) and
            biases of 0, which keep signals of many layers at one size (He et al., 2015).
        batch_norm: adds two parameters for each unit inside.
    """

    def __init__(
        self, *widths: int, initialisation: str = "torch", batch_norm: bool = False
    ) -> None:
        super().__init__()
        require_choice("initialisation", initialisation, INITIALISATIONS)
        require(
            len(widths) >= 2, "widths", "be at least two, of the input and of the output", widths
        )
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            normalisation = [nn.BatchNorm1d(outputs)] if batch_norm else []
            layers += [nn.Linear(inputs, outputs), *normalisation, nn.ReLU()]
        behind_the_last = 2 if batch_norm else 1
        self.layers = nn.Sequential(*layers[:-behind_the_last])
        if initialisation == "he":
            self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits

    def _initialise(self) -> None:
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
