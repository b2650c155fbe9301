"""Statistics of batch normalisation that fit the model that represents a run."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.swa_utils import update_bn

from flockstep.data.batches import whole
from flockstep.task import on_device


def recalibrate(model: nn.Module, data: Any, batch_size: int = 1024) -> nn.Module:
    """Compute the statistics of batch normalisation anew, as the mean over the batches of `data`.

    Averaged parameters belong to no worker's statistics, nor quite to the average of them. `data` is a data set as
    `Worker.batches` takes it, whose batches begin with the model's input. Changes `model` and returns it.

    Example:
        model = fs.recalibrate(worker.finish(), training_data)
    """
    device = next(model.parameters()).device
    update_bn((on_device(batch, device) for batch, _ in whole(data, batch_size)), model)
    return model
