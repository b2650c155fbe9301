"""The worker in a user's own loop: any optimizer, any model, and what it refuses."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flockstep as fs

X = torch.randn(240, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, :3].sum(1) > 0).long()


class Tied(nn.Module):
    """The first and the last layer share their weight."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 6, bias=False)
        self.decoder = nn.Linear(6, 6)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.relu(self.encoder(x)))


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.relu(self.base(x)))


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2)
        self.head = nn.Linear(8, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.head(self.conv(x.view(-1, 2, 1, 3).expand(-1, -1, 2, -1)).flatten(1))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)),
    "tied": Tied,
    "batch norm": Normalised,
    "frozen": Frozen,
    "channels last": ChannelsLast,
    "bfloat16": lambda: nn.Sequential(nn.Linear(6, 2)).to(torch.bfloat16),
}
OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True
    ),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "groups": lambda m: torch.optim.SGD(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() <= 1], "lr": 0.01},
        ],
        lr=0.1,
    ),
}
STRATEGIES = [
    fs.SyncSGD(),
    fs.LocalSGD(period=2),
    fs.EASGD(period=2),
    fs.EAWild(),
    fs.Independent(),
]


def batches():
    return zip(X.split(24), Y.split(24), strict=True)


def ordinary(model, optimizer, accumulate=1):
    """The loop that everybody writes."""
    for index, (x, y) in enumerate(batches()):
        loss = F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y) / accumulate
        loss.backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def with_worker(comm, model, optimizer, strategy, accumulate=1):
    """The same loop with the three changed lines."""
    worker = fs.Worker(comm, model, optimizer, strategy=strategy)
    for index, (x, y) in enumerate(batches()):
        loss = F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y) / accumulate
        loss.backward()
        if (index + 1) % accumulate == 0:
            worker.step(loss)
    return worker.finish()


def same(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == other_name and torch.equal(a, b) for (name, a), (other_name, b) in pairs)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("model", MODELS)
def test_one_worker_is_the_ordinary_loop_bit_for_bit(model, strategy):
    def program(comm):
        torch.manual_seed(0)
        net = MODELS[model]()
        return with_worker(comm, net, OPTIMIZERS["momentum"](net), strategy)

    torch.manual_seed(0)
    plain = MODELS[model]()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ordinary(plain, OPTIMIZERS["momentum"](plain))
    torch.set_num_threads(threads)
    assert same(fs.launch(program, 1)[0], plain)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_any_optimizer_and_gradient_accumulation(optimizer, accumulate):
    def program(comm):
        torch.manual_seed(0)
        net = MODELS["mlp"]()
        return with_worker(comm, net, OPTIMIZERS[optimizer](net), fs.SyncSGD(), accumulate)

    torch.manual_seed(0)
    plain = MODELS["mlp"]()
    ordinary(plain, OPTIMIZERS[optimizer](plain), accumulate)
    assert same(fs.launch(program, 1)[0], plain)
    # Workers that all see the same data take the same step as one.
    for model in fs.launch(program, 2):
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_any_model_trains_and_ends_equal_on_all_workers(backend):
    """Every strategy does in the simulator: a property of the table. Here a collective and a
    shared tensor for all, in one launch.
    """

    def program(comm):
        strategies = (fs.LocalSGD(period=2), fs.EAWild())
        # All are drawn before the first step: simulated workers may then compute side by side.
        nets = {(each, model): MODELS[model]() for each in strategies for model in MODELS}
        states = {}
        for (strategy, model), net in nets.items():
            with_worker(comm, net, OPTIMIZERS["adam"](net), strategy)
            for name, value in net.state_dict().items():
                states[strategy.name, model, name] = value
        return states

    first, *others = fs.launch(program, 3, backend)
    assert {model for _, model, _ in first} == set(MODELS)
    for key, value in first.items():
        assert value.isfinite().all(), key
        if not key[-1].endswith("num_batches_tracked"):
            assert all(torch.equal(value, other[key]) for other in others), key


