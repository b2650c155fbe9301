"""What every strategy must satisfy: the rows of the table by the tests of this file."""

from __future__ import annotations

import dataclasses
import os
import signal
from itertools import islice

import pytest
import torch
from tests.strategies.harness import X, distributed, flat, net_with_statistics, sgd, single, train
from tests.strategies.invalid import INVALID
from tests.strategies.table import TABLE, Size
from tests.support.left_behind import KEPT
from tests.test_worker import MODELS, OPTIMIZERS, batches
from torch import nn
from torch.nn import functional as F

import flockstep as fs
from flockstep.codecs import CODECS
from flockstep.strategies import STRATEGIES

every_row = pytest.mark.parametrize("row", TABLE, ids=str)


def test_no_strategy_is_left_out():
    assert {type(row.strategy) for row in TABLE} == set(STRATEGIES.values())


def test_no_field_goes_unchecked():
    specs = {*STRATEGIES.values(), *CODECS.values()}
    fields = {(spec, field.name) for spec in specs for field in dataclasses.fields(spec)}
    assert {(spec, name) for spec, values, _ in INVALID for name in values} == fields


@pytest.mark.parametrize(("spec", "values", "message"), INVALID)
def test_every_field_is_checked(spec, values, message):
    with pytest.raises(ValueError) as raised:
        spec(**values)
    assert message in str(raised.value)


@every_row
def test_one_worker_is_plain_training(row):
    ((before, after),) = distributed(row.strategy, workers=1, momentum=0.9)
    expected = single(momentum=0.9, workers=1)
    assert torch.equal(before, expected)
    assert torch.equal(after, expected)


@every_row
def test_the_same_seed_gives_the_same_bits_and_the_same_representative_on_all(row):
    """With uneven workers and any number of lanes."""
    how = {"compute": fs.Compute(jitter=0.5), "seed": 7}
    one, two = [
        distributed(row.strategy, workers=row.workers, options={**how, "lanes": lanes})
        for lanes in (1, 2)
    ]
    for ours, theirs in zip(one, two, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[1], one[0][1])


def all_rows(backend):
    """Of each row every worker's parameters before and after finish. The rows of as many workers
    are in one launch, each with a Worker of its own.
    """
    found = {}
    for workers in {row.workers for row in TABLE}:
        strategies = [row.strategy for row in TABLE if row.workers == workers]

        def program(comm, strategies=strategies):
            told = []
            for strategy in strategies:
                worker, _ = train(comm, strategy)
                before = flat(worker.model)
                told.append((before, flat(worker.finish())))
            return told

        told = fs.launch(program, workers, backend)
        found |= zip(map(repr, strategies), zip(*told, strict=True), strict=True)
    return found


@pytest.fixture(scope="module")
def simulated():
    return all_rows(fs.Simulator(lanes=1))  # models are drawn between steps


@pytest.fixture(scope="module", params=KEPT)
def real(request):
    return all_rows(request.getfixturevalue(request.param))


@every_row
def test_real_processes_agree_with_the_simulator(row, real, simulated):
    """Within rounding where the method leaves nothing to chance; otherwise they end somewhere,
    and all alike.
    """
    told = real[str(row)]
    assert all(torch.equal(after, told[0][1]) for _, after in told)
    if row.repeats:
        assert told[0][1].isfinite().all()
        return
    for ours, theirs in zip(told, simulated[str(row)], strict=True):
        assert torch.allclose(ours[0], theirs[0], rtol=1e-9, atol=1e-12)
        assert torch.allclose(ours[1], theirs[1], rtol=1e-9, atol=1e-12)


@every_row
@pytest.mark.parametrize("model", [None, net_with_statistics], ids=["plain", "with statistics"])
def test_bytes_follow_the_formula(row, model):
    steps = 11

    def program(comm):
        worker, _ = train(
            comm, row.strategy, steps=steps, **({"make_model": model} if model else {})
        )
        worker.finish()
        return comm.meter.bytes_sent, worker.flat.parameters.nbytes, worker.flat.buffers.nbytes

    told = fs.launch(program, row.workers)
    size = Size(row.workers, steps, told[0][1], told[0][2])
    moved = sum(nbytes for nbytes, *_ in told)
    if row.reads:
        assert row.bytes(size) / 4 < moved <= row.bytes(size)
    elif row.bytes is not None:
        assert moved == row.bytes(size)
    else:  # a number of messages that chance decides
        messages, rest = divmod(moved - size.ring(size.s + 8), size.s + 8)
        assert rest == 0
        assert 0.25 < messages / (steps * row.workers) < 0.75


