"""Batch normalisation over the batches of several workers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flockstep as fs
from flockstep.models import is_batch_norm
from flockstep.network import costs

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(24, 2, 4, 4, generator=GENERATOR) + 3
Y = torch.arange(24) % 3
CHANNELS = 4


def net(dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(2, CHANNELS, 3),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * CHANNELS, CHANNELS),
        nn.BatchNorm1d(CHANNELS),
        nn.Linear(CHANNELS, 3),
    )
    return layers.to(dtype)


def train(comm, together, dtype=torch.float64, steps=3):
    """Some steps, in which each worker has its part of the same batch of 12."""
    model = net(dtype)
    if together:
        fs.distribute_batch_norm(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = fs.Worker(comm, model, optimizer, fs.SyncSGD())
    for step in range(steps):
        rows = torch.arange(12 * (step % 2), 12 * (step % 2) + 12)[comm.rank :: comm.size]
        loss = F.cross_entropy(model(X[rows].to(dtype)), Y[rows])
        loss.backward()
        worker.step(loss)
    return {name: value.double() for name, value in worker.finish().state_dict().items()}


def far(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def test_workers_that_normalise_together_are_one_with_the_large_batch():
    alone = fs.launch(lambda comm: train(comm, together=False), 1)[0]
    for workers in (2, 3, 4):
        together = fs.launch(lambda comm: train(comm, together=True), workers)
        assert all(far(each, alone) < 1e-12 for each in together)
    apart = fs.launch(lambda comm: train(comm, together=False), 4)[0]
    assert far(apart, alone) > 1e-3


def test_in_single_precision_too():
    alone = fs.launch(lambda comm: train(comm, False, torch.float32), 1)[0]
    together = fs.launch(lambda comm: train(comm, True, torch.float32), 4)[0]
    assert far(together, alone) < 1e-5


def test_processes_agree_with_the_simulator(local):
    simulated = fs.launch(lambda comm: train(comm, together=True), 2)
    real = fs.launch(lambda comm: train(comm, together=True), 2, backend=local)
    assert all(far(one, other) == 0 for one, other in zip(simulated, real, strict=True))


def test_the_gradient_is_that_of_the_whole_batch_by_finite_differences():
    """Of the mean loss of all workers, with respect to one worker's input."""

    def losses(shift):
        def program(comm):
            layer = nn.BatchNorm1d(2).double()
            nn.init.constant_(layer.weight, 1.5 + comm.rank)
            model = fs.distribute_batch_norm(nn.Sequential(layer), comm)
            x = torch.arange(8.0, dtype=torch.float64).view(4, 2)[2 * comm.rank :][:2].sin()
            if comm.rank == 0:
                x[0, 0] += shift
            x.requires_grad_()
            loss = (model(x) ** 3).mean() * (1 + comm.rank)
            loss.backward()
            return loss.item(), x.grad[0, 0].item()

        return fs.launch(program, 2)

    step = 1e-5
    up, down = (sum(loss for loss, _ in losses(sign * step)) for sign in (1, -1))
    assert losses(0.0)[0][1] == pytest.approx((up - down) / (2 * step), rel=1e-6)


def task(model=net, **fields):
    return fs.Task(
        name="normalised",
        model=model,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=fs.OptimizerSpec("sgd", lr=0.1, momentum=0.9),
        train=(X.double(), Y),
        test=(X.double(), Y),
        metric=fs.classification_accuracy,
        batch_size=24,
        epochs=3,
        **fields,
    )


def state_of(result):
    return {name: value.double() for name, value in result.model.state_dict().items()}


@pytest.mark.parametrize("batch_size", [6, fs.GlobalBatch(24)], ids=repr)
def test_a_run_with_one_group_is_the_run_of_one_worker(batch_size):
    """Every step sees all 24 samples, whoever holds them."""
    whole = fs.run(task(), fs.SyncSGD(), workers=1)
    spread = fs.run(task(), fs.SyncSGD(), workers=4, batch_size=batch_size, batch_norm_group=4)
    apart = fs.run(task(), fs.SyncSGD(), workers=4, batch_size=batch_size)
    assert far(state_of(spread), state_of(whole)) < 1e-10
    assert far(state_of(apart), state_of(whole)) > 1e-3
    assert spread.config["batch_norm_group"] == 4


