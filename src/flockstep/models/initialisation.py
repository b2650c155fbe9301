"""He initialisation, for networks whose convolutions are followed by ReLU."""

from __future__ import annotations

from torch import nn


def he_initialise(network: nn.Module) -> None:
    """Convolutions from N(0, 2 ÷ (kernel area · output channels)), linear biases 0; all else stays
    as torch made it.

    He et al., "Delving deep into rectifiers", 2015, leaves open whether to count the inputs or the
    outputs of a layer; the authors' programs for ResNets and DenseNets count the outputs, and so
    does this."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)