@every_row
def test_statistics_are_those_of_the_representative(row):
    """Every worker ends with the same statistics of batch normalisation, and they have moved
    from where they began.
    """

    def program(comm):
        worker, _ = train(comm, row.strategy, make_model=net_with_statistics, steps=9)
        model = worker.finish()
        return model[1].running_mean.clone(), model[1].running_var.clone()

    told = fs.launch(program, row.workers)
    for mean, variance in told:
        assert torch.equal(mean, told[0][0])
        assert torch.equal(variance, told[0][1])
        assert (variance > 0).all()
        assert not torch.equal(mean, torch.zeros_like(mean))


@every_row
@pytest.mark.parametrize("model", MODELS)
def test_any_model_trains_with_any_optimizer_and_ends_equal_on_all_workers(row, model):
    """Tied and frozen parameters, statistics, strides, half precision; with Adam, whose changes
    are no gradients.
    """

    def program(comm):
        net = MODELS[model]()
        worker = fs.Worker(comm, net, OPTIMIZERS["adam"](net), row.strategy)
        worker.total_steps = 10
        for x, y in islice(batches(), 4):
            inputs = x.to(next(net.parameters()).dtype)
            loss = worker.adjust_loss(F.cross_entropy(net(inputs).float(), y), (inputs, y))
            loss.backward()
            worker.step(loss, accuracy=0.5)
        return worker.finish().state_dict()

    first, *others = fs.launch(program, row.workers)
    for name, value in first.items():
        assert value.isfinite().all()
        if not name.endswith("num_batches_tracked"):
            assert all(torch.equal(value, other[name]) for other in others), name


class Far(nn.Module):
    """A single number, which only the strategy moves."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, _):
        return self.x.expand(1, 1)


@pytest.mark.parametrize("backend", ["sim", "local"])
@every_row
def test_training_goes_on_without_a_worker_that_failed_and_finish_never_mixes_it_in(
    row, backend, request
):
    """After its second step the last worker moves a million off and dies; the others take three
    more, and finish. In the simulator it has computed its third.
    """
    faults = fs.Faults(deaths={row.workers - 1: "3 steps"})
    is_simulated = backend == "sim"
    place = fs.Simulator(faults=faults) if is_simulated else request.getfixturevalue(backend)

    def program(comm):
        model = Far()
        worker = fs.Worker(comm, model, sgd(model, lr=0.0), row.strategy)
        worker.total_steps = 5
        for step in range(5):
            if comm.rank == comm.size - 1 and step == 2:
                with worker.changing_parameters(), torch.no_grad():
                    model.x.add_(0.0 if row.shares else 1e6)
                if not is_simulated:
                    os.kill(os.getpid(), signal.SIGKILL)
            loss = worker.adjust_loss(model(None).sum() * 0, (None, None))
            loss.backward()
            worker.step(loss, accuracy=0.0)
        return flat(worker.finish()).item()

    if row.loses:
        with pytest.raises(fs.WorkerLost):
            fs.launch(program, row.workers, place, on_failure="continue")
        return
    *values, lost = fs.launch(program, row.workers, place, on_failure="continue")
    assert isinstance(lost, fs.WorkerLost)
    assert values == [0.0] * (row.workers - 1)


@every_row
def test_statistics_can_be_computed_anew_from_data(row):
    data = X.reshape(-1, X.shape[-1])

    def program(comm):
        worker, _ = train(comm, row.strategy, make_model=net_with_statistics, steps=3)
        model = fs.recalibrate(worker.finish(), (data, data), batch_size=len(data))
        inside = model[0](data)
        return (
            model[1].running_mean - inside.mean(0),
            model[1].running_var - inside.var(0),
            model.training,
        )

    for mean, variance, is_training in fs.launch(program, row.workers):
        assert mean.abs().max() < 1e-12
        assert variance.abs().max() < 1e-12
        assert is_training
