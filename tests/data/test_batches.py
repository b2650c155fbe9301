"""What batches a worker sees: of any data, in what order, cut where, and again after an
interruption.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import flockstep as fs
from flockstep.data import plan_batches
from flockstep.data.sources import in_order, source_of

SIZES = st.tuples(st.integers(1, 200), st.integers(1, 40)).filter(lambda pair: pair[0] >= pair[1])
few = settings(max_examples=50, deadline=None)

ASSIGNMENTS_OF_4 = [
    fs.Disjoint(),
    fs.FullOverlap(),
    fs.Coarse(2),
    fs.MediumCoarse(3),
    fs.FineGrained(2),
    fs.HouseholdShards(2, 1),
    fs.HouseholdOverlap(2, fs.MediumCoarse(2)),
    fs.NeighbourhoodOverlap(2, 2),
]
SAMPLINGS = [
    fs.Sampling(),
    fs.Sampling("shuffle_once"),
    fs.Sampling("with_replacement"),
    fs.Sampling(shuffle="global"),
    fs.Sampling("with_replacement", shuffle="global"),
]


def plan(data, batch_size, epochs=1, assignment=None, sampling=None, workers=1, rank=0, seed=0):
    made = plan_batches(
        data,
        batch_size,
        epochs,
        assignment or fs.Disjoint(),
        sampling,
        workers=workers,
        rank=rank,
        seed=seed,
    )
    return list(made.batches(resume_at=0, first_pass=0))


def seen(rows):
    return torch.cat([batch.data for batch in rows]).tolist()


@few
@given(sizes=SIZES, batch_size=st.integers(1, 30), epochs=st.integers(1, 3))
def test_an_epoch_shows_every_sample_in_the_same_number_of_steps_to_all(sizes, batch_size, epochs):
    samples, workers = sizes
    batch_size = min(batch_size, samples)
    rows_of = [
        plan(torch.arange(samples), batch_size, epochs, workers=workers, rank=rank)
        for rank in range(workers)
    ]
    assert len({len(rows) for rows in rows_of}) == 1
    steps = len(rows_of[0]) // epochs
    assert steps == -(-samples // (batch_size * workers))
    for epoch in range(epochs):
        shown = []
        for rows in rows_of:
            own = rows[epoch * steps : (epoch + 1) * steps]
            assert [batch.samples for batch in own] == [len(batch.data) for batch in own]
            assert [batch.ends_epoch for batch in own] == [False] * (steps - 1) + [True]
            drawn = seen(own)
            # At most one is seen again, to keep up with a larger share.
            assert len(drawn) - len(set(drawn)) <= 1
            shown += set(drawn)
        assert sorted(shown) == list(range(samples))


@few
@given(
    assignment=st.sampled_from(ASSIGNMENTS_OF_4),
    samples=st.integers(8, 200),
    batch_size=st.integers(1, 20),
    passes=st.integers(1, 4),
)
def test_epochs_end_after_equally_many_samples_whatever_the_overlap(
    assignment, samples, batch_size, passes
):
    """Every ⌈N/(B·M)⌉ steps, and with the last step."""
    batch_size = min(batch_size, samples)
    rows = plan(torch.arange(samples), batch_size, passes, assignment, workers=4)
    interval = -(-samples // (batch_size * 4))
    ends = [step for step, batch in enumerate(rows, 1) if batch.ends_epoch]
    expected = list(range(interval, len(rows) + 1, interval))
    assert ends == (expected if expected[-1:] == [len(rows)] else [*expected, len(rows)])


@few
@given(
    assignment=st.sampled_from(ASSIGNMENTS_OF_4),
    sampling=st.sampled_from(SAMPLINGS),
    samples=st.integers(8, 60),
    batch_size=st.integers(1, 8) | st.builds(fs.BatchGrowth, st.integers(1, 4), factor=st.just(3)),
    passes=st.integers(1, 3),
    data=st.data(),
)
def test_a_resumed_run_goes_on_with_the_very_next_batch(
    assignment, sampling, samples, batch_size, passes, data
):
    rank = data.draw(st.integers(0, 3))
    made = plan_batches(
        torch.arange(samples),
        batch_size,
        passes,
        assignment,
        sampling,
        workers=4,
        rank=rank,
        seed=5,
    )
    whole = list(made.batches(0, first_pass=0))
    stop = data.draw(st.integers(0, len(whole)))
    rest = list(made.batches(stop, first_pass=0))
    assert [batch.data.tolist() for batch in rest] == [
        batch.data.tolist() for batch in whole[stop:]
    ]
    assert [batch.ends_epoch for batch in rest] == [batch.ends_epoch for batch in whole[stop:]]
    before = whole[:stop]
    assert made.done_in(stop) == tuple(
        sum(getattr(batch, name) for batch in before)
        for name in ("samples", "ends_epoch", "ends_pass")
    )


def test_the_order_depends_on_seed_rank_and_epoch_alone():
    def order(seed, rank, epoch):
        rows = plan(torch.arange(60), 20, 3, fs.FullOverlap(), workers=3, rank=rank, seed=seed)
        return tuple(seen(rows[3 * epoch : 3 * epoch + 3]))

    assert order(0, 1, 2) == order(0, 1, 2)
    assert len({order(*key) for key in [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 1)]}) == 4


def orders(sampling, rank=1, epochs=3):
    rows = plan(torch.arange(40), 10, epochs, sampling=sampling, workers=4, rank=rank)
    return [seen(rows[epoch : epoch + 1]) for epoch in range(epochs)]


def test_shuffled_once_stays_in_that_order():
    first, *others = orders(fs.Sampling("shuffle_once"))
    assert others == [first, first]
    assert first != sorted(first)


def test_reshuffled_keeps_its_samples_and_changes_their_order():
    shown = orders(fs.Sampling())
    assert len({tuple(order) for order in shown}) == 3
    assert len({frozenset(order) for order in shown}) == 1


def test_with_replacement_draws_at_random_from_its_own():
    own = set(orders(fs.Sampling())[0])
    drawn = list(itertools.chain(*orders(fs.Sampling("with_replacement"), epochs=50)))
    assert set(drawn) == own
    counts = np.bincount(drawn, minlength=40)[sorted(own)]
    assert counts.sum() == 500
    # Each of ten samples is drawn 500 times with p = 1/10: mean 50, deviation 6.7, so five
    # deviations are 34.
    assert counts.min() > 50 - 34
    assert counts.max() < 50 + 34
    once = orders(fs.Sampling("with_replacement"))[0]
    assert len(set(once)) < len(once)


def test_a_global_shuffle_deals_anew_every_epoch_and_drops_nothing():
    shown = [orders(fs.Sampling(shuffle="global"), rank) for rank in range(4)]
    for epoch in range(3):
        assert sorted(itertools.chain(*(own[epoch] for own in shown))) == list(range(40))
    assert len({frozenset(order) for order in shown[0]}) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fs.Sampling("sorted"),
         r"'order' must be one of 'reshuffle', 'shuffle_once', 'with_replacement'"),
        (lambda: fs.Sampling(shuffle="world"),
         r"'shuffle' must be one of 'local', 'global' \(got 'world'\)"),
        (lambda: fs.Sampling("shuffle_once", "global"),
         r"'shuffle' must be 'local' with order='shuffle_once'"),
        (lambda: plan(torch.arange(9), 0), r"'batch_size' must be at least 1 \(got 0\)"),
        (lambda: plan(torch.arange(9), 1.5), r"'batch_size' must be a whole number \(got 1.5\)"),
        (lambda: plan(torch.arange(9), 2, epochs=0), r"'epochs' must be at least 1 \(got 0\)"),
        (lambda: plan(torch.arange(9), 2, assignment="disjoint"),
         r"'assignment' must be an assignment such as"),
        (lambda: plan(torch.tensor(3.0), 2),
         r"'dataset' must have samples along its first dimension"),
        (lambda: plan(iter([1]), 2),
         r"'dataset' must be tensors or arrays, .* \(got 'a list_iterator'\)"),
        (lambda: plan({"x": 3}, 2), r"'dataset' must be tensors or arrays, .* \(got 'a dict'\)"),
        (lambda: plan({"x": torch.zeros(3), "y": torch.zeros(2)}, 2),
         r"'dataset' must have parts of equal length"),
        (lambda: fs.InMemory(torch.zeros(3), torch.zeros(2)),
         r"'tensors' must be one or more, of equal length"),
        (lambda: fs.InMemory(), r"'tensors' must be one or more, of equal length \(got \[\]\)"),
        (lambda: plan(Stream(), 2, assignment=fs.MediumCoarse(1)),
         r"'assignment' must be Disjoint\(\) or FullOverlap"),
        (lambda: plan(Stream(), 2, sampling=fs.Sampling()),
         r"'sampling' must be left out with an IterableDataset"),
        (lambda: plan(Stream(0), 2), r"'dataset' must give at least one sample in every pass"),
        (lambda: plan(Stream(), fs.BatchGrowth(2)), r"'batch_size' must be a whole number"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert isinstance(raised.value, fs.FlockstepError)
    assert "\n" not in str(raised.value)


class Squares(Dataset):
    """A map-style dataset of the user's own."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor(float(index)), index * index


