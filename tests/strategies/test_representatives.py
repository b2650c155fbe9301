"""Which model stands for a run whose replicas differ: the mean of all, the best, or any."""

from __future__ import annotations

import pytest
import torch
from tests.strategies.harness import train

import flockstep as fs

WORKERS, STEPS = 5, 11
PEERS = [fs.GoSGD, fs.ADPSGD, fs.DPSGD]


def settled(worker):
    """The worker's own state, once all that was sent to it has been taken."""
    worker.comm.barrier()
    own, rank, state = worker.flat.state.clone(), worker.comm.rank, worker.state
    if isinstance(worker.strategy, fs.ADPSGD) and rank in state.models:
        own = state.models[rank].read()
    weight = 1.0
    if isinstance(worker.strategy, fs.GoSGD):
        box = state.mailboxes[rank].read()
        weight = state.weight + float(box[-1])
        own = (state.weight * own + box[:-1]) / weight
    worker.comm.barrier()
    return own, weight


def ended(make, representative, seed):
    """Of each worker its own state, its weight, its mean loss, and what stands for the run."""

    def program(comm):
        worker, losses = train(comm, make(representative=representative), steps=STEPS)
        smooth = losses[0]
        for loss in losses[1:]:
            smooth = 0.9 * smooth + 0.1 * loss
        own, weight = settled(worker)
        shown = worker.preview()
        worker.finish()
        assert torch.equal(shown, worker.flat.state)
        return own, weight, smooth, shown

    told = fs.launch(program, WORKERS, seed=seed, compute=fs.Compute(0.01, jitter=0.5))
    owns, weights, losses, shown = zip(*told, strict=True)
    assert all(torch.equal(each, shown[0]) for each in shown)
    assert not torch.allclose(owns[0], owns[-1])
    return torch.stack(owns), torch.tensor(weights, dtype=torch.float64), losses, shown[0]


def same_as(owns, shown):
    """The ranks whose state it is."""
    return [
        rank for rank, own in enumerate(owns) if torch.allclose(own, shown, rtol=1e-12, atol=1e-14)
    ]


@pytest.mark.parametrize("make", PEERS, ids=lambda make: make.__name__)
def test_the_mean_counts_every_worker_and_gossip_by_its_weight(make):
    owns, weights, _, shown = ended(make, "mean", seed=0)
    mean = (weights[:, None] * owns).sum(0) / weights.sum()
    assert torch.allclose(shown, mean, rtol=1e-12, atol=1e-14)
    assert same_as(owns, shown) == []


@pytest.mark.parametrize("make", PEERS, ids=lambda make: make.__name__)
def test_the_best_has_the_lowest_loss_over_its_last_steps(make):
    owns, _, losses, shown = ended(make, "best", seed=0)
    assert losses.index(min(losses)) in same_as(owns, shown)


@pytest.mark.parametrize("make", PEERS, ids=lambda make: make.__name__)
def test_any_is_one_that_the_seed_picks(make):
    picked = []
    for seed in range(6):
        owns, _, _, shown = ended(make, "any", seed)
        picked.append(tuple(same_as(owns, shown)))
    assert all(picked)
    assert len(set(picked)) > 1