def test_batches_of_different_sizes_count_by_their_samples():
    """24 samples on 5 workers: 5, 5, 5, 5 and 4 of them."""
    whole = fs.run(task(), fs.SyncSGD(), workers=1)
    uneven = fs.run(
        task(),
        fs.SyncSGD(),
        workers=5,
        batch_size=fs.GlobalBatch(24),
        batch_norm_group=5,
    )
    assert far(state_of(uneven), state_of(whole)) < 1e-10


def test_small_groups_normalise_among_themselves():
    results = [
        fs.run(task(), fs.SyncSGD(), workers=4, batch_size=6, batch_norm_group=group)
        for group in (None, 1, 2, 4)
    ]
    none, one, two, four = map(state_of, results)
    assert far(none, one) == 0
    assert far(two, none) > 1e-6
    assert far(two, four) > 1e-6


def test_the_bytes_of_statistics_and_of_their_gradients_are_counted():
    settings = {"workers": 4, "batch_size": 6, "epochs": 2}
    plain = fs.run(task(), fs.SyncSGD(), **settings)
    together = fs.run(task(), fs.SyncSGD(), **settings, batch_norm_group=2)
    a_layer = sum(
        costs.all_reduce_bytes(2, rank, numbers, 8)
        for rank in range(2)
        for numbers in (2 * CHANNELS + 1, 2 * CHANNELS)
    )
    steps, layers, groups = 2, 2, 2
    extra = together.metrics["bytes_sent"] - plain.metrics["bytes_sent"]
    assert extra == steps * layers * groups * a_layer


def test_a_run_that_goes_on_is_the_same(tmp_path):
    spec = fs.RunSpec(task(), fs.LocalSGD(2), workers=4, batch_size=3, batch_norm_group=2, seed=3)
    whole = fs.run(spec)

    class Stopped(Exception):
        pass

    def stop(look):
        raise Stopped

    with pytest.raises(Stopped):
        fs.run(spec, on_look=stop, checkpoint=tmp_path / "kept", every="1 steps")
    again = fs.resume(tmp_path / "kept", spec=spec)
    assert all(map(torch.equal, whole.replicas, again.replicas))


def test_workers_that_never_wait_cannot_meet_in_a_layer():
    with pytest.raises(
        fs.InvalidField,
        match=r"'batch_norm_group' must be None with gosgd, whose workers never wait and may not "
        r"meet \(got 2\)",
    ):
        fs.RunSpec("digits-mlp", "gosgd", batch_norm_group=2)