class SquaresAtOnce(Squares):
    """One that can give many samples at once, as torch's DataLoader would ask it to."""

    def __getitems__(self, indices):
        return [super(SquaresAtOnce, self).__getitem__(index) for index in indices]

    def __getitem__(self, index):
        raise AssertionError("must be asked for many at once")


class Stream(IterableDataset):
    """Samples as they come."""

    def __init__(self, samples=10):
        self.samples = samples

    def __iter__(self):
        return ((torch.tensor(float(k)), k * k) for k in range(self.samples))


X, Y = torch.arange(10.0), torch.arange(10) ** 2
KINDS = {
    "map-style": Squares(),
    "many at once": SquaresAtOnce(),
    "TensorDataset": TensorDataset(X, Y),
    "InMemory": fs.InMemory(X.byte(), Y, prepare=lambda x, y: (x.float(), y)),
    "tensors": (X, Y),
    "list": [X, Y],
    "arrays": (X.numpy(), Y.numpy()),
    "subset": Subset(TensorDataset(torch.arange(20.0), torch.arange(20) ** 2), range(10)),
    "subset of a subset": Subset(Subset(Squares(), range(9, -1, -1)), range(10)),
    "stream": Stream(),
}


@pytest.mark.parametrize("dataset", KINDS.values(), ids=KINDS)
def test_datasets_of_every_kind_give_batches(dataset):
    def program(comm):
        model = torch.nn.Linear(1, 1)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.Independent()
        )
        rows = []
        for x, y in worker.batches(dataset, batch_size=2, epochs=2):
            assert x.dtype == torch.float32
            assert y.dtype == torch.int64
            rows.append((x.tolist(), y.tolist()))
        return rows, worker.samples, worker.epoch, worker.total_steps

    results = fs.launch(program, 2)
    shown = sorted(
        pair for rows, *_ in results for xs, ys in rows for pair in zip(xs, ys, strict=True)
    )
    assert shown == sorted([(float(k), k * k) for k in range(10)] * 2)
    total = None if isinstance(dataset, Stream) else 6
    assert [rest for _, *rest in results] == [[10, 2, total]] * 2


