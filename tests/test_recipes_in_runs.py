"""Schedules, batches, orders and assignments in whole runs, with any strategy."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from tests.strategies.table import TABLE
from torch import nn
from torch.utils.data import IterableDataset

import flockstep as fs

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
SCHEDULE = fs.LinearScaling(4, warmup_epochs=1) * fs.StepDecay(at=(0.5,), gamma=0.1)
FACTORS = [1, 2.5, 0.4, 0.4]  # four steps, two an epoch


def watched(strategy, optimizer, schedule=SCHEDULE):
    """A program whose worker tells the learning rate of every step."""

    def program(comm):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        worker = fs.Worker(comm, model, optimizer(model.parameters()), strategy, schedule)
        rates = []
        for x, y in worker.batches((X, Y), 24 // comm.size, epochs=2):
            loss = worker.adjust_loss(nn.functional.cross_entropy(model(x), y), (x, y))
            loss.backward()
            worker.step(loss, accuracy=0.5)
            rates.append([group["lr"] for group in worker.optimizer.param_groups])
        worker.finish()
        return rates

    return program


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_schedule_sets_the_rate_under_every_strategy(row):
    for rates in fs.launch(
        watched(row.strategy, functools.partial(torch.optim.SGD, lr=0.1)), row.workers
    ):
        assert rates == [[pytest.approx(0.1 * factor)] for factor in FACTORS]


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adam,
        torch.optim.RMSprop,
        functools.partial(torch.optim.AdamW, weight_decay=0.1),
        fs.LARS,
        fs.LAMB,
        fs.RMSpropWarmup,
    ],
)
def test_a_schedule_sets_the_rate_of_every_optimizer(optimizer):
    for rates in fs.launch(watched(fs.LocalSGD(period=2), functools.partial(optimizer, lr=0.3)), 2):
        assert rates == [[pytest.approx(0.3 * factor)] for factor in FACTORS]


def test_two_stages_switch_when_their_epoch_comes_and_each_has_its_own_base_rate():
    optimizer = functools.partial(
        fs.TwoStage,
        first=functools.partial(torch.optim.SGD, lr=0.5),
        second=functools.partial(torch.optim.Adam, lr=0.02),
        warmup_epochs=1,
    )
    for rates in fs.launch(watched(fs.SyncSGD(), optimizer), 2):
        bases = [0.5, 0.5, 0.02, 0.02]
        assert rates == [
            [pytest.approx(base * factor)] for base, factor in zip(bases, FACTORS, strict=True)
        ]


def test_one_worker_follows_the_schedule_too():
    (rates,) = fs.launch(watched(fs.SyncSGD(), functools.partial(torch.optim.SGD, lr=0.1)), 1)
    assert rates == [[pytest.approx(0.1 * factor)] for factor in FACTORS]


def test_a_schedule_goes_by_data_seen_by_all_whatever_the_overlap():
    """With every sample on both workers a pass of each is two of all."""

    def program(comm):
        model = nn.Linear(4, 2)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.SyncSGD())
        epochs = []
        for x, y in worker.batches((X, Y), 12, epochs=1, assignment=fs.FullOverlap()):
            epochs.append(
                (worker.progress.epoch, worker.progress.step, worker.progress.total_steps)
            )
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            worker.step(loss)
        return epochs

    assert fs.launch(program, 2)[0] == [(0, 0, 4), (0.5, 1, 4), (1, 2, 4), (1.5, 3, 4)]


def test_a_schedule_goes_by_batches_where_several_make_a_step():
    def program(comm):
        model = nn.Linear(4, 2)
        worker = fs.Worker(
            comm,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            fs.SyncSGD(),
            fs.Warmup(epochs=2),
        )
        rates = []
        for number, (x, y) in enumerate(worker.batches((X, Y), 6, epochs=2), 1):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if number % 2 == 0:
                worker.step(loss)
                rates.append(worker.optimizer.param_groups[0]["lr"])
        return rates

    # Four batches an epoch on each of two workers: so many have gone before the two of a step.
    assert fs.launch(program, 2)[0] == pytest.approx([0.1 * batch / 8 for batch in (0, 2, 4, 6)])


def test_a_schedule_without_batches_of_the_worker_asks_for_the_number_of_steps():
    def program(comm):
        model = nn.Linear(4, 2)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.SyncSGD(), fs.Cosine()
        )
        worker.total_steps = 2 if comm.seed else None
        for _ in range(2):
            loss = model(X).sum()
            loss.backward()
            worker.step(loss)
        return worker.optimizer.param_groups[0]["lr"]

    with pytest.raises(fs.InvalidField, match="'total_steps' must be known"):
        fs.launch(program, 2)
    assert fs.launch(program, 2, seed=1) == [pytest.approx(0.05)] * 2


def task(**changes):
    whole = fs.Task(
        "small",
        model=lambda: nn.Linear(4, 2),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        loss=fs.classification_loss,
        train=(X, Y),
        test=(X, Y),
        metric=fs.classification_accuracy,
        batch_size=3,
        epochs=4,
    )
    return dataclasses.replace(whole, **changes)


@pytest.mark.parametrize(
    ("assignment", "steps"),
    [
        (fs.Disjoint(), 16),
        (fs.FullOverlap(), 16),
        (fs.Coarse(2), 16),
        (fs.MediumCoarse(3), 24),  # two passes over three copies
        (fs.FineGrained(2), 16),
        (fs.HouseholdShards(2, 1), 16),
        (fs.HouseholdOverlap(4, fs.FineGrained(2)), 16),
        (fs.NeighbourhoodOverlap(2, 2), 16),
    ],
    ids=repr,
)
def test_every_assignment_has_the_same_budget_and_is_evaluated_equally_often(assignment, steps):
    result = fs.run(task(), fs.SyncSGD(), workers=4, assignment=assignment)
    assert result.metrics["steps"] == steps
    assert result.metrics["samples"] == steps * 12
    assert [row["step"] for row in result.history] == list(range(4, steps + 1, 4))
    assert [row["epoch"] for row in result.history] == list(range(1, steps // 4 + 1))
    assert result.config["assignment"] == repr(assignment)
    assert result.config["epochs"] == 4


def test_the_batch_of_all_is_divided_among_the_workers():
    shared = task(global_batch=12, batch_size=None)
    for workers, batch in ((1, 12), (2, 6), (4, 3), (5, fs.GlobalBatch(12))):
        assert shared.batch_size_for(workers) == batch
    with pytest.raises(fs.InvalidField, match="24"):
        fs.run(shared, fs.SyncSGD(), workers=24, epochs=1)
    result = fs.run(shared, fs.SyncSGD(), workers=4, epochs=1)
    assert (result.config["batch_size"], result.metrics["steps"]) == (3, 4)
    assert fs.run(shared, fs.SyncSGD(), workers=4, epochs=1, batch_size=6).metrics["steps"] == 2


def test_a_tasks_schedule_is_used_unless_another_is_given():
    steep = task(schedule=fs.StepDecay(at=(0.25,), gamma=1e-12))
    assert (
        fs.run(steep, fs.SyncSGD(), workers=2).config["schedule"]
        == "StepDecay(at=(0.25,), gamma=1e-12)"
    )
    moved = [
        fs.run(steep, fs.SyncSGD(), workers=2, schedule=each).replicas[0]
        for each in (None, fs.Constant())
    ]
    once = fs.run(steep, fs.SyncSGD(), workers=2, epochs=1, schedule=fs.Constant()).replicas[0]
    # After the first epoch the rate is next to nothing.
    assert torch.allclose(moved[0], once, atol=1e-6)
    assert not torch.allclose(moved[1], once, atol=1e-3)


@pytest.mark.parametrize(
    "sampling", [fs.Sampling("shuffle_once"), fs.Sampling("with_replacement")], ids=repr
)
def test_a_run_draws_as_it_is_told(sampling):
    plain, other = (
        fs.run(task(), fs.SyncSGD(), workers=2, sampling=each) for each in (None, sampling)
    )
    assert not torch.equal(plain.replicas[0], other.replicas[0])
    assert plain.metrics["samples"] == other.metrics["samples"]
    assert other.config["sampling"] == repr(sampling)


def test_a_global_shuffle_repeats_on_real_processes(local):
    """The deal of every epoch is worked out by each worker for itself, and all come to the same."""
    runs = [
        fs.run(
            task(), fs.SyncSGD(), workers=2, backend=place, sampling=fs.Sampling(shuffle="global")
        )
        for place in ("sim", local)
    ]
    assert torch.equal(runs[0].replicas[0], runs[1].replicas[0])


class Stream(IterableDataset):
    def __iter__(self):
        return zip(X, Y, strict=True)


def test_a_stream_runs_and_is_evaluated_after_every_pass():
    result = fs.run(task(train=Stream(), test=Stream()), fs.LocalSGD(period=2), workers=4, epochs=2)
    assert result.metrics["samples"] == 2 * 48
    assert [row["step"] for row in result.history] == [4, 8]
    assert result.metrics["test_accuracy"] > 0.5


def noisy(random, x, y):
    return x + torch.from_numpy(random.normal(size=x.shape)).float(), y


def test_augmented_data_repeat_with_any_number_of_lanes():
    data = fs.InMemory(X, Y, augment=noisy)
    replicas = [
        fs.run(task(train=data), fs.SyncSGD(), workers=3, lanes=lanes).replicas[0]
        for lanes in (1, 2)
    ]
    assert torch.equal(*replicas)
    assert not torch.equal(replicas[0], fs.run(task(), fs.SyncSGD(), workers=3).replicas[0])


@pytest.mark.parametrize(
    "sampling", [fs.Sampling(), fs.Sampling("with_replacement", "global")], ids=repr
)
def test_batches_do_not_draw_from_torchs_generator(sampling):
    """Which would close the simulator's lanes, and make what dropout draws depend on the data."""

    def program(comm):
        model = nn.Linear(4, 2)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.SyncSGD())
        before = torch.get_rng_state()
        count = sum(
            1
            for _ in worker.batches(
                fs.InMemory(X, Y, augment=noisy), 4, epochs=2, sampling=sampling
            )
        )
        return count, torch.equal(torch.get_rng_state(), before)

    assert fs.launch(program, 2) == [(12, True)] * 2


def test_wrong_recipes_are_one_clear_line():
    for call, message in [
        (
            lambda: task(schedule="cosine"),
            r"'schedule' must be one such as fs.Cosine\(\) \(got 'cosine'\)",
        ),
        (lambda: task(global_batch=0), r"'global_batch' must be at least 1 \(got 0\)"),
        (
            lambda: fs.run(task(), fs.SyncSGD(), workers=2, schedule=0.1),
            r"'schedule' must be one such as fs.Cosine\(\) \(got 0.1\)",
        ),
        (
            lambda: fs.run(task(), fs.SyncSGD(), workers=2, assignment=3),
            r"'assignment' must be one such as fs.Disjoint\(\) \(got 3\)",
        ),
        (
            lambda: fs.run(task(train=(X[:3], Y[:3])), fs.SyncSGD(), workers=4),
            r"'samples' must be at least the number of workers, 4 \(got 3\)",
        ),
    ]:
        with pytest.raises(fs.InvalidField, match=message):
            call()
