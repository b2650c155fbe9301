"""Loops as users write them: what a worker makes of each, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from tests.strategies.harness import net
from tests.strategies.table import TABLE, Row
from torch import nn
from torch.nn import functional as F

import flockstep as fs

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(96, 4, generator=GENERATOR)
Y = torch.randint(2, (96,), generator=GENERATOR)


def make(comm, strategy=None, schedule=None, lr=0.1):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return fs.Worker(comm, model, optimizer, strategy or fs.SyncSGD(), schedule)


def learn(worker, batch, steps=True):
    x, y = batch
    loss = F.cross_entropy(worker.model(x), y)
    loss.backward()
    if steps:
        worker.step(loss)


def rate(worker):
    return worker.optimizer.param_groups[0]["lr"]


# --- several models on one comm -------------------------------------------------------------------


def push(worker, target):
    batch = (torch.eye(3), target)
    loss = worker.adjust_loss((worker.model(batch[0]) - target).square().sum(), batch)
    loss.backward()
    worker.step(loss, accuracy=0.0)


# Of random groups, who comes at the same time as another is served as its messages have come.
IN_ORDER = [row for row in TABLE if getattr(row.strategy, "grouping", None) != "random"]


@pytest.mark.parametrize("row", IN_ORDER, ids=str)
def test_two_models_on_one_comm_get_what_two_runs_give(row: Row):
    """One learns +1, the other −1, of the same size and dtype."""

    def trained(targets):
        def program(comm):
            workers = []
            for target in targets:
                torch.manual_seed(0)
                model = nn.Linear(3, 1, bias=False)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05 + 0.01 * comm.rank)
                workers.append((fs.Worker(comm, model, optimizer, row.strategy), target))
                workers[-1][0].total_steps = 9
            for _ in range(9):
                for worker, target in workers:
                    push(worker, target)
            return [worker.finish().weight.detach().clone() for worker, _ in workers]

        # Where messages take no time it does not matter what else a worker has to do.
        return fs.launch(program, row.workers, network=fs.Network.preset("ideal"))

    both, plus, minus = trained([1.0, -1.0]), trained([1.0]), trained([-1.0])
    for rank, (first, second) in enumerate(both):
        assert torch.equal(first, plus[rank][0])
        assert torch.equal(second, minus[rank][0])


def test_two_models_of_different_sizes_on_local_processes(local):
    def program(comm):
        torch.manual_seed(0)
        models = [nn.Linear(3, 1, bias=False), nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 1))]
        workers = [
            fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.03), fs.EAWild(1))
            for model in models
        ]
        for _ in range(150):
            for worker, target in zip(workers, (1.0, -1.0), strict=True):
                push(worker, target)
        return [worker.finish()(torch.eye(3)).mean().item() for worker in workers]

    for means in fs.launch(program, 2, local):
        assert means == pytest.approx([1, -1], abs=0.05)


def test_a_program_may_call_its_shared_tensors_as_a_strategy_does():
    def program(comm):
        own = comm.shared("elastic centre", torch.zeros(2, dtype=torch.int64))
        push(fs.Worker(comm, model := nn.Linear(3, 1), sgd(model), fs.EAWild(1)), 0.0)
        return own.read().tolist()

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    assert fs.launch(program, 2) == [[0, 0]] * 2


# --- schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize(
    "schedule", [fs.Cosine(), fs.StepDecay(), fs.Warmup(1) * fs.Polynomial()], ids=str
)
def test_several_batches_a_step_are_to_schedules_one_larger_batch(schedule, accumulate, told):
    def program(comm, size, together):
        worker, rates = make(comm, schedule=schedule), []
        how = {"accumulate": together} if told else {}
        for number, batch in enumerate(worker.batches((X, Y), size, epochs=4, **how), 1):
            learn(worker, batch, steps=number % together == 0)
            if number % together == 0:
                rates.append(rate(worker))
                assert worker.total_steps == 4 * 48 // (size * together)
        return rates, worker.steps

    apart = fs.launch(lambda comm: program(comm, 4, accumulate), 2)
    whole = fs.launch(lambda comm: program(comm, 4 * accumulate, 1), 2)
    assert apart == whole


def test_the_length_is_known_before_the_first_batch():
    """As a scheduler of torch wants it."""

    def program(comm):
        worker = make(comm)
        batches = worker.batches((X, Y), 4, epochs=2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            worker.optimizer, 0.1, total_steps=worker.total_steps
        )
        for batch in batches:
            learn(worker, batch)
            scheduler.step()
        return worker.steps, scheduler.last_epoch, worker.total_steps

    assert fs.launch(program, 2) == [(24, 24, 24)] * 2


@pytest.mark.parametrize("leave_after", [12, 5])
def test_a_loop_over_epochs(leave_after):
    """What is left of an epoch that was broken off is passed over, as with a DataLoader."""

    def program(comm):
        worker, seen = make(comm, schedule=fs.Cosine()), []
        for number, epoch in enumerate(worker.batches((X, Y), 4, epochs=3).by_epoch()):
            assert worker.epoch == number
            for step, batch in enumerate(epoch, 1):
                learn(worker, batch)
                seen.append(rate(worker))
                if step == leave_after:
                    break
        return seen, worker.epoch

    seen, epochs = fs.launch(program, 2)[0]
    assert epochs == 3
    if leave_after == 12:
        cosine = [0.05 * (1 + math.cos(math.pi * step / 36)) for step in range(36)]
        assert seen == pytest.approx(cosine)
    else:
        assert len(seen) == 15
        assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [
        (fs.SyncSGD(), fs.Cosine()),
        (fs.SyncSGD(), fs.Warmup(1) * fs.StepDecay()),
        (fs.PostLocalSGD(0.5, 4), None),
        (fs.PSOPS(), None),
    ],
    ids=str,
)
def test_a_second_loop_is_refused_where_the_length_of_the_training_matters(strategy, schedule):
    def program(comm, told):
        worker = make(comm, strategy, schedule)
        if told:
            worker.total_steps = 24
        rates = []
        for _ in range(2):
            for batch in worker.batches((X, Y), 4):
                learn(worker, batch)
                rates.append(rate(worker))
        return rates

    with pytest.raises(fs.FlockstepError, match=r"second worker.batches .*\.by_epoch\(\)"):
        fs.launch(lambda comm: program(comm, told=False), 2)
    rates = fs.launch(lambda comm: program(comm, told=True), 2)[0]
    if schedule == fs.Cosine():
        cosine = [0.05 * (1 + math.cos(math.pi * step / 24)) for step in range(24)]
        assert rates == pytest.approx(cosine)


def test_loops_one_after_the_other_where_nothing_goes_by_the_length():
    def program(comm):
        worker, rates = make(comm, schedule=fs.Warmup(2)), []
        for _ in range(3):
            for batch in worker.batches((X, Y), 4):
                learn(worker, batch)
                rates.append(rate(worker))
        return rates

    ramp = [0.1 * min(1, step / 24) for step in range(36)]
    assert fs.launch(program, 2)[0] == pytest.approx(ramp)


def test_the_epoch_advances_with_the_step_that_ends_it():
    def program(comm):
        worker, seen = make(comm), []
        for batch in worker.batches((X, Y), 12, epochs=3):
            before = worker.epoch
            learn(worker, batch)
            seen.append((before, worker.epoch))
        return seen

    each = [[(n, n), (n, n), (n, n), (n, n + 1)] for n in range(3)]
    assert fs.launch(program, 2)[0] == [pair for epoch in each for pair in epoch]


# --- batches of all workers together --------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 5, 7])
@pytest.mark.parametrize("strategy", [fs.SyncSGD(), fs.LocalSGD(1)], ids=str)
def test_a_global_batch_is_exact_for_any_number_of_workers(strategy, workers):
    """As one worker that takes the same samples in one batch, to the last bits of a sum."""
    data = torch.arange(90)
    features = torch.randn(90, 10, dtype=torch.float64, generator=GENERATOR)
    labels = torch.randint(3, (90,), generator=GENERATOR)

    def loss_of(model, chosen):
        return F.cross_entropy(model(features[chosen]), labels[chosen])

    def program(comm):
        model, taken = net(), []
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.3), strategy)
        for chosen in worker.batches(data, fs.GlobalBatch(16), epochs=2):
            taken.append(chosen.tolist())
            loss = loss_of(model, chosen)
            loss.backward()
            worker.step(loss)
        return taken, [p.detach().clone() for p in worker.finish().parameters()]

    outcomes = fs.launch(program, workers)
    steps = [list(chain(*parts)) for parts in zip(*(taken for taken, _ in outcomes), strict=True)]
    assert len(steps) == 2 * 6
    for number, chosen in enumerate(steps, 1):
        # Who has no sample left at the end of a pass sees one again.
        assert len(chosen) in ((10, 11) if number % 6 == 0 else (16,))
    for epoch in (steps[:6], steps[6:]):
        assert set(chain(*epoch)) == set(data.tolist())

    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.3)
    for chosen in steps:
        optimizer.zero_grad()
        loss_of(alone, torch.tensor(chosen)).backward()
        optimizer.step()
    for ours, theirs in zip(outcomes[0][1], alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "assignment", [fs.Disjoint(), fs.FullOverlap(), fs.Coarse(2), fs.FineGrained(3)], ids=str
)
@pytest.mark.parametrize(("samples", "size"), [(101, 16), (96, 16), (97, 9), (1000, 64)])
def test_shares_of_a_global_batch_differ_by_one_and_waste_nothing(samples, size, assignment):
    workers = 6

    def program(comm):
        worker, seen = make(comm), []
        for batch in worker.batches(
            torch.arange(samples), fs.GlobalBatch(size), epochs=1, assignment=assignment
        ):
            seen.append((len(batch), worker.course.weight))
            worker.step(0.0)
        return seen

    ranks = fs.launch(program, workers)
    steps = list(zip(*ranks, strict=True))
    for step in steps[:-2]:
        sizes = [number for number, _ in step]
        assert sum(sizes) == size
        assert max(sizes) - min(sizes) <= 1
    for step in steps:
        together = sum(number for number, _ in step)
        weights = [number * workers / together for number, _ in step]
        assert [weight for _, weight in step] == pytest.approx(weights)
    held = assignment.copies_among(workers) * samples
    assert held <= sum(number for step in steps for number, _ in step) <= held + workers


def test_a_task_with_a_global_batch_has_it_on_any_number_of_workers():
    sizes = []

    def loss(model, batch):
        if model.training:
            sizes.append(len(batch[1]))
        return fs.classification_loss(model, batch)

    task = fs.Task(
        "own",
        model=lambda: nn.Linear(4, 2),
        train=(X, Y),
        test=(X, Y),
        loss=loss,
        metric=fs.classification_accuracy,
        optimizer=fs.OptimizerSpec("sgd", lr=0.1),
        global_batch=16,
    )
    result = fs.run(task, fs.SyncSGD(), workers=5, steps=6)
    assert sum(sizes) == 6 * 16
    assert result.config["batch_size"] == "GlobalBatch(size=16)"
    with pytest.raises(fs.InvalidField, match="'global_batch' must be at least the number of work"):
        fs.run(task, fs.SyncSGD(), workers=17, steps=2)


# --- what is forgotten or misspelt ----------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_of_the_optimizer_outside_the_workers_is_noticed(optimizer, foreach):
    def program(comm):
        model = nn.Linear(4, 2)
        worker = fs.Worker(
            comm, model, optimizer(model.parameters(), lr=0.1, foreach=foreach), fs.LocalSGD(4)
        )
        for number, batch in enumerate(worker.batches((X, Y), 4)):
            learn(worker, batch, steps=False)
            if number == 3:
                worker.optimizer.step()
            worker.step(1.0)

    with pytest.raises(
        fs.FlockstepError,
        match=r"rank \d: the parameters were changed outside worker.step before step 4",
    ):
        fs.launch(program, 2)


def test_a_change_that_is_meant_is_said():
    def program(comm):
        worker = make(comm)
        for batch in worker.batches((X, Y), 4):
            learn(worker, batch)
            with worker.changing_parameters(), torch.no_grad():
                worker.model.weight.clamp_(-0.01, 0.01)
        return worker.finish().weight.abs().max().item()

    assert max(fs.launch(program, 2)) <= 0.0101


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("after_steps", "after_step"),
        ("befor_step", "before_step"),
        ("on_gradient", "on_gradients"),
        ("optimiser_step", "optimizer_step"),
        ("need_accuracy", "needs_accuracy"),
    ],
)
def test_a_misspelt_hook_is_refused_when_the_class_is_made(misspelt, meant):
    value = property(lambda self: True) if misspelt.startswith("need") else lambda *_: None
    with pytest.raises(fs.InvalidField, match=f"Own.{misspelt} .* Did you mean '{meant}'"):
        type("Own", (fs.Strategy,), {misspelt: value})


def test_methods_of_a_strategys_own_are_its_own_business():
    @dataclass(frozen=True)
    class Own(fs.LocalSGD):
        finished: bool = False

        def average(self): ...

        def gradients_of(self, worker): ...

        def _after_steps(self, worker): ...

    assert Own(4).period == 4
