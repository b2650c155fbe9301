"""Batches that are prepared while the model computes: by a thread, or by a DataLoader."""

from __future__ import annotations

import os
import threading

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

import flockstep as fs

SAMPLES = 22
X = torch.arange(SAMPLES * 3.0).reshape(SAMPLES, 3)


class Squares(Dataset):
    """A data set as users write them: one sample at a time."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index < 0:
            raise IndexError(index)
        return X[index], index * index


class Broken(Squares):
    def __getitem__(self, index):
        raise OSError(f"sample {index} cannot be read")


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(SAMPLES))


def flip(random, x):
    return (x * torch.from_numpy(random.choice([-1, 1], size=(len(x), 1))),)


AUGMENTED = fs.InMemory(X, augment=flip)


def together(samples):
    """A collate function of one's own."""
    return {"inputs": torch.stack([x for x, _ in samples]), "sizes": [y for _, y in samples]}


def make(comm):
    model = nn.Linear(3, 1)
    return fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.Independent())


def taken(worker, *data, **how):
    return [batch for batch in worker.batches(*data, **how) if worker.step(1.0)]


def launch(program, workers=2):
    return fs.launch(program, workers, seed=3)


BEFORE: set[int] = set()  # processes that other tests keep


@pytest.fixture(autouse=True)
def _others_processes():
    BEFORE.clear()
    BEFORE.update(each.pid for each in psutil.Process().children())


def background():
    """Threads that prepare batches, and processes of this one."""
    threads = [each for each in threading.enumerate() if "batches" in each.name]
    children = [each for each in psutil.Process().children() if each.pid not in BEFORE]
    return len(threads), len(children)


def equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return True


# --- the same batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 5, 100])
@pytest.mark.parametrize(
    "data", [Squares(), AUGMENTED, Numbers(), (X, X)], ids=lambda each: type(each).__name__
)
def test_prefetched_batches_are_the_same(data, prefetch):
    plain = launch(lambda comm: taken(make(comm), data, 4, epochs=3))
    ahead = launch(lambda comm: taken(make(comm), data, 4, epochs=3, prefetch=prefetch))
    assert equal(ahead, plain)


def test_they_are_prepared_before_they_are_asked_for():
    """The second is there although the loop still has the first."""

    class Noted(Squares):
        def __init__(self):
            self.is_there = threading.Event()
            self.asked = 0

        def __getitem__(self, index):
            self.asked += 1
            if self.asked == 8:
                self.is_there.set()
            return super().__getitem__(index)

    def program(comm):
        data = Noted()
        batches = iter(make(comm).batches(data, 4, prefetch=1))
        next(batches)
        return data.is_there.wait(60)

    assert launch(program, 1) == [True]


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("data", [Squares(), AUGMENTED], ids=["samples", "augmented"])
def test_a_loader_gives_the_batches_of_its_data_set(data, processes):
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=processes)
    plain = launch(lambda comm: taken(make(comm), data, 4, epochs=2))
    loaded = launch(lambda comm: taken(make(comm), loader, epochs=2))
    assert equal(loaded, plain)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("collate", [None, together])
@pytest.mark.parametrize("data", [Squares(), TensorDataset(X)], ids=["samples", "tensors"])
def test_one_worker_gets_what_the_loader_itself_gives(data, collate, drop_last):
    """Without shuffling."""
    if collate is not None and isinstance(data, TensorDataset):
        collate = torch.utils.data.default_convert
    loader = DataLoader(data, batch_size=4, collate_fn=collate, drop_last=drop_last)
    ours, theirs = launch(lambda comm: taken(make(comm), loader), 1)[0], list(loader)
    assert len(ours) == len(theirs) == (5 if drop_last else 6)
    for our, their in zip(ours, theirs, strict=True):
        assert equal(tuple(our) if isinstance(our, list) else our, type(our)(their))


def test_batches_that_are_not_whole_are_dropped_on_all_workers():
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, drop_last=True)

    def program(comm):
        worker, seen = make(comm), []
        batches = worker.batches(loader, epochs=2)
        assert batches.steps == 4
        for x, _ in batches:
            worker.step(1.0)
            seen.append((len(x), worker.epoch))
        return seen

    assert launch(program) == [[(4, 0), (4, 1), (4, 1), (4, 2)]] * 2


def test_a_loader_may_draw_with_replacement_and_sampling_may_say_otherwise():
    sampler = torch.utils.data.RandomSampler(Squares(), replacement=True)
    loader = DataLoader(Squares(), batch_size=4, sampler=sampler)

    def seen(**how):
        return launch(lambda comm: taken(make(comm), loader, epochs=1, **how), 1)

    drawn = fs.Sampling("with_replacement")
    assert equal(seen(), launch(lambda comm: taken(make(comm), Squares(), 4, sampling=drawn), 1))
    in_order = seen(sampling=fs.Sampling("in_order"))
    assert torch.equal(torch.cat([x for x, _ in in_order[0]]), X)


def test_what_a_loaders_processes_draw_is_named_by_the_run():
    """And nothing is drawn from the worker's own stream."""

    class Noisy(Squares):
        def __getitem__(self, index):
            return torch.rand(2)

    def program(comm):
        loader, worker = DataLoader(Noisy(), batch_size=4, num_workers=1), make(comm)
        before = torch.get_rng_state()
        drawn = [torch.cat(taken(worker, loader)) for _ in range(2)]
        return drawn, torch.equal(torch.get_rng_state(), before)

    first, again = launch(program), launch(program)
    assert equal(first, again)
    ranks = [drawn for drawn, is_untouched in first if is_untouched]
    all_of_them = torch.cat([each for drawn in ranks for each in drawn])
    assert len(all_of_them.unique()) == len(all_of_them.flatten()) == 2 * 2 * SAMPLES