def test_a_local_run_works_in_one_process_of_its_own(local):
    def program(comm):
        torch.manual_seed(0)
        net = MODELS["tied"]()
        return with_worker(comm, net, OPTIMIZERS["adam"](net), fs.LocalSGD(period=2))

    torch.manual_seed(0)
    plain = Tied()
    ordinary(plain, OPTIMIZERS["adam"](plain))
    model = fs.launch(program, 1, local)[0]
    assert same(model, plain)
    assert model.decoder.weight is model.encoder.weight


def test_all_workers_start_from_rank_0(launch):
    def program(comm):
        net = Normalised()
        frozen = Frozen()
        with torch.no_grad():
            net.layers[1].running_mean.fill_(comm.rank + 1)
        net.layers[1].num_batches_tracked.fill_(10 + comm.rank)
        fs.Worker(comm, net, OPTIMIZERS["sgd"](net), fs.Independent())
        fs.Worker(comm, frozen, torch.optim.SGD(frozen.head.parameters(), lr=0.1), fs.Independent())
        return net.state_dict(), frozen.state_dict(), comm.meter.bytes_sent

    first, *others = launch(program, 3)
    assert first[0]["layers.1.running_mean"].tolist() == [1.0] * 8
    assert first[2] == 0
    for other in others:
        for states in zip(first[:2], other[:2], strict=True):
            assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_parameters_and_gradients_are_views_of_flat_tensors():
    def program(comm):
        net = Tied()
        worker = fs.Worker(comm, net, OPTIMIZERS["sgd"](net), fs.Independent())
        worker.flat.parameters.fill_(0.5)
        loss = net(X[:4]).sum()
        loss.backward()
        inside = all(bool((p == 0.5).all()) for p in net.parameters())
        return (
            inside,
            worker.flat.count,
            torch.equal(worker.flat.gradients[:36], net.encoder.weight.grad.flatten()),
        )

    assert fs.launch(program, 1)[0] == (True, 36 + 6, True)


@pytest.mark.parametrize("habit", ["optimizer.zero_grad()", "model.zero_grad()", "grads replaced"])
def test_habits_of_the_old_loop_do_no_harm(habit):
    """Whoever leaves zero_grad() in the loop detaches the gradients from their flat tensor; they
    are found again.
    """

    def program(comm):
        torch.manual_seed(0)
        net = MODELS["mlp"]()
        optimizer = OPTIMIZERS["momentum"](net)
        worker = fs.Worker(comm, net, optimizer, fs.SyncSGD())
        for x, y in batches():
            if habit == "optimizer.zero_grad()":
                optimizer.zero_grad()
            elif habit == "model.zero_grad()":
                net.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            if habit == "grads replaced":
                for parameter in net.parameters():
                    parameter.grad = parameter.grad.clone()
            worker.step(loss)
        return worker.finish()

    def clean(comm):
        torch.manual_seed(0)
        net = MODELS["mlp"]()
        return with_worker(comm, net, OPTIMIZERS["momentum"](net), fs.SyncSGD())

    assert same(fs.launch(program, 2)[1], fs.launch(clean, 2)[1])


def test_batch_norm_statistics_are_averaged_where_parameters_are():
    def program(comm, strategy):
        net = Normalised()
        worker = fs.Worker(comm, net, torch.optim.SGD(net.parameters(), lr=0.0), strategy)
        net(torch.full((4, 6), float(comm.rank + 1)))
        own = net.layers[1].running_mean.clone()
        loss = net(X[:4]).sum() * 0
        loss.backward()
        net.layers[1].running_mean.copy_(own)
        worker.step(loss)
        worker.finish()
        return own, net.layers[1].running_mean

    for strategy in (fs.LocalSGD(period=1), fs.SyncSGD()):
        results = fs.launch(lambda comm, strategy=strategy: program(comm, strategy), 3)
        mean = torch.stack([own for own, _ in results]).mean(0)
        assert all(torch.allclose(averaged, mean, rtol=1e-5) for _, averaged in results)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(backend, value):
    def program(comm):
        net = MODELS["mlp"]()
        worker = fs.Worker(comm, net, OPTIMIZERS["sgd"](net), fs.LocalSGD(period=4))
        for step in range(10):
            loss = net(X[:4]).sum()
            loss.backward()
            worker.step(loss if (comm.rank, step) != (1, 2) else loss * value)

    with pytest.raises(
        fs.NonFiniteLoss, match=r"rank 1: the loss is (nan|-?inf) at step 3 with LocalSGD\(period=4"
    ):
        fs.launch(program, 2, backend)