def test_a_dict_of_tensors_gives_dicts():
    rows = plan({"x": X, "y": Y.numpy()}, 3)
    assert [set(batch.data) for batch in rows] == [{"x", "y"}] * 4
    assert sorted(torch.cat([batch.data["y"] for batch in rows]).tolist()) == Y.tolist()


@few
@given(samples=st.integers(1, 50), workers=st.integers(1, 8), batch_size=st.integers(1, 7))
def test_a_stream_is_shared_out_whole_in_equally_many_steps(samples, workers, batch_size):
    shares = [
        plan(Stream(samples), batch_size, workers=workers, rank=rank) for rank in range(workers)
    ]
    assert {len(rows) for rows in shares} == {-(-samples // (workers * batch_size))}
    shown = [int(x) for rows in shares for batch in rows for x in batch.data[0]]
    assert set(shown) == set(range(samples))
    assert len(shown) - samples < workers  # seen again, at most once by each, at the very end
    assert all(rows[-1].ends_epoch and not any(b.ends_epoch for b in rows[:-1]) for rows in shares)


def test_with_full_overlap_everybody_gets_the_whole_stream():
    for rank in range(3):
        rows = plan(Stream(), 4, assignment=fs.FullOverlap(), workers=3, rank=rank)
        assert [x for batch in rows for x in batch.data[0].tolist()] == X.tolist()


def test_a_stream_cannot_be_entered_midway():
    def program(comm):
        model = torch.nn.Linear(1, 1)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.Independent()
        )
        list(worker.batches(Stream(), 2, resume_at=1))

    with pytest.raises(fs.InvalidField, match="'resume_at' must be 0 with an IterableDataset"):
        fs.launch(program, 2)


def test_epochs_go_on_counting_over_several_loops():
    def program(comm):
        model = torch.nn.Linear(1, 1)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.Independent()
        )
        loops = [
            [batch.tolist() for batch in worker.batches(torch.arange(50), 25)] for _ in range(2)
        ]
        return loops, worker.epoch

    (first, second), epochs = fs.launch(program, 1)[0]
    assert epochs == 2
    assert first != second