def test_a_loader_of_a_stream():
    loader = DataLoader(Numbers(), batch_size=3, collate_fn=sum)
    assert launch(lambda comm: taken(make(comm), loader)) == [
        [0 + 2 + 4, 6 + 8 + 10, 12 + 14 + 16, 18 + 20],
        [1 + 3 + 5, 7 + 9 + 11, 13 + 15 + 17, 19 + 21],
    ]


def test_a_loop_over_epochs_and_one_that_goes_on_where_it_was_broken_off():
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1)

    def parts(comm, data, *size, **how):
        worker, found = make(comm), []
        batches = worker.batches(data, *size, epochs=3, **how)
        for batch in batches:
            found.append(batch)
            worker.step(1.0)
            if len(found) == 2:
                break
        found += [next(batches)]
        for epoch in batches.by_epoch():
            for batch in epoch:
                found.append(batch)
                if len(found) == 5:
                    break
        return found

    plain = launch(lambda comm: parts(comm, Squares(), 4))
    assert equal(launch(lambda comm: parts(comm, Squares(), 4, prefetch=3)), plain)
    assert equal(launch(lambda comm: parts(comm, loader)), plain)


# --- the end --------------------------------------------------------------------------------------


def prefetched(worker):
    return worker.batches(Squares(), 4, epochs=2, prefetch=2), (1, 0)


def loaded(worker):
    loader = DataLoader(Squares(), batch_size=4, num_workers=2)
    return worker.batches(loader, epochs=2), (0, 2)


@pytest.mark.parametrize("begin", [prefetched, loaded])
@pytest.mark.parametrize("end", ["all", "break", "raise", "epochs", "next"])
def test_threads_and_processes_end_with_the_loop(begin, end):
    def program(comm):
        worker = make(comm)
        batches, expected = begin(worker)
        assert background() == (0, 0)
        try:
            if end == "next":
                next(batches)
            for epoch in batches.by_epoch() if end == "epochs" else [batches]:
                for _ in epoch:
                    assert background() == expected
                    worker.step(1.0)
                    if end == "break":
                        break
                    if end == "raise":
                        raise KeyError("own")
        except KeyError as error:
            assert error.__traceback__ is not None
            assert background() == (0, 0)
        return background()

    assert launch(program, 1) == [(0, 0)]


@pytest.mark.parametrize("begin", [prefetched, loaded])
def test_they_end_when_the_worker_finishes(begin):
    def program(comm):
        worker = make(comm)
        batches, expected = begin(worker)
        next(batches)
        assert background() == expected
        worker.finish()
        return background()

    assert launch(program, 1) == [(0, 0)]


@pytest.mark.parametrize("how", ["prefetch", "loader"])
def test_what_a_data_set_raises_is_raised_in_the_loop(how):
    def program(comm):
        loader = DataLoader(Broken(), batch_size=4, num_workers=1)
        if how == "prefetch":
            taken(make(comm), Broken(), 4, prefetch=2)
        else:
            taken(make(comm), loader)

    with pytest.raises(OSError, match=r"(?s)rank \d raised OSError: .*sample \d+ cannot"):
        launch(program)
    assert background() == (0, 0)


def test_on_local_processes(local):
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=1)

    def program(comm):
        worker = make(comm)
        found = taken(worker, Squares(), 4, prefetch=2) + taken(worker, loader)
        return found, background(), os.getpid()

    for rank, (found, left, pid) in enumerate(fs.launch(program, 2, local, seed=3)):
        expected = launch(lambda comm: taken(make(comm), Squares(), 4, epochs=2))
        assert equal(found, expected[rank])
        assert left == (0, 0)
        assert not psutil.pid_exists(pid)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "how", "message"),
    [
        (DataLoader(Squares(), 4), {"batch_size": 4}, "'batch_size' must be left out with a Data"),
        (DataLoader(Squares(), 4), {"prefetch": 1}, "'prefetch' must be left out with a DataLoade"),
        (DataLoader(Squares(), None), {}, "'batch_size' of the DataLoader must be a number"),
        (
            DataLoader(Squares(), 4, sampler=DistributedSampler(Squares(), 2, 0)),
            {},
            "'sampler' of the DataLoader must be left out: .* (got a DistributedSampler)",
        ),
        (
            DataLoader(Squares(), 4, sampler=WeightedRandomSampler([1.0], 1)),
            {},
            "'sampler' of the DataLoader must be left out: .* (got a WeightedRandomSampler)",
        ),
        (DataLoader(Numbers(), 4, num_workers=1), {}, "'num_workers' must be left out with an Ite"),
        (DataLoader(Squares(), 12, drop_last=True), {}, "'batch_size' must be at most the samples"),
        (Squares(), {}, "'batch_size' must be given"),
        (Squares(), {"batch_size": 4, "prefetch": -1}, "'prefetch' must be at least 0 (got -1)"),
    ],
)
def test_what_cannot_be_loaded(data, how, message):
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(fs.InvalidField, match=pattern):
        launch(lambda comm: make(comm).batches(data, **how))
