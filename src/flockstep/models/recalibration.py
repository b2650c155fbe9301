"""Statistics of batch normalisation that fit the model that represents a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from flockstep.data import in_order, is_stream, source_of
from flockstep.device import on_device, through
from flockstep.fields import require_integer, require_model
from flockstep.models.group_batch_norm import GroupBatchNorm
from flockstep.modes import evaluating


@torch.no_grad()
def recalibrate(model: nn.Module, data: Any, batch_size: int = 1024) -> nn.Module:
    """Compute the statistics of batch normalisation anew, as the mean over all samples of `data`.

    Averaged parameters belong to no worker's statistics, nor quite to the average of them. `data`
    is a data set as `Worker.batches` takes it, whose batches begin with the model's input, or are
    its keyword arguments. A batch counts as much as it has samples. Changes `model` and returns it.

    Example:
        model = fs.recalibrate(worker.finish(), training_data)
    """
    require_model(model)
    require_integer("batch_size", batch_size, 1)
    if not is_stream(data):
        source_of(data)  # complains of what is no data set, even where nothing is to be computed
    normed = [
        layer
        for layer in model.modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None
    ]
    layers = {layer: layer.momentum for layer in normed}
    if not layers:
        return model
    device = next(model.parameters()).device
    # Whoever normalises with others does it alone here: they may not be there.
    together = {layer: layer.comm for layer in layers if isinstance(layer, GroupBatchNorm)}
    seen = 0
    with evaluating(model):  # no dropout: the statistics are for a model that is used
        for layer in layers:
            layer.reset_running_stats()
            layer.train()
        for group_layer in together:
            group_layer.comm = None
        try:
            for batch, samples in in_order(data, batch_size):
                seen += samples
                for layer in layers:
                    # So that the running mean is that of all samples so far.
                    layer.momentum = samples / seen
                through(model, on_device(batch, device))
        finally:
            for layer, momentum in layers.items():
                layer.momentum = momentum
            for group_layer, comm in together.items():
                group_layer.comm = comm
    return model
