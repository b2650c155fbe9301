"""The tasks that come with the library: their published settings, and that each of them trains."""

from __future__ import annotations

import dataclasses
import math
import re

import cloudpickle
import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, AdamW

import flockstep as fs
from flockstep.data.datasets import DATASETS, find_dataset
from flockstep.data.normalisation import CIFAR10_PIXELS
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
AT_145_AND_220 = fs.StepDecay(at=(145 / 290, 220 / 290), gamma=0.1)
LINEAR = fs.Polynomial(power=1)


def momentum(lr, weight_decay=0.0):
    return {"lr": lr, "momentum": 0.9, "weight_decay": weight_decay}


PUBLISHED = {
    "digits-mlp": Published(SGD, momentum(0.05), 16, 10, is_global=False),
    "digits-cnn": Published(SGD, momentum(0.05), 16, 10, is_global=False),
    "digits-deep": Published(SGD, momentum(0.02), 16, 10, is_global=False),
    "digits-wide": Published(SGD, momentum(0.02), 16, 10, is_global=False),
    "mnist-deep": Published(SGD, momentum(0.02), 64, 10, is_global=False),
    "mnist-wide": Published(SGD, momentum(0.02), 64, 10, is_global=False),
    "mnist-lenet": Published(Adam, {"lr": 1e-3}, 256, 25, is_global=False),
    "mnist-lstm": Published(Adam, {"lr": 5e-3}, 8192, 50, fs.Warmup(2) * fs.Polynomial()),
    "mnist-lstm-256": Published(Adam, {"lr": 1e-3}, 256, 50),
    "fashion-lenet": Published(SGD, momentum(0.01, 5e-4), 64, 10, fs.Polynomial()),
    "fashion-mlp": Published(SGD, momentum(0.1, 1e-4), 128, 32, HALF_AND_THREE_QUARTERS),
    "cifar10-full": Published(SGD, momentum(0.001, 0.004), 100, 140, LINEAR),
    "cifar10-full-1k": Published(SGD, momentum(0.010, 0.004), 1000, 140, LINEAR),
    "cifar10-full-2k": Published(fs.LARS, momentum(0.081, 0.004), 2000, 140, fs.Warmup(7) * LINEAR),
    "cifar10-full-5k": Published(
        fs.LARS, momentum(0.218, 0.004), 5000, 140, fs.Warmup(17) * LINEAR
    ),
    "cifar10-full-8k": Published(fs.LARS, momentum(0.450, 0.004), 8000, 140, fs.Warmup(6) * LINEAR),
    "cifar10-full-8k-ea-wild": Published(
        fs.LARS, momentum(0.420, 0.004), 8000, 140, fs.Warmup(6) * LINEAR
    ),
    "cifar10-resnet20": Published(SGD, momentum(0.1, 1e-4), 128, 182, HALF_AND_THREE_QUARTERS),
    "cifar10-resnet18": Published(SGD, momentum(0.1), 512, 30, is_global=False),
    "cifar10-resnet18-adam": Published(
        Adam, {"lr": 1e-3, "weight_decay": 0}, 256, 30, is_global=False
    ),
    "cifar10-densenet40": Published(
        SGD, momentum(0.8, 1e-4) | {"nesterov": False}, 1024, 290, fs.Warmup(15) * AT_145_AND_220
    ),
    "cifar10-densenet40-64": Published(
        SGD, momentum(0.1, 1e-4) | {"nesterov": False}, 64, 290, AT_145_AND_220
    ),
    "cifar10-densenet40-ea-wild": Published(
        SGD, momentum(1.0, 1e-4) | {"nesterov": False}, 1024, 290, fs.Warmup(15) * AT_145_AND_220
    ),
    "cifar10-densenet40-huang": Published(
        SGD, momentum(0.1, 1e-4) | {"nesterov": True}, 64, 300, HALF_AND_THREE_QUARTERS
    ),
    "imagenet-resnet50": Published(
        SGD, momentum(0.1, 1e-4), 256, 90, fs.StepDecay(at=(30 / 90, 60 / 90, 80 / 90))
    ),
    "imagenet-googlenet-v2": Published(
        SGD, momentum(0.12, 2e-4), 1024, 72, fs.Polynomial(power=0.5)
    ),
    "imagenet-alexnet": Published(
        SGD, momentum(0.01, 5e-4), 128, 90, fs.StepDecay(at=(0.25, 0.5, 0.75))
    ),
    "shakespeare-gpt": Published(
        AdamW,
        {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
        12,
        2,
        fs.Warmup(0.08) * fs.Cosine(end=0.1),
    ),
    "gradient-noise": Published(SGD, {"lr": 1.0}, 1, 1, is_global=False),
}
# Other rows of a table: the same network as one that is tried below, and nothing new but numbers.
SAME_NETWORK = {
    "mnist-lstm-256", "cifar10-full-1k", "cifar10-full-5k", "cifar10-full-8k",
    "cifar10-full-8k-ea-wild", "cifar10-resnet18-adam", "cifar10-densenet40-64",
    "cifar10-densenet40-ea-wild", "cifar10-densenet40-huang",
}  # fmt: skip
# 62 million parameters: one step of AlexNet is in tests/models/test_imagenet_models.py. What is
# noise alone learns nothing: it has a test of its own.
ELSEWHERE = {"imagenet-alexnet", "gradient-noise"}
TRIED = [name for name in TASKS if name not in SAME_NETWORK | ELSEWHERE]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_its_published_settings(name):
    task, published = TASKS[name], PUBLISHED[name]
    with torch.device("meta"):
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


@pytest.mark.parametrize(
    ("name", "epoch", "rate"),
    [
        ("cifar10-densenet40", 0, 0),
        ("cifar10-densenet40", 7.5, 0.4),
        ("cifar10-densenet40", 15, 0.8),
        ("cifar10-densenet40", 144.9, 0.8),
        ("cifar10-densenet40", 145, 0.08),
        ("cifar10-densenet40", 220, 0.008),
        ("cifar10-densenet40-ea-wild", 100, 1.0),
        ("cifar10-densenet40-64", 0, 0.1),
        ("cifar10-full-2k", 3.5, 0.081 * 0.5 * (1 - 3.5 / 140)),
        ("cifar10-full-8k", 70, 0.225),
        ("imagenet-resnet50", 29.9, 0.1),
        ("imagenet-resnet50", 30, 0.01),
        ("imagenet-resnet50", 80, 1e-4),
        ("imagenet-googlenet-v2", 54, 0.06),
    ],
)
def test_rates_are_those_of_the_paper_at_its_epochs(name, epoch, rate):
    task = TASKS[name]
    step, steps = round(epoch * 1000), task.epochs * 1000
    progress = fs.Progress(step=step, total_steps=steps, epoch=epoch)
    peak = dict(task.optimizer.fields)["lr"]
    assert peak * task.schedule.factor(progress) == pytest.approx(rate)


def test_an_explicit_trust_stands_where_the_large_rates_would_hardly_move_a_network():
    """A step changes a layer by ητ of its norm, and momentum makes ten of one. The first layer of
    cifar10-full starts a hundred times smaller than the others: with τ = 0.001 all 3,500 steps of
    2 K could not make it five times as large.
    """
    task = TASKS["cifar10-full-2k"]
    fields = dict(task.optimizer.fields)
    steps = 140 * 50_000 // task.global_batch
    growth = 10 * fields["lr"] * steps / 2  # the mean rate of a linear decay is half the first
    assert math.exp(growth * 0.001) < 5
    assert math.exp(growth * fields["trust"]) > 100


@pytest.mark.parametrize(
    ("deep", "wide"), [("digits-deep", "digits-wide"), ("mnist-deep", "mnist-wide")]
)
def test_a_deep_and_a_wide_net_have_equal_numbers_of_parameters(deep, wide):
    sizes = {}
    for name in (deep, wide):
        with torch.device("meta"):
            model = TASKS[name].model()
        layers = sum(isinstance(layer, torch.nn.Linear) for layer in model.modules())
        sizes[name] = (fs.models.count_parameters(model), layers)
    assert sizes[deep][0] == pytest.approx(sizes[wide][0], rel=0.005)
    assert sizes[deep][1] >= 3 * sizes[wide][1]
    settings = ("optimizer", "schedule", "batch_size", "epochs", "data")
    for setting in settings:
        assert getattr(TASKS[deep], setting) == getattr(TASKS[wide], setting)


@pytest.mark.parametrize("name", ["digits-deep", "digits-wide"])
def test_deep_and_wide_nets_learn_the_digits(name):
    result = fs.run(name, fs.SyncSGD(), workers=1, epochs=3)
    assert result.metrics["test_accuracy"] > 0.8


def made_up(name, samples=8):
    """The task with samples at random that look like its data, but for pictures, which are
    small.
    """
    task = TASKS[name]
    data = find_dataset(task.data)
    generator = torch.Generator().manual_seed(0)
    example = data.example(samples)
    if data.name == "imagenet":
        example = example[:, :, :32, :32]
    if example.is_floating_point():
        x, y = torch.randn(example.shape, generator=generator), torch.arange(samples) % data.classes
    else:
        x = torch.randint(data.classes, example.shape, generator=generator)
        y = x.roll(-1, dims=1)
    return dataclasses.replace(task, train=(x, y), test=(x[:2], y[:2]), validation=None)


@pytest.mark.parametrize("name", TRIED)
def test_every_task_trains_on_two_workers(name):
    result = fs.run(made_up(name), fs.LocalSGD(period=2), workers=2, epochs=1, batch_size=2)
    assert result.metrics["steps"] == 2
    assert 0 <= result.metrics["test_accuracy"] <= 1
    assert all(torch.isfinite(replica).all() for replica in result.replicas)
    assert len({float(replica.sum()) for replica in result.replicas}) == 1  # just averaged


def test_parameters_under_noise_alone_walk_as_far_as_the_root_of_the_steps():
    result = fs.run("gradient-noise", fs.SyncSGD(), workers=1, steps=25)
    assert result.metrics["test_accuracy"] == pytest.approx(25**0.5, rel=0.1)


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
        ("cifar10-densenet40-huang", 50_000, 10_000),
        ("cifar10-full-2k", 50_000, 10_000),
        ("cifar10-resnet18-adam", 50_000, 10_000),
        ("mnist-deep", 60_000, 10_000),
        ("shakespeare-gpt", 15_685, 1_742),
    ],
)
def test_a_task_has_its_data(name, train, test):
    task = loaded(name)
    assert (len(task.train), len(task.test)) == (train, test)
    task.check()
    is_augmented = "resnet" in name or name.endswith("huang")
    assert (getattr(task.train, "augment", None) is not None) == is_augmented
    assert getattr(task.test, "augment", None) is None


