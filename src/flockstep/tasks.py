"""The tasks that come with the library."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flockstep.data.datasets import digits
from flockstep.models import MLP
from flockstep.task import Task, classification_accuracy, classification_loss


def _digits_mlp() -> nn.Module:
    return MLP(64, 128, 10)


def _sgd_with_momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _digits_train() -> TensorDataset:
    return digits()[0]


def _digits_test() -> TensorDataset:
    return digits()[1]


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="digits-mlp",
            model=_digits_mlp,
            optimizer=_sgd_with_momentum,
            loss=classification_loss,
            train=_digits_train,
            test=_digits_test,
            metric=classification_accuracy,
            batch_size=16,
            epochs=10,
        ),
    )
}
