"""Statistics of batch normalisation for the model that stands for a run, computed anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flockstep.flat import FlatTensors, outside_tensors
from flockstep.models import recalibrate
from flockstep.randomness import Purpose, drawing_from
from flockstep.training.sample import sample_of
from flockstep.worker import Worker


def recalibration_data(train: Any, samples: int) -> Any:
    """So many of the training samples; None of 0."""
    return sample_of(train, samples, "recalibrate", "False", samples) if samples else None


def with_own_statistics(model: nn.Module, data: Any) -> None:
    """Recompute the statistics of a model whose run has ended. What the data draw is the same every
    time.
    """
    with drawing_from(Purpose.RECALIBRATION, 0):
        recalibrate(model, data)


@torch.no_grad()
def recalibrated(model: nn.Module, flat: FlatTensors, state: Tensor, data: Any) -> Tensor:
    """The flat state of a model with the statistics that belong to its parameters; all of `model`
    is as before.
    """
    before = [each.clone() for each in (flat.state, *outside_tensors(model))]
    flat.state.copy_(state)
    # What the data draw is nothing to the run. Not another stream: workers beside this one, whose
    # generator is the same, must not see it change.
    with torch.random.fork_rng(devices=[]):
        recalibrate(model, data)
    found = flat.state.clone()
    for tensor, was in zip((flat.state, *outside_tensors(model)), before, strict=True):
        tensor.copy_(was)
    return found


def recalibrated_together(worker: Worker, state: Tensor, data: Any) -> Tensor:
    """The same for all workers, who call it together. One of them computes for all."""
    comm = worker.comm
    while True:
        first = comm.all_gather(torch.empty(0)).ranks[0]  # the same on all, whoever is lost
        own = state.new_empty(0)
        if comm.rank == first:
            own = recalibrated(worker.model, worker.flat, state, data)
        told = comm.all_gather(own).by_rank()
        if first in told:
            return told[first].to(state.device)