def test_a_loop_that_is_left_early_goes_on_with_the_next_pass():
    """And a loop without end costs no more than its first steps."""

    def program(comm):
        model = torch.nn.Linear(1, 1)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.Independent()
        )
        shown = []
        for batch in worker.batches(torch.arange(50), 25, epochs=10**9):
            shown.append(batch.tolist())
            if len(shown) == 5:
                break
        again = next(iter(worker.batches(torch.arange(50), 25))).tolist()
        return shown, again, worker.epoch, worker.total_steps

    shown, again, epochs, total = fs.launch(program, 1)[0]
    assert epochs == 2
    assert total == 2  # of the second loop
    assert again == shown[4]  # the third pass, which was left
    assert again not in shown[:4]


@pytest.mark.parametrize(("resume_at", "left"), [(0, 5), (3, 2), (5, 0), (8, 0)])
def test_the_steps_of_a_loop_include_those_of_the_run_before(resume_at, left):
    def program(comm):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = fs.Worker(comm, model, optimizer, fs.Independent())
        batches = worker.batches((X[:, None],), 2, epochs=4, steps=5, resume_at=resume_at)
        return len(list(batches))

    assert fs.launch(program, 2) == [left, left]


def test_a_resumed_worker_counts_what_was_done_before():
    def program(comm, resume_at=0):
        model = torch.nn.Linear(1, 1)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.0), fs.Independent()
        )
        shown = []
        for (x,) in worker.batches((X[:, None],), 2, epochs=4, resume_at=resume_at):
            shown.append(x.flatten().tolist())
            loss = model(x).sum()
            loss.backward()
            worker.step(loss)
        return shown, worker.steps, worker.samples, worker.epoch, worker.total_steps

    whole = fs.launch(program, 2)
    rest = fs.launch(lambda comm: program(comm, resume_at=5), 2)
    for (all_shown, *counts), (shown, *counts_of_rest) in zip(whole, rest, strict=True):
        assert shown == all_shown[5:]
        assert counts_of_rest == counts

    with pytest.raises(
        fs.InvalidField, match=r"'resume_at' must be at most the number of steps, 12 \(got 13\)"
    ):
        fs.launch(lambda comm: program(comm, resume_at=13), 2)


def noisy(random, x, y):
    return x + torch.from_numpy(random.random(len(x))), y


def test_augmentation_is_for_training_alone_and_repeats_when_resumed():
    data = fs.InMemory(torch.zeros(12), torch.arange(12), augment=noisy)
    made = plan_batches(data, 4, 2, fs.Disjoint(), None, workers=1, rank=0, seed=0)
    whole = [batch.data[0].tolist() for batch in made.batches(0, first_pass=0)]
    # Other noise for every sample in every epoch.
    assert len({value for batch in whole for value in batch}) == 24
    assert [batch.data[0].tolist() for batch in made.batches(4, first_pass=0)] == whole[4:]
    assert all(batch[0].eq(0).all() for batch, _ in in_order(data, 5))
    other_rank = plan_batches(data, 4, 2, fs.FullOverlap(), None, workers=2, rank=1, seed=0)
    assert next(other_rank.batches(0, first_pass=0)).data[0].tolist() not in whole