def test_nor_can_they_in_a_loop_of_ones_own():
    def program(comm):
        model = fs.distribute_batch_norm(net(), comm)
        fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.Hogwild())

    with pytest.raises(fs.InvalidField, match=r"'strategy' must be one whose workers wait, as"):
        fs.launch(program, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_norm_group": 3}, r"'batch_norm_group' must divide the number of workers, 4"),
        ({"batch_norm_group": 0}, r"'batch_norm_group' must be at least 1 \(got 0\)"),
        (
            {"batch_norm_group": 2, "task": "digits-mlp"},
            "'batch_norm_group' must be None for a model without batch normalisation",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(fs.InvalidField, match=message):
        fs.run(**{"task": task(), "strategy": fs.SyncSGD(), "workers": 4} | fields)


def test_one_value_of_all_workers_together_is_too_few():
    def program(comm):
        model = fs.distribute_batch_norm(nn.Sequential(nn.BatchNorm1d(2)), comm)
        model(torch.ones(0 if comm.rank else 1, 2))

    with pytest.raises(fs.FlockstepError, match="needs more than one value per channel"):
        fs.launch(program, 2)


# ---- The layer itself


def test_parameters_and_statistics_stay_where_they_are():
    def program(comm):
        model = net()
        before = model.state_dict(keep_vars=True)
        fs.distribute_batch_norm(model, comm)
        after = model.state_dict(keep_vars=True)
        kept = list(before) == list(after) and all(after[name] is before[name] for name in before)
        return kept, sum(isinstance(each, fs.GroupBatchNorm) for each in model.modules())

    assert fs.launch(program, 2) == [(True, 2)] * 2


def test_a_copy_and_a_model_in_evaluation_ask_nobody():
    """One worker alone puts a batch through: with the others it would wait for ever."""

    def program(comm):
        model = fs.distribute_batch_norm(net(), comm)
        twin = copy.deepcopy(model)
        assert all(each.comm is None for each in twin.modules() if is_batch_norm(each))
        if comm.rank == 0:
            twin.train()(X.double())
            model.eval()(X.double())
            fs.recalibrate(model, (X.double(),))
        return [each.comm is comm for each in model.modules() if is_batch_norm(each)]

    assert fs.launch(program, 2) == [[True, True]] * 2


def test_recalibrated_alone_it_has_the_statistics_of_the_data():
    def program(comm):
        ours, plain = fs.distribute_batch_norm(net(), comm), net()
        for model in (ours, plain):
            fs.recalibrate(model.train(), (X.double(),))
        return far(ours.state_dict(), plain.state_dict())

    assert fs.launch(program, 2) == [0.0, 0.0]


def test_the_mean_of_all_batches_where_there_is_no_momentum():
    def program(comm):
        layer = nn.BatchNorm1d(2, momentum=None, affine=False).double()
        model = fs.distribute_batch_norm(layer, comm)
        seen = []
        for step in range(3):
            x = torch.randn(
                4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
            )
            model(x[2 * comm.rank :][:2])
            seen.append(x)
        expected = torch.stack([x.var(0) for x in seen]).mean(0)
        return torch.allclose(model.running_var, expected)

    assert fs.launch(program, 2) == [True, True]


# ---- Half precision


def passed(layer, x, slope):
    """The output of a layer, and the gradient of its input."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(slope)
    return out.detach(), x.grad


def passed_by_two(layer, x, slope):
    """The same, where each of two workers has half of the batch."""

    def program(comm):
        own = fs.distribute_batch_norm(copy.deepcopy(layer), comm)
        return passed(own, x.chunk(2)[comm.rank], slope.chunk(2)[comm.rank])

    return [torch.cat(parts) for parts in zip(*fs.launch(program, 2), strict=True)]


@pytest.mark.parametrize("weight", [1.0, 5000.0])
def test_sums_over_many_samples_do_not_leave_half_precision(weight):
    """Slopes of about 16 have sums of 131,000 per worker, and half precision ends at 65,504."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.BatchNorm2d(4).half()
    nn.init.constant_(layer.weight, weight)
    x = torch.randn(64, 4, 16, 16, generator=generator).half()
    slope = (16 + 0.2 * torch.randn(x.shape, generator=generator)).half()

    ours, theirs = passed_by_two(layer, x, slope), passed(layer, x, slope)
    torch.testing.assert_close(ours, list(theirs), rtol=2e-3, atol=2e-3 * weight)
    assert 0.5 * weight < float(ours[1].abs().max()) < 2 * weight


def test_the_statistics_of_half_precision_are_not_rounded_to_it():
    """Squares of 300 are above 65,504."""
    generator = torch.Generator().manual_seed(0)
    x = (300 + torch.randn(64, 4, generator=generator)).half()
    exact = nn.BatchNorm1d(4).double()(x.double())
    out, _ = passed_by_two(nn.BatchNorm1d(4).half(), x, torch.ones_like(x))
    torch.testing.assert_close(out.double(), exact.detach(), rtol=1e-3, atol=1e-3)


def test_under_autocast_it_returns_what_it_was_given():
    """The parameters are in single precision, what comes from the layer before is not."""

    def program(comm):
        plain = net(torch.float32)[:2]
        ours = fs.distribute_batch_norm(copy.deepcopy(plain), comm)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [model(X[:12]) for model in (ours, plain)]
        for out in outputs:
            out.float().square().sum().backward()
        torch.testing.assert_close(*outputs)
        return [out.dtype for out in outputs], ours[1].weight.grad.dtype

    assert fs.launch(program, 2) == [([torch.bfloat16] * 2, torch.float32)] * 2


def test_a_large_mean_hides_no_variance_in_single_precision():
    generator = torch.Generator().manual_seed(0)
    x = 30_000 + torch.randn(64, 4, generator=generator)

    def program(comm):
        layer = fs.distribute_batch_norm(nn.BatchNorm1d(4, momentum=1.0), comm)
        layer(x.chunk(2)[comm.rank])
        return layer.running_var

    for variance in fs.launch(program, 2):
        torch.testing.assert_close(variance, x.double().var(0).float(), rtol=1e-6, atol=0)


def test_no_copy_of_the_input_is_made_in_double_precision():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            doubles.extend(
                each.numel()
                for each in tree_leaves(out)
                if isinstance(each, torch.Tensor) and each.dtype == torch.float64
            )
            return out

    doubles = []

    def program(comm):
        model = fs.distribute_batch_norm(nn.BatchNorm2d(2), comm)
        with Seen():
            model(X)

    fs.launch(program, 2)
    assert 0 < max(doubles) <= 2 * 2 + 1


# ---- What the model holds


class Twice(nn.Module):
    """One layer under two names, and in a child too."""

    def __init__(self):
        super().__init__()
        self.a = nn.BatchNorm1d(4)
        self.b = self.a
        self.register_module("empty", None)
        self.child = nn.Sequential(nn.Linear(4, 4), self.a)


def test_a_layer_in_several_places_stays_one():
    def program(comm):
        model = Twice()
        names = list(model.state_dict())
        fs.distribute_batch_norm(model, comm)
        assert list(model.state_dict()) == names
        return type(model.a), model.b is model.a, model.child[1] is model.a

    assert fs.launch(program, 2) == [(fs.GroupBatchNorm, True, True)] * 2


REGISTRATIONS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_post_hook",
]


@pytest.mark.parametrize("registration", REGISTRATIONS)
def test_hooks_that_would_be_lost_are_refused_and_nothing_is_changed(registration):
    def program(comm):
        model = net()
        handle = getattr(model[5], registration)(lambda *_: None)
        before = list(model)
        with pytest.raises(
            fs.InvalidField,
            match=r"'model' must have no hooks on batch normalisation that is replaced: "
            r"register them afterwards \(got \['5'\]\)",
        ):
            fs.distribute_batch_norm(model, comm)
        assert all(one is other for one, other in zip(before, model, strict=True))

        if handle is not None:
            handle.remove()
            fs.distribute_batch_norm(model, comm)
            assert isinstance(model[5], fs.GroupBatchNorm)

    fs.launch(program, 1)


def test_hooks_on_other_layers_and_on_the_model_stay():
    def program(comm):
        model = net()
        seen = []
        model.register_forward_hook(lambda *_: seen.append("model"))
        model[0].register_forward_hook(lambda *_: seen.append("first"))
        fs.distribute_batch_norm(model, comm)
        model(X.double())
        return seen

    assert fs.launch(program, 2) == [["first", "model"]] * 2


def test_what_follows_may_change_the_output_in_place():
    def program(comm):
        layer = fs.distribute_batch_norm(nn.BatchNorm2d(2, affine=False), comm)
        x = X.clone().requires_grad_()
        F.relu(layer(x), inplace=True).sum().backward()
        return bool(x.grad.isfinite().all())

    assert fs.launch(program, 2) == [True, True]
