"""The tasks that come with the library, each with the optimizer, schedule and batch of the paper
that it is from.

Where a paper leaves something open, the comment says what was chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flockstep.data import CIFAR10_PIXELS, InMemory, Normalized, find_dataset
from flockstep.models import (
    GPT,
    MLP,
    Cifar10Full,
    DenseNet40,
    DigitsCNN,
    LeNet,
    LeNet5,
    ResNet18,
    ResNet20,
    RowLSTM,
)
from flockstep.optimizers import OptimizerSpec
from flockstep.schedules import (
    Cosine,
    Polynomial,
    StepDecay,
    Warmup,
)
from flockstep.tasks.task import (
    Task,
    classification_accuracy,
    classification_loss,
    find_task,
    token_loss,
)

CIFAR10_VALIDATION = 5_000


def _train(name: str) -> Any:
    return find_dataset(name).load()[0]


def _test(name: str) -> Any:
    return find_dataset(name).load()[1]


def _without_validation(name: str) -> Any:
    train = _train(name)
    return train.first(len(train) - CIFAR10_VALIDATION)


def _validation(name: str) -> Any:
    train = _train(name)
    return train.last(CIFAR10_VALIDATION)


def _raw(load: Callable[[str], Any], name: str) -> Any:
    """Pixels of 0 to 255 less their mean, not augmented: what Caffe's networks are initialised
    for.
    """
    raw = Normalized(CIFAR10_PIXELS.mean, std=(1 / 255,) * 3)
    return InMemory(*load(name).tensors, prepare=raw)


_classifier = functools.partial(Task, loss=classification_loss, metric=classification_accuracy)


def _data(name: str) -> dict[str, Any]:
    return {
        "train": functools.partial(_train, name),
        "test": functools.partial(_test, name),
        "data": name,
    }


TASKS: dict[str, Task] = {
    each.name: each
    for each in (
        _classifier(
            "digits-mlp",
            functools.partial(MLP, 64, 128, 10),
            OptimizerSpec("sgd", lr=0.05, momentum=0.9),
            **_data("digits"),
            batch_size=16,
            epochs=10,
        ),
        _classifier(
            "digits-cnn",
            DigitsCNN,
            OptimizerSpec("sgd", lr=0.05, momentum=0.9),
            **_data("digits"),
            batch_size=16,
            epochs=10,
        ),
        _classifier(  # Ye et al. (2020), PSO-PS; Adam's rate is not given: its usual one
            "mnist-lenet",
            LeNet,
            OptimizerSpec("adam", lr=1e-3),
            **_data("mnist"),
            batch_size=256,
            epochs=25,
        ),
        _classifier(  # Wongpanich et al. (2020); optimizer and rate are not given: Adam, warmed up
            "mnist-lstm",
            RowLSTM,
            OptimizerSpec("adam", lr=5e-3),
            **_data("mnist"),
            global_batch=8192,
            epochs=50,
            schedule=Warmup(epochs=2) * Polynomial(),
        ),
        # LeCun et al. (1998), the network; the rest as in Caffe's LeNet, with a polynomial decay.
        _classifier(
            "fashion-lenet",
            LeNet5,
            OptimizerSpec("sgd", lr=0.01, momentum=0.9, weight_decay=5e-4),
            **_data("fashion-mnist"),
            global_batch=64,
            epochs=10,
            schedule=Polynomial(),
        ),
        # Wongpanich et al. (2020), their smallest batch; the rate is Caffe's. Caffe has a higher
        # rate for biases and a stronger decay in the last layer, which the paper does not mention.
        _classifier(
            "cifar10-full",
            Cifar10Full,
            OptimizerSpec("sgd", lr=0.001, momentum=0.9, weight_decay=0.004),
            train=functools.partial(_raw, _train, "cifar10"),
            test=functools.partial(_raw, _test, "cifar10"),
            data="cifar10",
            global_batch=100,
            epochs=140,
            schedule=Polynomial(power=1),
        ),
        # Håland and Birkeland (2020): 45,000 samples to train, 5,000 to validate, 64,000 steps.
        _classifier(
            "cifar10-resnet20",
            ResNet20,
            OptimizerSpec("sgd", lr=0.1, momentum=0.9, weight_decay=1e-4),
            **_data("cifar10") | {"train": functools.partial(_without_validation, "cifar10")},
            validation=functools.partial(_validation, "cifar10"),
            global_batch=128,
            epochs=182,
            schedule=StepDecay(at=(0.5, 0.75)),
        ),
        _classifier(  # Isakov and Kinsy (2018), NoSync; every worker has this batch
            "cifar10-resnet18",
            ResNet18,
            OptimizerSpec("sgd", lr=0.1, momentum=0.9),
            **_data("cifar10"),
            batch_size=512,
            epochs=30,
        ),
        _classifier(  # Huang et al. (2017)
            "cifar10-densenet40",
            DenseNet40,
            OptimizerSpec("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
            **_data("cifar10"),
            global_batch=64,
            epochs=300,
            schedule=StepDecay(at=(0.5, 0.75)),
        ),
        # nanoGPT's settings for a CPU: 2,000 steps of 12 sequences, 100 of them to warm up.
        Task(
            "shakespeare-gpt",
            GPT,
            OptimizerSpec("adamw_on_matrices", lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
            loss=token_loss,
            metric=classification_accuracy,
            **_data("tinyshakespeare"),
            global_batch=12,
            epochs=2,
            schedule=Warmup(epochs=0.08) * Cosine(end=0.1),
        ),
    )
}


def task(name: str) -> Task:
    """A built-in task by name, or the one behind `package.module:task`.

    Example:
        task = fs.task("fashion-lenet")
        optimizer = task.optimizer(task.model().parameters())
    """
    return find_task(name, TASKS)