def test_in_memory_data_serve_a_dataloader_too():
    data = fs.InMemory(X.byte(), Y, prepare=lambda x, y: (x.float() / 2, y))
    x, y = data[3]
    assert (float(x), int(y)) == (1.5, 9)
    x, y = next(iter(torch.utils.data.DataLoader(data, batch_size=4)))
    assert (x.tolist(), y.tolist()) == ([0, 0.5, 1, 1.5], [0, 1, 4, 9])
    assert len(data.first(3)) == 3
    assert data.first(3).tensors[0].data_ptr() == data.tensors[0].data_ptr()


@few
@given(samples=st.integers(1, 99), batch_size=st.integers(1, 20))
def test_in_order_shows_all_samples_once_in_batches_as_equal_as_can_be(samples, batch_size):
    rows = list(in_order(torch.arange(samples), batch_size))
    assert torch.cat([batch for batch, _ in rows]).tolist() == list(range(samples))
    sizes = [count for _, count in rows]
    assert sizes == [len(batch) for batch, _ in rows]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1


def test_tensors_are_indexed_at_once_and_not_sample_by_sample(monkeypatch):
    source = source_of(TensorDataset(X, Y))
    monkeypatch.setattr(TensorDataset, "__getitem__", None)
    x, y = source.fetch(np.array([3, 1]), None)
    assert (x.tolist(), y.tolist()) == ([3, 1], [9, 1])


# --- batches that grow ----------------------------------------------------------------------------


@few
@given(
    assignment=st.sampled_from(ASSIGNMENTS_OF_4),
    samples=st.integers(20, 300),
    passes=st.integers(1, 4),
    initial=st.integers(1, 8),
)
def test_a_growing_batch_shows_every_sample_under_every_assignment(
    assignment, samples, passes, initial
):
    growth = fs.BatchGrowth(initial, at=(0.3, 0.7), factor=3)
    shares = [
        plan(torch.arange(samples), growth, passes, assignment, workers=4, rank=rank)
        for rank in range(4)
    ]
    assert len({len(rows) for rows in shares}) == 1
    shown = np.bincount([sample for rows in shares for sample in seen(rows)], minlength=samples)
    due = passes * assignment.copies_among(4)
    assert (shown >= due).all()
    # A worker with one sample less may see another again, to keep up, once in every pass.
    assert (shown - due).sum() <= 4 * passes
    relative = [batch.relative_size for batch in shares[0]]
    assert relative == sorted(relative)
    assert set(relative) <= {1, 3, 9}


def test_a_batch_grows_at_its_marks():
    rows = plan(torch.arange(100), fs.BatchGrowth(5, at=(0.5, 0.75), factor=2), epochs=4)
    assert [batch.samples for batch in rows] == [5] * 40 + [10] * 10 + [20] * 5
    assert sum(batch.ends_epoch for batch in rows) == 4
    within = plan(torch.arange(100), fs.BatchGrowth(5, at=(0.5,), factor=2), epochs=1)
    assert [batch.samples for batch in within] == [5] * 10 + [10] * 5


def test_a_larger_batch_takes_longer_in_the_simulator():
    def run(batch_size):
        return fs.run(
            "digits-mlp",
            fs.Independent(),
            workers=3,
            epochs=2,
            batch_size=batch_size,
            compute=fs.Compute(seconds=0.5),
        )

    plain, grown = run(10), run(fs.BatchGrowth(10, at=(0.5,), factor=4))
    # The rest: the final choice of a model.
    assert plain.metrics["seconds"] == pytest.approx(0.5 * 2 * 48, abs=0.01)
    assert grown.metrics["steps"] == 48 + 12
    assert grown.metrics["seconds"] == pytest.approx(0.5 * 48 + 2.0 * 12, abs=0.01)
    assert grown.metrics["samples"] == plain.metrics["samples"] == 2 * 1437
    assert (
        grown.config["batch_size"] == "BatchGrowth(initial=10, at=(0.5,), factor=4, maximum=None)"
    )
