"""Evaluation mode that leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode inside; behind, each of its modules is in its own again.

    `model.train()` alone would wake up layers that somebody has frozen by their `eval()`.
    """
    is_training = model.training
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(is_training)  # some models do more in it than set a flag
        for module, mode in modes:
            module.training = mode
