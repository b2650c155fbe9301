"""Against implementations that are not ours: torch's own, on real processes over gloo, same
seeds and batches.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.strategies.harness import STEPS, B, W, X, Y, distributed, flat, net, sgd
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import flockstep as fs

CLOSE = {"rtol": 1e-5, "atol": 1e-8}


def join_gloo(comm, folder):
    """Torch's own process group, which ends with the worker's process.

    It is not destroyed: a hook's last callback, on one of its own threads, may be the last to hold
    it, and the thread would then wait for itself to end."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size
    )


def loop(comm, model, optimizer, after_step=lambda: None, steps=STEPS):
    mine = slice(comm.rank * B, (comm.rank + 1) * B)
    for x, y in zip(X[:steps], Y[:steps], strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        after_step()


def test_post_local_sgd_is_torchs(local, tmp_path):
    switch, period = 6, 4

    def program(comm):
        join_gloo(comm, tmp_path)
        model = net()
        parallel = DistributedDataParallel(model)
        state = post_local.PostLocalSGDState(
            None, None, switch, post_local_gradient_allreduce=False
        )
        parallel.register_comm_hook(state, post_local.post_localSGD_hook)
        # Torch's averager counts calls from 0 and averages first at its last warm-up step.
        averager = PeriodicModelAverager(period, warmup_steps=switch + period - 1)
        loop(comm, parallel, sgd(model), lambda: averager.average_parameters(model.parameters()))
        return flat(model)

    theirs = fs.launch(program, W, local)
    ours = distributed(fs.PostLocalSGD(switch, period), local)
    for (before, _), expected in zip(ours, theirs, strict=True):
        assert torch.allclose(before, expected, **CLOSE)
    assert not torch.allclose(theirs[0], theirs[1], **CLOSE)  # the last average is two steps ago


def test_households_are_torchs_hierarchical_averager(local, tmp_path):
    def program(comm):
        join_gloo(comm, tmp_path)
        model = net()
        averager = HierarchicalModelAverager(OrderedDict([(2, 2), (8, W)]))
        averager.step = 1  # it counts calls from 0
        loop(
            comm,
            model,
            sgd(model),
            lambda: averager.average_parameters(model.parameters()),
            steps=19,
        )
        return flat(model)

    theirs = fs.launch(program, W, local)
    ours = distributed(fs.Households(count=2, world_period=8, household_period=2), local, steps=19)
    for (before, _), expected in zip(ours, theirs, strict=True):
        assert torch.allclose(before, expected, **CLOSE)
    assert not torch.allclose(theirs[0], theirs[3], **CLOSE)


def wide_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    ).double()


@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd_is_torchs_hook(local, tmp_path, rank):
    plain = 2  # torch's hook starts after steps of plain averaging

    def torchs(comm):
        join_gloo(comm, tmp_path)
        model = wide_net()
        parallel = DistributedDataParallel(model)
        state = power.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=plain, random_seed=5
        )
        parallel.register_comm_hook(state, power.powerSGD_hook)
        loop(comm, parallel, sgd(model))
        return flat(model)

    def ours(comm):
        model = wide_net()
        worker = fs.Worker(comm, model, sgd(model), fs.SyncSGD())
        mine = slice(comm.rank * B, (comm.rank + 1) * B)
        for step, (x, y) in enumerate(zip(X, Y, strict=True)):
            if step == plain:
                worker = fs.Worker(comm, model, sgd(model), fs.SyncSGD(codec=fs.PowerSGD(rank)))
                memory = worker.state.averager.memory
                # Torch draws its first factors in the order of its buckets, the last layer's first.
                draw = np.random.RandomState(5)
                torch.manual_seed(draw.randint(1_000_000_000))
                for basis in reversed(memory.bases):
                    basis.copy_(torch.randn(basis.shape, dtype=torch.float64))
            loss = F.cross_entropy(model(x[mine]), y[mine])
            loss.backward()
            worker.step(loss)
        return flat(model)

    for one, other in zip(fs.launch(ours, W, local), fs.launch(torchs, W, local), strict=True):
        assert torch.allclose(one, other, **CLOSE)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_step_of_diloco_is_torchs_optimizer(nesterov):
    """By hand: the mean change since the last exchange is a gradient for torch.optim.SGD."""
    period, exchanges = 4, 5
    theta = nn.Parameter(flat(net()))
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=nesterov)
    replicas = [net() for _ in range(W)]
    optimizers = [sgd(replica, momentum=0.9) for replica in replicas]
    for step in range(period * exchanges):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            mine = slice(rank * B, (rank + 1) * B)
            optimizer.zero_grad()
            F.cross_entropy(replica(X[step][mine]), Y[step][mine]).backward()
            optimizer.step()
        if (step + 1) % period == 0:
            theta.grad = theta.detach() - torch.stack([flat(replica) for replica in replicas]).mean(
                0
            )
            outer.step()
            for replica in replicas:
                nn.utils.vector_to_parameters(theta.detach().clone(), replica.parameters())
    for before, after in distributed(
        fs.DiLoCo(period, nesterov=nesterov), momentum=0.9, steps=period * exchanges
    ):
        assert torch.allclose(before, theta.detach(), rtol=1e-9)
        assert torch.equal(before, after)


def test_slow_momentum_follows_its_equations():
    """u ← βu + (x_0 − x̄)/γ; x_0 ← x_0 − αγu, with a learning rate that changes between
    exchanges.
    """
    period, alpha, beta = 3, 0.8, 0.6

    def rate(step):
        return 0.1 if step < 7 else 0.02

    def program(comm):
        model = net()
        optimizer = sgd(model)
        worker = fs.Worker(comm, model, optimizer, fs.SlowMo(period, alpha, beta))
        mine = slice(comm.rank * B, (comm.rank + 1) * B)
        for step in range(12):
            optimizer.param_groups[0]["lr"] = rate(step)
            loss = F.cross_entropy(model(X[step][mine]), Y[step][mine])
            loss.backward()
            worker.step(loss)
        return flat(model)

    replicas = [net() for _ in range(W)]
    start, velocity = flat(replicas[0]), 0.0
    for step in range(12):
        for rank, replica in enumerate(replicas):
            mine = slice(rank * B, (rank + 1) * B)
            replica.zero_grad()
            F.cross_entropy(replica(X[step][mine]), Y[step][mine]).backward()
            sgd(replica, rate(step)).step()
        if (step + 1) % period == 0:
            mean = torch.stack([flat(replica) for replica in replicas]).mean(0)
            velocity = beta * velocity + (start - mean) / rate(step)
            start = start - alpha * rate(step) * velocity
            for replica in replicas:
                nn.utils.vector_to_parameters(start.clone(), replica.parameters())
    for result in fs.launch(program, W):
        assert torch.allclose(result, start, rtol=1e-9, atol=1e-12)
