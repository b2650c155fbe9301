"""The tasks that come with the library: their published settings, and that each of them trains."""

from __future__ import annotations

import dataclasses

import cloudpickle
import pytest
import torch
from torch.optim import SGD, Adam, AdamW

import flockstep as fs
from flockstep.data.datasets import find_dataset
from flockstep.tasks.builtin import TASKS


@dataclasses.dataclass(frozen=True)
class Published:
    """What the papers and the settings they build on say."""

    optimizer: type
    settings: dict[str, object]
    batch: int
    epochs: int
    schedule: fs.Schedule | None = None
    is_global: bool = True


HALF_AND_THREE_QUARTERS = fs.StepDecay(at=(0.5, 0.75), gamma=0.1)
PUBLISHED = {
    "digits-mlp": Published(SGD, {"lr": 0.05, "momentum": 0.9}, 16, 10, is_global=False),
    "digits-cnn": Published(SGD, {"lr": 0.05, "momentum": 0.9}, 16, 10, is_global=False),
    "mnist-lenet": Published(Adam, {"lr": 1e-3}, 256, 25, is_global=False),
    "mnist-lstm": Published(Adam, {"lr": 5e-3}, 8192, 50, fs.Warmup(2) * fs.Polynomial()),
    "fashion-lenet": Published(
        SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}, 64, 10, fs.Polynomial()
    ),
    "cifar10-full": Published(
        SGD, {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.004}, 100, 140, fs.Polynomial(power=1)
    ),
    "cifar10-resnet20": Published(
        SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}, 128, 182, HALF_AND_THREE_QUARTERS
    ),
    "cifar10-resnet18": Published(SGD, {"lr": 0.1, "momentum": 0.9}, 512, 30, is_global=False),
    "cifar10-densenet40": Published(
        SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
        64,
        300,
        HALF_AND_THREE_QUARTERS,
    ),
    "shakespeare-gpt": Published(
        AdamW,
        {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
        12,
        2,
        fs.Warmup(0.08) * fs.Cosine(end=0.1),
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_its_published_settings(name):
    task, published = TASKS[name], PUBLISHED[name]
    optimizer = task.optimizer(task.model().parameters())
    assert type(optimizer) is published.optimizer
    assert {key: optimizer.param_groups[0][key] for key in published.settings} == published.settings
    assert (task.global_batch if published.is_global else task.batch_size) == published.batch
    assert (task.global_batch is None) != published.is_global
    assert (task.epochs, task.schedule) == (published.epochs, published.schedule)


def test_cifar10_resnet20_validates_on_the_5_000_samples_that_its_paper_held_out():
    task = loaded("cifar10-resnet20")
    whole = find_dataset("cifar10").load()[0]
    assert (len(task.train), len(task.validation), len(task.test)) == (45_000, 5_000, 10_000)
    assert torch.equal(task.validation.tensors[0], whole.tensors[0][45_000:])
    assert torch.equal(task.train.tensors[0], whole.tensors[0][:45_000])


def test_sixty_four_thousand_steps_of_128_are_182_epochs_of_45_000_samples():
    steps = TASKS["cifar10-resnet20"].epochs * -(-45_000 // 128)
    assert steps == pytest.approx(64_000, rel=0.002)


def made_up(name, samples=8):
    """The task with samples at random that look like its data."""
    task = TASKS[name]
    data = find_dataset(task.data)
    generator = torch.Generator().manual_seed(0)
    example = data.example(samples)
    if example.is_floating_point():
        x, y = torch.randn(example.shape, generator=generator), torch.arange(samples) % data.classes
    else:
        x = torch.randint(data.classes, example.shape, generator=generator)
        y = x.roll(-1, dims=1)
    return dataclasses.replace(task, train=(x, y), test=(x[:2], y[:2]), validation=None)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_on_two_workers(name):
    result = fs.run(made_up(name), fs.LocalSGD(period=2), workers=2, epochs=1, batch_size=2)
    assert result.metrics["steps"] == 2
    assert 0 <= result.metrics["test_accuracy"] <= 1
    assert all(torch.isfinite(replica).all() for replica in result.replicas)
    assert len({float(replica.sum()) for replica in result.replicas}) == 1  # just averaged


@pytest.mark.parametrize("name", TASKS)
def test_every_task_can_be_sent_to_a_worker(name):
    task = cloudpickle.loads(cloudpickle.dumps(TASKS[name]))
    assert (task.name, task.schedule) == (name, TASKS[name].schedule)


def loaded(name):
    task = TASKS[name]
    if not find_dataset(task.data).is_there():
        pytest.skip(f"data set {task.data!r} is not there: set FLOCKSTEP_DATA, or fetch it")
    return task.loaded()


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("digits-mlp", 1437, 360),
        ("digits-cnn", 1437, 360),
        ("mnist-lenet", 60_000, 10_000),
        ("mnist-lstm", 60_000, 10_000),
        ("fashion-lenet", 60_000, 10_000),
        ("cifar10-full", 50_000, 10_000),
        ("cifar10-resnet20", 45_000, 10_000),
        ("cifar10-resnet18", 50_000, 10_000),
        ("cifar10-densenet40", 50_000, 10_000),
        ("shakespeare-gpt", 15_685, 1_742),
    ],
)
def test_a_task_has_its_data(name, train, test):
    task = loaded(name)
    assert (len(task.train), len(task.test)) == (train, test)
    task.check()
    is_augmented = name.startswith("cifar10") and name != "cifar10-full"
    assert (getattr(task.train, "augment", None) is not None) == is_augmented
    assert getattr(task.test, "augment", None) is None


def part_of(task, train, test):
    """Few samples, to be quick."""
    validation = task.validation and task.validation.first(test)
    return dataclasses.replace(
        task, train=task.train.first(train), test=task.test.first(test), validation=validation
    )


@pytest.mark.parametrize(
    ("name", "samples", "settings", "accuracy"),
    [
        ("mnist-lenet", 1000, {"epochs": 2, "batch_size": 20}, 0.6),
        ("mnist-lstm", 1000, {"epochs": 6, "batch_size": 50}, 0.3),
        ("fashion-lenet", 1000, {"epochs": 4, "batch_size": 5}, 0.4),
        ("shakespeare-gpt", 160, {"epochs": 3, "batch_size": 8}, 0.15),  # spaces alone are 0.15
    ],
)
def test_real_data_are_learnt(name, samples, settings, accuracy):
    task = part_of(loaded(name), samples, 300 if name != "shakespeare-gpt" else 40)
    result = fs.run(task, fs.SyncSGD(), workers=2, **settings)
    assert result.metrics["test_accuracy"] > accuracy


def test_the_convolutional_digits_are_learnt():
    assert (
        fs.run("digits-cnn", fs.LocalSGD(period=4), workers=2, epochs=3).metrics["test_accuracy"]
        > 0.85
    )


def test_augmented_photographs_train_on_real_processes_as_in_the_simulator(local):
    task = part_of(loaded("cifar10-resnet20"), 64, 32)
    runs = [
        fs.run(task, fs.SyncSGD(), workers=2, backend=place, epochs=1, batch_size=8, progress=False)
        for place in ("sim", local)
    ]
    assert torch.equal(runs[0].replicas[0], runs[1].replicas[0])
