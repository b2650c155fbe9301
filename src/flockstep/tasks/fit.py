"""Whether data fit a model: asked once, before workers start, rather than by a worker's crash in
mid-run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flockstep.data import ImageFolder, InMemory, in_order, is_stream
from flockstep.device import on_device
from flockstep.errors import InvalidField
from flockstep.fields import require

LABELS = (torch.int64, torch.uint8)  # which torch's cross-entropy takes
IGNORED = -100  # the label that torch's cross-entropy leaves out


@torch.no_grad()
def require_fit(
    model: nn.Module, data: Any, field: str, classes_last: bool, takes_probabilities: bool = False
) -> None:
    """Raise if `model` does not take the inputs of `data`, or if labels are not among the classes
    that it scores.

    Classes are the last dimension of the model's output, or, as torch's cross-entropy has it, the
    second. Probabilities of all classes may be taken in place of labels."""
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
    is_score = isinstance(scores, Tensor) and scores.ndim > 1
    got = f"of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
    require(is_score, "model", "give scores of classes, a row per sample", got)
    require(isinstance(labels, Tensor), field, "have tensors of labels", type(labels).__name__)
    is_probability = labels.is_floating_point() and labels.shape == scores.shape
    if is_probability and takes_probabilities and not classes_last:
        return

    place = scores.ndim - 1 if classes_last else 1
    _require_kind(labels, (*scores.shape[:place], *scores.shape[place + 1 :]), field)
    _require_range(_all_labels(data, labels), scores.shape[place], field)


def _all_labels(data: Any, first: Tensor) -> Tensor:
    """All labels if they lie in memory as they are, else those of the first batch."""
    if isinstance(data, ImageFolder):
        return data.labels
    if isinstance(data, InMemory) and data.prepare is not None:
        return first
    if isinstance(data, TensorDataset):
        return data.tensors[-1]
    return torch.as_tensor(data[1]) if isinstance(data, tuple | list) else first


def _require_kind(labels: Tensor, shape: tuple[int, ...], field: str) -> None:
    """One whole number for each that is to be classified, as torch's cross-entropy wants it."""
    got = f"{labels.dtype} of shape {tuple(labels.shape[1:])}"
    rule = "have a whole number per sample as label: one_hot.argmax(1) makes one of each row"
    require(not labels.is_floating_point() and labels.shape == shape, field, rule, got)
    require(labels.dtype in LABELS, field, "have labels of torch.int64: labels.long()", got)


def _require_range(labels: Tensor, classes: int, field: str) -> None:
    rule = f"have labels between 0 and {classes - 1}"
    wrong = ((labels < 0) & (labels != IGNORED)) | (labels >= classes)
    if wrong.any():
        place = int(wrong.flatten().nonzero()[0])
        raise InvalidField(
            f"{field!r} must {rule} (got {int(labels.flatten()[place])} at place {place})"
        )