@pytest.mark.parametrize(
    ("name", "is_augmented"),
    [
        ("cifar10-resnet18-adam", True),
        ("cifar10-densenet40-huang", True),
        ("cifar10-densenet40", False),
        ("cifar10-densenet40-64", False),
        ("cifar10-densenet40-ea-wild", False),
        ("cifar10-full-8k", False),
    ],
)
def test_photographs_are_augmented_where_the_paper_does(monkeypatch, name, is_augmented):
    images = torch.arange(8 * 3 * 32 * 32).view(8, 3, 32, 32).to(torch.uint8)
    train = fs.InMemory(images, torch.arange(8), prepare=CIFAR10_PIXELS, augment=fs.PadCropFlip())
    test = fs.InMemory(images, torch.arange(8), prepare=CIFAR10_PIXELS)
    made_up = dataclasses.replace(DATASETS["cifar10"], load=lambda: (train, test))
    monkeypatch.setitem(DATASETS, "cifar10", made_up)
    task = TASKS[name].loaded()
    index = torch.arange(8)
    changed = task.train.batch(index, np.random.default_rng(0))[0]
    assert torch.equal(changed, task.train.batch(index)[0]) != is_augmented
    assert torch.equal(task.test.batch(index)[0], task.train.batch(index)[0])


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
        ("mnist-deep", 1000, {"epochs": 2, "batch_size": 10}, 0.6),
        ("mnist-wide", 1000, {"epochs": 2, "batch_size": 10}, 0.6),
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


