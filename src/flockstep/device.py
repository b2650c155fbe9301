"""Batches on a model's device, and through the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flockstep.fields import require, require_choice

DEVICES = ("cpu", "cuda", "auto")


def worker_device(name: str, rank: int) -> torch.device:
    """Where a worker computes: "cpu", "cuda", or "auto", a GPU where there is one.

    Of several GPUs each worker of a host gets its own, as far as they go: by the rank on its host
    where a launcher tells it, else by its rank.
    """
    require_choice("device", name, DEVICES)
    there = torch.cuda.is_available()
    require(there or name != "cuda", "device", "be 'cpu' or 'auto' where torch sees no GPU", name)
    if name == "cpu" or not there:
        return torch.device("cpu")
    place = int(os.environ.get("LOCAL_RANK", rank))
    return torch.device("cuda", place % torch.cuda.device_count())


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
