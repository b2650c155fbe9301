"""The tasks that come with the library, each with the optimizer, schedule and batch of the paper
that it is from.

Where a paper leaves something open, the comment says what was chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from flockstep.data import CIFAR10_PIXELS, InMemory, Normalized, find_dataset
from flockstep.models import (
    GPT,
    MLP,
    AlexNet,
    Cifar10Full,
    DenseNet40,
    DigitsCNN,
    GoogLeNetV2,
    LeNet,
    LeNet5,
    ResNet18,
    ResNet20,
    ResNet50,
    RowLSTM,
)
from flockstep.optimizers import OptimizerSpec
from flockstep.schedules import (
    Cosine,
    Polynomial,
    Schedule,
    StepDecay,
    Warmup,
)
from flockstep.tasks import gradient_noise
from flockstep.tasks.task import (
    Task,
    classification_accuracy,
    classification_loss,
    find_task,
    token_loss,
)

VALIDATION = 5_000
THESIS_TRAINING = 45_000
PICTURES_AT_ONCE = 64  # of 224×224 in evaluation: the maps of a thousand would take 10 GB


def _train(name: str) -> Any:
    return find_dataset(name).load()[0]


def _test(name: str) -> Any:
    return find_dataset(name).load()[1]


def _plain(name: str) -> Any:
    return _train(name).without_augmentation()


def _without_validation(name: str) -> Any:
    train = _train(name)
    return train.first(len(train) - VALIDATION)


def _first(count: int, name: str) -> Any:
    return _train(name).first(count)


def _validation(name: str) -> Any:
    train = _train(name)
    return train.last(VALIDATION)


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


def _plain_data(name: str) -> dict[str, Any]:
    return _data(name) | {"train": functools.partial(_plain, name)}


def _cifar10_full(name: str, batch: int, optimizer: OptimizerSpec, warmup_epochs: int = 0) -> Task:
    """A row of the second table of Wongpanich et al. (2020): 140 epochs, linear decay."""
    decay = Polynomial(power=1)
    return _classifier(
        name,
        Cifar10Full,
        optimizer,
        train=functools.partial(_raw, _train, "cifar10"),
        test=functools.partial(_raw, _test, "cifar10"),
        data="cifar10",
        global_batch=batch,
        epochs=140,
        schedule=Warmup(warmup_epochs) * decay if warmup_epochs else decay,
    )


_full_sgd = functools.partial(OptimizerSpec, "sgd", momentum=0.9, weight_decay=0.004)
_full_lars = functools.partial(OptimizerSpec, "lars", momentum=0.9, weight_decay=0.004, trust=0.01)


def _cifar10_densenet40(name: str, batch: int, lr: float, warmup_epochs: int = 0) -> Task:
    """A row of Wongpanich et al. (2020): not augmented, ÷10 at epochs 145 and 220 of 290."""
    decay: Schedule = StepDecay(at=(145 / 290, 220 / 290))
    return _classifier(
        name,
        DenseNet40,
        OptimizerSpec("sgd", lr=lr, momentum=0.9, weight_decay=1e-4),
        **_plain_data("cifar10"),
        global_batch=batch,
        epochs=290,
        schedule=Warmup(warmup_epochs) * decay if warmup_epochs else decay,
    )


def _digits(name: str, model: Callable[[], nn.Module]) -> Task:
    return _classifier(
        name,
        model,
        OptimizerSpec("sgd", lr=0.05, momentum=0.9),
        **_data("digits"),
        batch_size=16,
        epochs=10,
    )


def _of_equal_size(name: str, widths: tuple[int, ...], data: str, batch: int) -> Task:
    """One of a deep and a wide net, which are trained alike; from an initialisation that lets deep
    ones learn at once, and at a rate at which both do.
    """
    return _classifier(
        name,
        functools.partial(MLP, *widths, initialisation="he"),
        OptimizerSpec("sgd", lr=0.02, momentum=0.9),
        **_data(data),
        batch_size=batch,
        epochs=10,
    )


TASKS: dict[str, Task] = {
    each.name: each
    for each in (
        _digits("digits-mlp", functools.partial(MLP, 64, 128, 10)),
        _digits("digits-cnn", DigitsCNN),
        # Deep against wide nets of equal size, as in the first figure of Wongpanich et al. (2020),
        # which shows others' nets; these, and how they are trained, are ours. 19,150 and 19,210
        # parameters, then 406,090 and 407,050.
        _of_equal_size("digits-deep", (64, 60, 60, 60, 60, 60, 10), "digits", batch=16),
        _of_equal_size("digits-wide", (64, 256, 10), "digits", batch=16),
        _of_equal_size("mnist-deep", (784, 216, 216, 216, 216, 216, 216, 10), "mnist", batch=64),
        _of_equal_size("mnist-wide", (784, 512, 10), "mnist", batch=64),
        _classifier(  # Ye et al. (2020), PSO-PS; Adam's rate is not given: its usual one
            "mnist-lenet",
            LeNet,
            OptimizerSpec("adam", lr=1e-3),
            **_data("mnist"),
            batch_size=256,
            epochs=25,
        ),
        # Wongpanich et al. (2020): Adam and the batch of all workers are given, rates and schedules
        # are not. Chosen: for the large batch a higher rate, warmed up and falling; for that of
        # their baseline Adam's usual one.
        _classifier(
            "mnist-lstm",
            RowLSTM,
            OptimizerSpec("adam", lr=5e-3),
            **_data("mnist"),
            global_batch=8192,
            epochs=50,
            schedule=Warmup(epochs=2) * Polynomial(),
        ),
        _classifier(
            "mnist-lstm-256",
            RowLSTM,
            OptimizerSpec("adam", lr=1e-3),
            **_data("mnist"),
            global_batch=256,
            epochs=50,
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
        # What Håland and Birkeland (2020) do with cifar10-resnet20, below, with a net and pictures
        # of which two cores train a hundred times as many: the numbers of samples, the batch, the
        # rates and batch normalisation are theirs.
        _classifier(
            "fashion-mlp",
            functools.partial(MLP, 784, 64, 10, initialisation="he", batch_norm=True),
            OptimizerSpec("sgd", lr=0.1, momentum=0.9, weight_decay=1e-4),
            train=functools.partial(_first, THESIS_TRAINING, "fashion-mnist"),
            validation=functools.partial(_validation, "fashion-mnist"),
            test=functools.partial(_test, "fashion-mnist"),
            data="fashion-mnist",
            global_batch=128,
            epochs=32,
            schedule=StepDecay(at=(0.5, 0.75)),
        ),
        # The second table of Wongpanich et al. (2020), smallest batch first, whose rate is Caffe's.
        # Caffe has a higher rate for biases and a stronger decay in the last layer, which the paper
        # does not mention. It says that it used LARS, not in which rows, nor with what trust
        # coefficient. Chosen: from 2 K on, where rates grow faster than the batch and warm up;
        # trust 0.01, since with the usual 0.001 these rates hardly move the network. Ramps start at
        # 0, which is not said either. 1 K is 1,000, as the rates of the first two rows say.
        _cifar10_full("cifar10-full", 100, _full_sgd(lr=0.001)),
        _cifar10_full("cifar10-full-1k", 1_000, _full_sgd(lr=0.010)),
        _cifar10_full("cifar10-full-2k", 2_000, _full_lars(lr=0.081), warmup_epochs=7),
        _cifar10_full("cifar10-full-5k", 5_000, _full_lars(lr=0.218), warmup_epochs=17),
        _cifar10_full("cifar10-full-8k", 8_000, _full_lars(lr=0.450), warmup_epochs=6),
        _cifar10_full("cifar10-full-8k-ea-wild", 8_000, _full_lars(lr=0.420), warmup_epochs=6),
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
        # Ye et al. (2020), PSO-PS. They do not say whether 256 is the batch of one worker (chosen),
        # nor Adam's rate (chosen: its usual one), nor anything of augmentation (chosen: as usual).
        _classifier(
            "cifar10-resnet18-adam",
            ResNet18,
            OptimizerSpec("adam", lr=1e-3),
            **_data("cifar10"),
            batch_size=256,
            epochs=30,
        ),
        # Wongpanich et al. (2020). That ramps start at 0 is chosen, and that 1 K is 1,024, which
        # their 16 machines share evenly. The last row is that of EAWild.
        _cifar10_densenet40("cifar10-densenet40", 1024, lr=0.8, warmup_epochs=15),
        _cifar10_densenet40("cifar10-densenet40-64", 64, lr=0.1),
        _cifar10_densenet40("cifar10-densenet40-ea-wild", 1024, lr=1.0, warmup_epochs=15),
        _classifier(  # Huang et al. (2017), whose network it is
            "cifar10-densenet40-huang",
            DenseNet40,
            OptimizerSpec("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
            **_data("cifar10"),
            global_batch=64,
            epochs=300,
            schedule=StepDecay(at=(0.5, 0.75)),
        ),
        # Goyal et al. (2017), whose bottlenecks stride in the convolution of 3×3; here as first
        # published, which is what Wongpanich et al. (2020) count. Their weight decay is 1e-4 in the
        # text and 2e-4 in the caption.
        _classifier(
            "imagenet-resnet50",
            ResNet50,
            OptimizerSpec("sgd", lr=0.1, momentum=0.9, weight_decay=1e-4),
            **_data("imagenet"),
            global_batch=256,
            epochs=90,
            schedule=StepDecay(at=(30 / 90, 60 / 90, 80 / 90)),
            evaluation_batch=PICTURES_AT_ONCE,
        ),
        # Wongpanich et al. (2020), their synchronous row, not augmented. That 1 K is 1,024 is
        # chosen: their 64 workers share it evenly.
        _classifier(
            "imagenet-googlenet-v2",
            GoogLeNetV2,
            OptimizerSpec("sgd", lr=0.12, momentum=0.9, weight_decay=2e-4),
            **_plain_data("imagenet"),
            global_batch=1024,
            epochs=72,
            schedule=Polynomial(power=0.5),
            evaluation_batch=PICTURES_AT_ONCE,
        ),
        # Krizhevsky et al. (2012), who drop the rate three times, when the error stops falling.
        # Chosen: at quarters; the augmentation of the other two; and one graphics card for all
        # maps, the form whose ratio explains what Wongpanich et al. (2020) give.
        _classifier(
            "imagenet-alexnet",
            functools.partial(AlexNet, groups=1),
            OptimizerSpec("sgd", lr=0.01, momentum=0.9, weight_decay=5e-4),
            **_data("imagenet"),
            global_batch=128,
            epochs=90,
            schedule=StepDecay(at=(0.25, 0.5, 0.75)),
            evaluation_batch=PICTURES_AT_ONCE,
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
        # For the theory of Isakov and Kinsy (2018): every gradient is noise of deviation 1.
        Task(
            "gradient-noise",
            gradient_noise.Walker,
            OptimizerSpec("sgd", lr=1.0),
            loss=gradient_noise.product,
            metric=gradient_noise.distance_from_start,
            train=functools.partial(gradient_noise.noise, gradient_noise.TRAIN),
            test=functools.partial(gradient_noise.noise, gradient_noise.TEST),
            batch_size=1,
            epochs=1,
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
