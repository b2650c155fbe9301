"""Between the backward pass and the step: clipping, callbacks, scaled losses, unfrozen layers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.strategies.harness import net
from tests.strategies.table import TABLE, Row
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

import flockstep as fs

STEPS, SIZE = 12, 8
GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(STEPS, 4 * SIZE, 10, dtype=torch.float64, generator=GENERATOR)
Y = torch.randint(3, (STEPS, 4 * SIZE), generator=GENERATOR)


def batches(rank=0, workers=1):
    """The samples of one of `workers`: together they take the same, whatever their number."""
    for x, y in zip(X, Y, strict=True):
        yield x.chunk(workers)[rank], y.chunk(workers)[rank]


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def make(comm, strategy=None, model=None, optimizer=momentum):
    model = net() if model is None else model
    return fs.Worker(comm, model, optimizer(model.parameters()), strategy or fs.SyncSGD())


def learn(worker, batch):
    x, y = batch
    loss = worker.adjust_loss(F.cross_entropy(worker.model(x), y), batch)
    loss.backward()
    worker.step(loss, accuracy=0.0)


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- clipping -------------------------------------------------------------------------------------


def clipped_by_torch(max_norm, norm_type):
    model, norms = net(), []
    optimizer = momentum(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        norms.append(norm.item())
        optimizer.step()
    return parameters(model), norms


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("workers", [1, 4])
def test_what_the_step_uses_is_clipped_as_torch_does(workers, norm_type):
    def program(comm):
        worker, norms = make(comm), []
        worker.clip_gradients(0.05, norm_type)
        for batch in batches(comm.rank, workers):
            learn(worker, batch)
            norms.append(worker.gradient_norm)
        return parameters(worker.finish()), norms

    theirs, their_norms = clipped_by_torch(0.05, norm_type)
    assert min(their_norms) > 0.05
    for ours, norms in fs.launch(program, workers):
        if workers == 1:
            assert torch.equal(ours, theirs)
            assert norms == their_norms
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        assert norms == pytest.approx(their_norms, rel=1e-12)


@pytest.mark.parametrize("codec", [None, fs.PowerSGD(1), fs.TopK(0.1)], ids=str)
def test_clipping_comes_after_the_exchange(codec):
    """The mean of gradients that are as long as allowed would be shorter."""

    def program(comm):
        worker = make(comm, fs.SyncSGD(codec=codec), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
        worker.clip_gradients(0.01)
        before, moved = parameters(worker.model), []
        for batch in batches(comm.rank, 4):
            learn(worker, batch)
            after = parameters(worker.model)
            moved.append((after - before).norm().item())
            before = after
        return moved

    for moved in fs.launch(program, 4):
        assert moved == pytest.approx([0.01] * STEPS, rel=1e-3)


def test_the_weight_of_an_uneven_batch_comes_before_clipping():
    def program(comm):
        worker = make(comm, fs.Independent(), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
        worker.clip_gradients(math.inf)
        found = []
        for x, y in worker.batches((X.flatten(0, 1), Y.flatten()), fs.GlobalBatch(5)):
            loss = F.cross_entropy(worker.model(x), y)
            own = torch.autograd.grad(loss, list(worker.model.parameters()), retain_graph=True)
            norm = torch.cat([each.flatten() for each in own]).norm().item()
            loss.backward()
            weight = worker.course.weight
            worker.step(loss)
            found.append((worker.gradient_norm, weight * norm, weight))
        return found

    for found in fs.launch(program, 2):
        assert {weight for _, _, weight in found} > {0.8, 1.2}
        for norm, expected, _ in found:
            assert norm == pytest.approx(expected)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_gradients_of_every_strategy_are_clipped(row: Row):
    def program(comm):
        worker, norms = make(comm, row.strategy), []
        worker.total_steps = STEPS
        worker.clip_gradients(0.01)
        worker.on_gradients(lambda gradients: norms.append(gradients.norm().item()))
        for batch in batches(comm.rank, comm.size):
            learn(worker, batch)
        optimizer = worker.optimizer.state.values()
        kept = torch.cat([each["momentum_buffer"].flatten() for each in optimizer])
        worker.finish()
        return norms, kept.norm().item()

    for norms, kept in fs.launch(program, row.workers):
        assert len(norms) == STEPS
        assert min(norms) > 0.02  # none was clipped before
        assert kept < 0.2  # ten times the longest, and the decay of the weights


def test_a_callback_sees_and_changes_what_the_step_will_use():
    def program(comm):
        worker, seen = make(comm, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)), []

        def take_signs(gradients):
            seen.append(gradients.clone())
            gradients.sign_()

        worker.on_gradients(take_signs)
        before = parameters(worker.model)
        learn(worker, next(batches(comm.rank, 2)))
        return seen[0], before - parameters(worker.model)

    (first, moved), (second, _) = fs.launch(program, 2)
    assert torch.equal(first, second)  # the mean of both
    torch.testing.assert_close(moved, first.sign())


@pytest.mark.parametrize("norm", [0, -1.0, math.nan, "1", True])
def test_a_norm_to_clip_to_is_above_zero(norm):
    with pytest.raises(fs.InvalidField, match="'max_norm' must be a"):
        fs.launch(lambda comm: make(comm).clip_gradients(norm), 1)


# --- scaled losses --------------------------------------------------------------------------------


def scaled(worker, scaler, batch, spoilt=False):
    x, y = batch
    loss = F.cross_entropy(worker.model(x), y)
    scaler.scale(loss).backward()
    if spoilt:
        next(worker.model.parameters()).grad.view(-1)[3] = math.inf
    return worker.step(loss, scaler=scaler)


def test_a_layer_may_be_unfrozen_in_a_step_that_is_left_out():
    def program(comm):
        worker, scaler = make(comm, fs.SyncSGD(), model=net()), new_scaler()
        worker.model[0].requires_grad_(False)
        taken = []
        for number, batch in enumerate(batches(comm.rank, 2)):
            worker.model[0].requires_grad_(number > 0)
            taken.append(scaled(worker, scaler, batch, spoilt=number == 1))
        return taken

    assert fs.launch(program, 2) == [[number != 1 for number in range(STEPS)]] * 2


def new_scaler():
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=4)


@pytest.mark.parametrize(
    "strategy", [fs.SyncSGD(), fs.LocalSGD(2), fs.EAMSGD(2, mode="round_robin")], ids=str
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_scaled_loss_trains_as_an_unscaled_one(strategy, workers):
    """Powers of two leave no trace."""

    def program(comm, has_scaler):
        worker, scaler = make(comm, strategy), new_scaler()
        for batch in batches(comm.rank, workers):
            if has_scaler:
                assert scaled(worker, scaler, batch)
            else:
                learn(worker, batch)
        return parameters(worker.finish()), scaler.get_scale() if has_scaler else 2.0**13

    plain = fs.launch(lambda comm: program(comm, False), workers)
    for (ours, scale), (theirs, expected) in zip(
        fs.launch(lambda comm: program(comm, True), workers), plain, strict=True
    ):
        assert torch.equal(ours, theirs)
        assert scale == expected


@pytest.mark.parametrize(
    "strategy",
    [
        fs.SyncSGD(),
        fs.SyncSGD(codec=fs.TopK(0.2)),
        fs.LocalSGD(3),
        fs.EAMSGD(2, mode="round_robin"),
        fs.DPSGD(),
    ],
    ids=str,
)
def test_workers_that_meet_skip_a_step_together(strategy):
    """Rank 1 finds a gradient that is not finite: for all it is as if the batch had not been."""

    def program(comm, spoilt_at):
        worker, scaler = make(comm, strategy), new_scaler()
        taken = []
        for number, batch in enumerate(batches(comm.rank, 3)):
            if spoilt_at is None and number == 5:
                continue
            before = worker.flat.state.clone()
            spoilt = comm.rank == 1 and number == spoilt_at
            taken.append(scaled(worker, scaler, batch, spoilt))
            if not taken[-1]:
                assert torch.equal(worker.flat.state, before)
        return taken, worker.steps, scaler.get_scale(), parameters(worker.finish())

    skipped = fs.launch(lambda comm: program(comm, 5), 3)
    without = fs.launch(lambda comm: program(comm, None), 3)
    for (taken, steps, scale, ours), (_, _, _, theirs) in zip(skipped, without, strict=True):
        assert taken == [number != 5 for number in range(STEPS)]
        assert steps == STEPS - 1
        # Grows after four steps, halves, grows after four.
        assert scale == 2.0**11
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, skipped[0][-1])


def test_a_worker_that_never_waits_skips_by_itself():
    def program(comm):
        worker, scaler = make(comm, fs.AsyncSGD()), new_scaler()
        for number, batch in enumerate(batches(comm.rank, 2)):
            scaled(worker, scaler, batch, spoilt=comm.rank == 1 and number == 5)
        worker.finish()
        return worker.steps, scaler.get_scale(), bool(worker.flat.state.isfinite().all())

    assert fs.launch(program, 2) == [(STEPS, 2.0**13, True), (STEPS - 1, 2.0**11, True)]


def test_what_agreeing_on_a_scale_costs_is_counted():
    def program(comm, has_scaler):
        worker, scaler = make(comm), new_scaler()
        for batch in batches(comm.rank, 2):
            scaled(worker, scaler, batch) if has_scaler else learn(worker, batch)
        return comm.meter.bytes_sent

    with_scaler = fs.launch(lambda comm: program(comm, True), 2)
    without = fs.launch(lambda comm: program(comm, False), 2)
    assert sum(with_scaler) - sum(without) == STEPS * 2 * 8


def test_a_scaler_that_is_switched_off_does_nothing():
    def program(comm):
        worker = make(comm)
        taken = [scaled(worker, GradScaler("cpu", enabled=False), each) for each in batches()]
        with pytest.raises(fs.InvalidField, match="'scaler' must be a torch.amp.GradScaler"):
            worker.step(1.0, scaler=True)
        return taken

    assert fs.launch(program, 1) == [[True] * STEPS]


# --- unfreezing -----------------------------------------------------------------------------------


def thaw(model, optimizer, has_group):
    layer = model[0]
    layer.requires_grad_(True)
    if not has_group:
        optimizer.add_param_group({"params": layer.parameters(), "lr": 0.02})


def frozen_net():
    model = net()
    model[0].requires_grad_(False)
    return model


def thawed_by_torch(make_optimizer, has_group):
    model = frozen_net()
    optimizer = make_optimizer(model.parameters() if has_group else model[2].parameters())
    for number, (x, y) in enumerate(batches()):
        if number == 5:
            thaw(model, optimizer, has_group)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("make_optimizer", [momentum, torch.optim.Adam])
@pytest.mark.parametrize("has_group", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_layer_that_is_unfrozen_later_trains_as_in_torch(workers, has_group, make_optimizer):
    """With two workers, which see the same, the mean of two equal gradients is exact."""

    def program(comm):
        model = frozen_net()
        optimizer = make_optimizer(model.parameters() if has_group else model[2].parameters())
        worker = fs.Worker(comm, model, optimizer, fs.SyncSGD())
        for number, batch in enumerate(batches()):
            if number == 5:
                thaw(model, optimizer, has_group)
            learn(worker, batch)
            assert worker.flat.count == (51 if number < 5 else 227)
        return parameters(worker.finish())

    theirs = thawed_by_torch(make_optimizer, has_group)
    for ours in fs.launch(program, workers):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_layer_that_is_frozen_later_stays_as_it_is(workers):
    """Momentum and decay of the weights leave it alone, as in torch."""

    def program(comm):
        worker = make(comm)
        for number, batch in enumerate(batches()):
            if number in (4, 9):
                worker.model[0].requires_grad_(number == 9)
            learn(worker, batch)
            if number == 3:
                kept = worker.model[0].weight.clone()
            if 3 < number < 9:
                assert torch.equal(worker.model[0].weight, kept)
        return parameters(worker.finish())

    model = net()
    optimizer = momentum(model.parameters())
    for number, (x, y) in enumerate(batches()):
        if number in (4, 9):
            model[0].requires_grad_(number == 9)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for ours in fs.launch(program, workers):
        assert torch.equal(ours, parameters(model))


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_strategy_goes_on_with_what_was_unfrozen(row: Row):
    def program(comm):
        model = frozen_net()
        first = copy.deepcopy(model[0].weight)
        worker = make(comm, row.strategy, model)
        worker.total_steps = STEPS
        for number, batch in enumerate(batches(comm.rank, comm.size)):
            if number == 5:
                model[0].requires_grad_(True)
            learn(worker, batch)
        worker.finish()
        return parameters(model), not torch.equal(model[0].weight, first)

    outcomes = fs.launch(program, row.workers)
    for ours, has_moved in outcomes:
        assert has_moved
        if not isinstance(row.strategy, fs.Independent):
            assert torch.equal(ours, outcomes[0][0])


def test_only_what_the_model_has_can_be_added_to_the_optimizer():
    def program(comm):
        worker = make(comm, model=frozen_net())
        worker.optimizer.add_param_group({"params": nn.Linear(2, 2).double().parameters()})
        worker.model.requires_grad_(True)
        learn(worker, next(batches()))

    with pytest.raises(fs.InvalidField, match="'optimizer' must hold parameters of the model only"):
        fs.launch(program, 2)


# --- optimizers that do not step alone ------------------------------------------------------------


def test_an_optimizer_that_needs_a_closure_is_refused():
    message = "'optimizer' must not be LBFGS: it needs a closure that computes the loss anew, .*$"
    with pytest.raises(fs.InvalidField, match=message):
        fs.launch(lambda comm: make(comm, optimizer=torch.optim.LBFGS), 2)
    task = fs.Task(
        "own",
        model=net,
        train=(X[0], Y[0]),
        test=(X[0], Y[0]),
        loss=fs.classification_loss,
        metric=fs.classification_accuracy,
        optimizer=torch.optim.LBFGS,
    )
    with pytest.raises(fs.InvalidField, match=message):
        fs.run(task, fs.SyncSGD(), workers=2)
    with pytest.raises(fs.InvalidField, match="'optimizer' must not be lbfgs: it needs a closure"):
        fs.run("digits-mlp", fs.SyncSGD(), optimizer="lbfgs(lr=0.1)")


# --- what all agree on ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "value", "expected"),
    [
        ("any", lambda rank: rank == 2, True),
        ("any", lambda rank: False, False),
        ("all", lambda rank: rank != 2, False),
        ("all", lambda rank: torch.tensor(True), True),
        ("mean", lambda rank: rank, 1.0),
        ("mean", lambda rank: torch.tensor(0.1 * rank, dtype=torch.float64), 0.1),
    ],
)
def test_workers_agree(how, value, expected):
    def program(comm):
        agreed = make(comm).agree(value(comm.rank), how)
        return type(agreed), agreed

    found = fs.launch(program, 3)
    assert found == [(type(expected), pytest.approx(expected))] * 3


def test_all_end_after_the_same_step():
    def program(comm):
        worker = make(comm)
        for number, batch in enumerate(batches(comm.rank, 3)):
            learn(worker, batch)
            if worker.agree(number == 3 + comm.rank):
                break
        worker.finish()
        return worker.steps

    assert fs.launch(program, 3) == [4, 4, 4]


@pytest.mark.parametrize("others", ["train on", "end"])
def test_a_worker_that_does_not_take_part_is_an_error_and_not_a_wrong_answer(others):
    def program(comm):
        worker = make(comm)
        if comm.rank == 1:
            worker.agree(True)
        elif others == "train on":
            learn(worker, next(batches()))

    error = fs.MismatchError if others == "train on" else fs.DeadlockError
    with pytest.raises(error, match="all_reduce"):
        fs.launch(program, 3)


@pytest.mark.parametrize(
    ("value", "how", "message"),
    [
        (0.5, "any", "'value' must be True or False (got 0.5)"),
        ("yes", "mean", "'value' must be a number (got 'yes')"),
        (True, "most", "'how' must be one of 'any', 'all', 'mean' (got 'most')"),
    ],
)
def test_what_cannot_be_agreed_on(value, how, message):
    with pytest.raises(fs.InvalidField) as refused:
        fs.launch(lambda comm: make(comm).agree(value, how), 2)
    assert str(refused.value) == message