def build(make_model, make_optimizer=None):
    def program(comm):
        net = make_model()
        optimizer = (make_optimizer or OPTIMIZERS["sgd"])(net)
        fs.Worker(comm, net, optimizer, fs.SyncSGD())

    return program


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (
            build(nn.ReLU, lambda net: torch.optim.SGD([torch.zeros(1)], lr=0.1)),
            fs.InvalidField,
            r"'model' must have a trainable parameter \(got 'ReLU'\)",
        ),
        (
            build(lambda: nn.Linear(2, 2).requires_grad_(False)),
            fs.InvalidField,
            "'model' must have a trainable parameter",
        ),
        (
            build(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())),
            fs.FlockstepError,
            "'1.weight' is torch.float64",
        ),
        (
            build(
                lambda: nn.Linear(2, 2),
                lambda net: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1),
            ),
            fs.InvalidField,
            "'optimizer' must hold parameters of the model only",
        ),
    ],
)
def test_models_that_cannot_be_trained_are_refused(program, error, message):
    with pytest.raises(error, match=message):
        fs.launch(program, 2)


def test_a_model_that_changes_under_the_worker_is_noticed():
    def program(comm, change):
        net = Frozen()
        worker = fs.Worker(comm, net, torch.optim.SGD(net.parameters(), lr=0.1), fs.SyncSGD())
        change(net)
        loss = net(X[:4].to(next(net.parameters()).dtype)).sum()
        loss.backward()
        worker.step(loss)

    with pytest.raises(fs.FlockstepError, match="moved or replaced"):
        fs.launch(lambda comm: program(comm, lambda net: net.double()), 2)


def test_a_learning_rate_schedule_works_as_before():
    def program(comm):
        net = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        worker = fs.Worker(comm, net, optimizer, fs.SyncSGD())
        rates = []
        for x, y in batches():
            rates.append(optimizer.param_groups[0]["lr"])
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            worker.step(loss)
            scheduler.step()
        return rates

    assert fs.launch(program, 2)[0][:5] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


class Noting(fs.Strategy[list[int]]):
    """Writes down how long the training will be, as its hooks are told."""

    name: ClassVar[str] = "noting"
    told: ClassVar[dict[str, set[int | None]]] = {}

    def on_gradients(self, worker, state):
        self.told.setdefault("on_gradients", set()).add(worker.total_steps)

    def after_step(self, worker, state):
        self.told.setdefault("after_step", set()).add(worker.total_steps)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_all_hooks_are_told_the_same_length_of_the_training(accumulate):
    """After a step as well, whose batches do not count as used yet."""
    Noting.told.clear()

    def program(comm):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = fs.Worker(comm, model, optimizer, Noting())
        batches = worker.batches(torch.ones(24, 2), batch_size=1, accumulate=accumulate)
        for number, batch in enumerate(batches, start=1):
            loss = model(batch).mean()
            loss.backward()
            if number % accumulate == 0:
                worker.step(loss)

    fs.launch(program, 2)
    assert Noting.told == {name: {12 // accumulate} for name in ("on_gradients", "after_step")}


@pytest.mark.parametrize("change", ["replace", "add", "remove"])
def test_a_model_whose_parameters_become_others_is_an_error(change):
    def program(comm):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), 0.1), fs.LocalSGD(2))
        for step in range(2):
            loss = model(torch.ones(4, 3)).sum()
            loss.backward()
            if step and change == "replace":
                model[0].weight = nn.Parameter(torch.zeros(2, 3))
            elif step and change == "add":
                model.append(nn.Linear(2, 2))
            elif step:
                del model[1]
            worker.step(loss)

    named = {"replace": "'0.weight'", "add": "'2.bias', '2.weight'", "remove": "'one is gone'"}
    with pytest.raises(fs.FlockstepError, match=rf"other parameters than .*\({named[change]}\)"):
        fs.launch(program, 2)
