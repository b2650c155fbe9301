"""Whether data fit a model: asked once, before workers start, rather than by a worker's crash in
mid-run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flockstep.data import InMemory, in_order, is_stream
from flockstep.device import on_device
from flockstep.errors import InvalidField
from flockstep.fields import require

IGNORED = -100  # the label that torch's cross-entropy leaves out


@torch.no_grad()
def require_fit(model: nn.Module, data: Any, field: str, classes_last: bool) -> None:
    """Raise if `model` does not take the inputs of `data`, or if labels are not among the classes
    that it scores.

    Classes are the last dimension of the model's output, or, as torch's cross-entropy has it, the
    second."""
    if is_stream(data):
        return  # to look into a stream might use it up
    batch, _ = next(in_order(data, batch_size=1), (None, 0))
    require(batch is not None, field, "have at least one sample", 0)
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    require(is_pair, field, "give batches of (inputs, labels)", f"a {type(batch).__name__}")
    inputs, labels = on_device(batch, next(model.parameters()).device)
    model.eval()
    try:
        scores = model(inputs)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        shape = (
            f"{tuple(inputs.shape)}, {inputs.dtype}"
            if isinstance(inputs, Tensor)
            else type(inputs).__name__
        )
        reason = str(error).strip().splitlines()[0]
        raise InvalidField(
            f"{field!r} must have inputs that the model takes (got {shape}: {reason})"
        ) from error
    _require_labels(_all_labels(data, labels), scores.shape[-1 if classes_last else 1], field)


def _all_labels(data: Any, first: Tensor) -> Tensor:
    """All labels if they lie in memory as they are, else those of the first batch."""
    if isinstance(data, InMemory) and data.prepare is not None:
        return first
    if isinstance(data, TensorDataset):
        return data.tensors[-1]
    return torch.as_tensor(data[1]) if isinstance(data, tuple | list) else first


def _require_labels(labels: Tensor, classes: int, field: str) -> None:
    if labels.is_floating_point():
        return  # probabilities of classes
    rule = f"have labels between 0 and {classes - 1}"
    wrong = ((labels < 0) & (labels != IGNORED)) | (labels >= classes)
    if wrong.any():
        place = int(wrong.flatten().nonzero()[0])
        raise InvalidField(
            f"{field!r} must {rule} (got {int(labels.flatten()[place])} at place {place})"
        )
