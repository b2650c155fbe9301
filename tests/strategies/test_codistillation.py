"""Codistillation against torch's own cross entropy of soft targets, on models trained side by
side by hand.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.strategies.harness import (
    B,
    Vector,
    X,
    Y,
    distributed,
    flat,
    net_with_statistics,
    sgd,
    train,
)
from torch import nn
from torch.nn import functional as F

import flockstep as fs


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_the_loss_gains_the_teachers_soft_targets(topology):
    groups, steps, period, burn_in, weight, heat = 3, 11, 3, 4, 0.7, 2.0
    models = [net_with_statistics() for _ in range(groups)]
    optimizers = [sgd(model) for model in models]
    teachers: list[list[nn.Module]] = [[] for _ in models]
    for step in range(steps):
        if step >= burn_in and (step - burn_in) % period == 0:
            copies = [copy.deepcopy(model).eval() for model in models]
            for rank in range(groups):
                teachers[rank] = (
                    [copies[rank - 1]]
                    if topology == "ring"
                    else [c for r, c in enumerate(copies) if r != rank]
                )
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = slice(rank * B, (rank + 1) * B)
            logits = model(X[step][mine])
            loss = F.cross_entropy(logits, Y[step][mine])
            if teachers[rank]:
                with torch.no_grad():
                    soft = sum(
                        F.softmax(t(X[step][mine]) / heat, dim=1) for t in teachers[rank]
                    ) / len(teachers[rank])
                loss = loss + weight * heat**2 * F.cross_entropy(logits / heat, soft)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    strategy = fs.Codistillation(groups, period, burn_in, weight, heat, topology)

    def program(comm):
        worker, _ = train(comm, strategy, steps=steps, make_model=net_with_statistics)
        before = (
            flat(worker.model),
            worker.model[1].running_mean.clone(),
            int(worker.model[1].num_batches_tracked),
        )
        return before, worker.smooth_loss, flat(worker.finish()), pickle.dumps(worker.model)

    told = fs.launch(program, groups)
    for model, ((parameters, mean, tracked), *_) in zip(models, told, strict=True):
        assert torch.allclose(parameters, flat(model), rtol=1e-9, atol=1e-12)
        assert torch.allclose(mean, model[1].running_mean, rtol=1e-9, atol=1e-12)
        assert tracked == steps  # teachers leave no trace
    best = min(range(groups), key=lambda rank: told[rank][1])
    for _, _, after, pickled in told:
        assert torch.equal(after, told[best][0][0])
        assert not pickle.loads(pickled)._forward_hooks  # the model is an ordinary one again


def test_groups_are_synchronous_inside_and_differ():
    first, second, third, fourth = (before for before, _ in distributed(fs.Codistillation(2, 3, 2)))
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.allclose(first, third)


def test_without_weight_groups_train_as_if_alone():
    alone = distributed(fs.Codistillation(2, 100, 100))
    taught = distributed(fs.Codistillation(2, 3, 2, weight=0.0))
    for (one, _), (other, _) in zip(alone, taught, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


def test_a_loop_that_leaves_the_teachers_out_of_its_loss_is_told():
    def program(comm):
        model = Vector(torch.zeros(2))
        worker = fs.Worker(comm, model, sgd(model), fs.Codistillation(2, 1, 0))
        worker.step(1.0)

    with pytest.raises(
        fs.FlockstepError,
        match=r"rank \d: Codistillation is part of the loss: call loss = worker.adj",
    ):
        fs.launch(program, 2)
