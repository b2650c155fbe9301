"""Batches on a model's device, and through the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, tuple | list):
        return type(batch)(on_device(part, device) for part in batch)
    if isinstance(batch, Mapping):
        return {name: on_device(part, device) for name, part in batch.items()}
    return batch


def through(model: nn.Module, batch: Any) -> Any:
    """What the model makes of a batch: of its first part, or of all its parts by name."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)