def test_a_run_on_the_first_samples_knows_no_others():
    task = fs.task("digits-mlp").with_first_samples(100).loaded()
    assert len(task.train) == 100
    _, labels = fs.dataset("digits")[0].tensors
    assert [int(label) for _, label in task.train] == labels[:100].tolist()
    spec = fs.RunSpec("digits-mlp", fs.SyncSGD(), workers=2, epochs=3, train_samples=100)
    assert fs.run(spec).metrics["samples"] == 300
    assert spec.id != spec.replace(train_samples=None).id
    held = spec.replace(validation=0.2)
    assert fs.run(held).metrics["samples"] == 240


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "'train_samples' must be at least 1 (got 0)"),
        (1438, "'train_samples' must be at most the number of them, 1437 (got 1438)"),
    ],
)
def test_so_many_first_samples_must_be_there(count, message):
    with pytest.raises(fs.InvalidField, match=re.escape(message)):
        fs.run("digits-mlp", fs.SyncSGD(), workers=2, steps=1, train_samples=count)


def test_the_small_net_of_the_thesis_has_its_numbers_of_samples():
    model = fs.task("fashion-mlp").make_model()
    weights = [parameter.numel() for parameter in model.parameters()]
    assert sum(weights) == 784 * 64 + 64 + 2 * 64 + 64 * 10 + 10
    assert model.training
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
