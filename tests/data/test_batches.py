"""Which samples a worker sees, and in what batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import flockstep as fs
from flockstep.data import batches

SIZES = st.tuples(st.integers(1, 200), st.integers(1, 40)).filter(lambda pair: pair[0] >= pair[1])


@given(sizes=SIZES, seed=st.integers(0, 100))
def test_disjoint_gives_each_sample_to_one_worker_and_drops_none(sizes, seed):
    samples, workers = sizes
    parts = fs.Disjoint().assign(samples, workers, seed)
    assert sorted(np.concatenate(parts)) == list(range(samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(sizes=SIZES)
def test_full_overlap_gives_everything_to_everybody(sizes):
    samples, workers = sizes
    for part in fs.FullOverlap().assign(samples, workers, 0):
        assert sorted(part) == list(range(samples))


def test_the_seed_decides_the_assignment():
    first, again, other = (fs.Disjoint().assign(100, 4, seed)[0].tolist() for seed in (0, 0, 1))
    assert first == again != other


@given(sizes=SIZES, batch_size=st.integers(1, 30), epoch=st.integers(0, 3))
def test_an_epoch_shows_every_sample_in_the_same_number_of_steps_to_all(sizes, batch_size, epoch):
    samples, workers = sizes
    data = torch.arange(samples)
    seen, steps = [], set()
    for rank in range(workers):
        plan = batches.plan(data, batch_size, fs.Disjoint(), workers, rank, seed=3)
        rows = list(plan.epoch(epoch))
        steps.add(len(rows))
        own = torch.cat([batch for batch, _ in rows]).tolist()
        assert [count for _, count in rows] == [len(batch) for batch, _ in rows]
        assert len(own) - len(set(own)) <= 1  # at most one is seen again, to keep up with a larger share
        seen += set(own)
    assert sorted(seen) == list(range(samples))
    assert len(steps) == 1


def test_the_order_depends_on_seed_rank_and_epoch_alone():
    def order(seed, rank, epoch):
        plan = batches.plan(torch.arange(60), 7, fs.FullOverlap(), 3, rank, seed)
        return torch.cat([batch for batch, _ in plan.epoch(epoch)]).tolist()

    assert order(0, 1, 2) == order(0, 1, 2)
    assert len({tuple(order(*key)) for key in [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3)]}) == 4


class Squares(Dataset):
    """A map-style dataset of the user's own."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor(float(index)), index * index


@pytest.mark.parametrize(
    "dataset",
    [
        Squares(),
        TensorDataset(torch.arange(10.0), torch.arange(10) ** 2),
        (torch.arange(10.0), torch.arange(10) ** 2),
        (np.arange(10.0), np.arange(10) ** 2),
    ],
    ids=["map-style", "TensorDataset", "tensors", "arrays"],
)
def test_datasets_of_every_kind_give_batches(dataset):
    def program(comm):
        model = torch.nn.Linear(1, 1)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.Independent())
        rows = [(x.tolist(), y.tolist()) for x, y in worker.batches(dataset, batch_size=2, epochs=2)]
        return rows, worker.samples, worker.epoch, worker.total_steps

    results = fs.launch(program, 2)
    seen = sorted(pair for rows, *_ in results for xs, ys in rows for pair in zip(xs, ys, strict=True))
    assert seen == sorted([(float(k), k * k) for k in range(10)] * 2)
    assert [rest for _, *rest in results] == [[10, 2, 6]] * 2


def test_epochs_go_on_counting_over_several_loops():
    def program(comm):
        model = torch.nn.Linear(1, 1)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.Independent())
        loops = [[batch.tolist() for batch in worker.batches(torch.arange(50), 25)] for _ in range(2)]
        return loops, worker.epoch

    (first, second), epochs = fs.launch(program, 1)[0]
    assert epochs == 2
    assert first != second
