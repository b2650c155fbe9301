"""Which worker holds which samples, under every scheme."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flockstep as fs
from flockstep.data import ASSIGNMENTS, find_assignment
from flockstep.data.overlap import overlap_of

SCHEMES = tuple(ASSIGNMENTS.values())


@st.composite
def cases(draw, schemes=SCHEMES, most_copies_inside=1):
    """A scheme, a number of workers that it fits, and any number of samples that is not too
    small.
    """
    scheme = draw(st.sampled_from(schemes))
    small = st.integers(1, 4)
    if scheme is fs.Coarse:
        shards, copies = draw(small), draw(small)
        assignment, workers = fs.Coarse(shards), shards * copies
    elif scheme in (fs.MediumCoarse, fs.FineGrained):
        workers = draw(st.integers(1, 12))
        assignment = scheme(draw(st.integers(1, workers)))
    elif scheme is fs.HouseholdShards:
        shards, copies, size = draw(small), draw(small), draw(st.integers(most_copies_inside, 5))
        inside = draw(st.sampled_from([fs.Disjoint(), fs.FullOverlap()]))
        if most_copies_inside > 1:
            inside = draw(
                st.sampled_from(
                    [fs.MediumCoarse(most_copies_inside), fs.FineGrained(most_copies_inside)]
                )
            )
        assignment, workers = (
            fs.HouseholdShards(shards * copies, shards, inside),
            shards * copies * size,
        )
    elif scheme is fs.NeighbourhoodOverlap:
        neighbourhoods = draw(small)
        households = neighbourhoods * draw(small)
        assignment = fs.NeighbourhoodOverlap(households, neighbourhoods)
        workers = households * draw(small)
    elif scheme is fs.HouseholdOverlap:
        households = draw(st.integers(1, 8))
        between = draw(st.sampled_from([fs.MediumCoarse, fs.FineGrained]))
        copies = draw(st.integers(1, households))
        inside = draw(st.sampled_from([fs.Disjoint(), fs.FullOverlap()]))
        assignment = fs.HouseholdOverlap(households, between(copies), inside)
        workers = households * draw(small)
    else:
        assignment, workers = scheme(), draw(st.integers(1, 20))
    return (
        assignment,
        workers,
        draw(st.integers(workers, workers + 200)),
        draw(st.integers(0, 10_000)),
    )


@settings(deadline=None)
@given(cases())
def test_each_sample_is_held_exactly_so_often_and_shares_are_equal(case):
    """Nothing is dropped, nothing is counted twice, and sizes are within one."""
    assignment, workers, samples, seed = case
    parts = assignment.assign(samples, workers, seed)
    assert len(parts) == workers
    for part in parts:
        assert len(np.unique(part)) == len(part)
        assert part.min() >= 0
        assert part.max() < samples
    held = np.bincount(np.concatenate(parts), minlength=samples)
    copies = assignment.copies_among(workers)
    assert (held == copies).all()
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == copies * samples


@settings(deadline=None)
@given(cases(schemes=(fs.HouseholdShards,), most_copies_inside=2))
def test_households_may_overlap_inside(case):
    assignment, workers, samples, seed = case
    parts = assignment.assign(samples, workers, seed)
    held = np.bincount(np.concatenate(parts), minlength=samples)
    assert (held == assignment.copies_among(workers)).all()
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 2


@settings(deadline=None)
@given(cases())
def test_the_seed_decides_everything(case):
    assignment, workers, samples, seed = case
    first, again = (assignment.assign(samples, workers, seed) for _ in range(2))
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize(
    "scheme", [fs.Disjoint(), fs.Coarse(4), fs.MediumCoarse(2), fs.FineGrained(2)]
)
def test_another_seed_deals_otherwise(scheme):
    one, other = (set(scheme.assign(1000, 8, seed)[0].tolist()) for seed in (0, 1))
    assert one != other


def common(assignment, samples, workers):
    return overlap_of(assignment, samples, workers, seed=0).common


def test_coarse_workers_share_all_or_nothing():
    shared = common(fs.Coarse(shards=3), 90, 6)
    for i, j in itertools.product(range(6), repeat=2):
        assert shared[i, j] == (30 if i % 3 == j % 3 else 0)


def test_medium_coarse_workers_share_by_their_distance_around_the_circle():
    shared = common(fs.MediumCoarse(copies=3), 80, 8)
    for i, j in itertools.product(range(8), repeat=2):
        distance = min((i - j) % 8, (j - i) % 8)
        assert shared[i, j] == 10 * max(0, 3 - distance)


@pytest.mark.parametrize("copies", [2, 4, 6, 8, 10, 12, 14])
def test_fine_grained_pairs_all_share_equally(copies):
    """At most 1 % of a worker's share is asked for. The paper's size: 45,000 samples on 16
    workers.
    """
    overlap = overlap_of(fs.FineGrained(copies), 45_000, 16, seed=3)
    share = 45_000 * copies / 16
    spread = overlap.pairs.max() - overlap.pairs.min()
    assert spread <= 0.001 * share  # ten times better than asked
    assert overlap.pairs.mean() == pytest.approx(
        45_000 * copies * (copies - 1) / (16 * 15), rel=1e-3
    )


@settings(max_examples=30, deadline=None)
@given(workers=st.integers(3, 24), data=st.data())
def test_fine_grained_pairs_differ_by_little_at_any_size(workers, data):
    """By far less than at random, where the spread of 3,000 samples would be several times as
    large.
    """
    copies = data.draw(st.integers(2, workers - 1))
    overlap = overlap_of(fs.FineGrained(copies), 3000, workers, seed=data.draw(st.integers(0, 99)))
    assert overlap.pairs.max() - overlap.pairs.min() <= 12


def test_households_with_the_same_shard_hold_the_same_and_divide_it_differently():
    parts = fs.HouseholdShards(households=4, shards=2).assign(240, 12, seed=0)
    households = [np.concatenate(parts[3 * h : 3 * h + 3]) for h in range(4)]
    held = [set(household.tolist()) for household in households]
    assert held[0] == held[2]
    assert held[1] == held[3]
    assert not held[0] & held[1]
    assert set(parts[0].tolist()) != set(parts[6].tolist())


def held_by_households(assignment, samples, workers, seed=0):
    parts = assignment.assign(samples, workers, seed)
    size = workers // assignment.households
    return [
        frozenset(np.concatenate(parts[first : first + size]).tolist())
        for first in range(0, workers, size)
    ]


@pytest.mark.parametrize(("households", "neighbourhoods"), [(4, 2), (8, 2), (8, 4), (6, 3), (3, 1)])
def test_neighbourhoods_hold_each_household_shard_once(households, neighbourhoods):
    assignment = fs.NeighbourhoodOverlap(households, neighbourhoods)
    held = held_by_households(assignment, 1001, 2 * households)
    size = households // neighbourhoods
    first = held[:size]
    assert sum(map(len, first)) == 1001
    assert len(frozenset().union(*first)) == 1001
    for start in range(0, households, size):
        assert held[start : start + size] == first


def test_matching_households_of_two_neighbourhoods_share_all_their_data():
    """The thesis' size, E3.3: 4 households of 4 workers, 22,500 samples each."""
    held = held_by_households(fs.NeighbourhoodOverlap(4, 2), 45_000, 16)
    assert len(held[0] & held[2]) == len(held[1] & held[3]) == len(held[0]) == 22_500
    assert not held[0] & held[1]


@pytest.mark.parametrize(
    ("households", "neighbourhoods", "size", "samples"),
    [(4, 2, 4, 45_000), (8, 2, 2, 45_000), (6, 3, 2, 101), (4, 4, 3, 77), (5, 1, 1, 20)],
)
def test_neighbourhoods_that_overlap_are_households_of_fewer_shards(
    households, neighbourhoods, size, samples
):
    one = fs.NeighbourhoodOverlap(households, neighbourhoods)
    other = fs.HouseholdShards(households, shards=households // neighbourhoods)
    workers = households * size
    assert one.copies_among(workers) == other.copies_among(workers) == neighbourhoods
    pairs = zip(one.assign(samples, workers, 5), other.assign(samples, workers, 5), strict=True)
    assert all(np.array_equal(mine, yours) for mine, yours in pairs)


def test_neighbourhoods_are_those_of_the_strategy():
    """Ranks that average with one another as neighbours hold each household shard once."""

    def program(comm):
        model = torch.nn.Linear(1, 1)
        strategy = fs.Households(4, 4, neighbourhoods=2, neighbourhood_period=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = fs.Worker(comm, model, optimizer, strategy)
        return worker.state.levels[1].group.all_gather(torch.tensor([comm.rank]))

    parts = fs.NeighbourhoodOverlap(4, 2).assign(64, 8, seed=0)
    for ranks in fs.launch(program, 8):
        held = np.concatenate([parts[int(rank)] for rank in ranks])
        assert sorted(held.tolist()) == list(range(64))


@pytest.mark.parametrize("copies", [1, 2, 3, 8])
def test_households_share_shards_by_their_distance_around_the_circle(copies):
    """Household h holds household shards h, h+1, … h+C−1 (mod H)."""
    held = held_by_households(fs.HouseholdOverlap(8, fs.MediumCoarse(copies)), 800, 16)
    for i, j in itertools.product(range(8), repeat=2):
        shards = {(i + k) % 8 for k in range(copies)} & {(j + k) % 8 for k in range(copies)}
        assert len(held[i] & held[j]) == 100 * len(shards)


@pytest.mark.parametrize("copies", [2, 4, 6])
def test_all_pairs_of_households_share_nearly_equally(copies):
    """The thesis' size: 45,000 samples, 8 households of 2 workers."""
    held = held_by_households(fs.HouseholdOverlap(8, fs.FineGrained(copies)), 45_000, 16, seed=3)
    shared = [len(one & other) for one, other in itertools.combinations(held, 2)]
    assert max(shared) - min(shared) <= 0.001 * 45_000 * copies / 8
    expected = 45_000 * copies * (copies - 1) / (8 * 7)
    assert np.mean(shared) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_household_shards_are_the_coarse_form(shards):
    one, other = fs.HouseholdShards(8, shards), fs.HouseholdOverlap(8, fs.Coarse(shards))
    pairs = zip(one.assign(1003, 24, 1), other.assign(1003, 24, 1), strict=True)
    assert all(np.array_equal(mine, yours) for mine, yours in pairs)


def test_copies_between_households_and_inside_multiply():
    both = fs.HouseholdOverlap(8, fs.MediumCoarse(2), inside=fs.FullOverlap())
    assert both.copies_among(16) == 4
    assert both.overlap_epochs(182, 16) == 46
    only_between = fs.HouseholdOverlap(8, fs.FineGrained(4))
    assert only_between.copies_among(16) == 4
    assert only_between.overlap_epochs(182, 16) == 46


def test_households_are_those_of_the_strategy():
    """The same ranks are together in the data and in the averaging."""

    def program(comm):
        model = torch.nn.Linear(1, 1)
        worker = fs.Worker(
            comm,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            fs.Households(3, world_period=4),
        )
        return worker.state.household.all_gather(torch.tensor([comm.rank]))

    together = [sorted(int(rank) for rank in ranks) for ranks in fs.launch(program, 6)]
    parts = fs.HouseholdShards(households=3, shards=3).assign(60, 6, seed=0)
    shards = [
        frozenset(np.concatenate([parts[rank] for rank in ranks]).tolist()) for ranks in together
    ]
    assert len(set(shards)) == 3
    assert all(len(shard) == 20 for shard in shards)


@pytest.mark.parametrize(
    ("assignment", "epochs", "passes"),
    [
        (fs.Disjoint(), 5, 5),
        (fs.FullOverlap(), 5, 1),
        (fs.MediumCoarse(2), 5, 3),
        (fs.Coarse(2), 8, 2),
    ],
)
def test_overlap_epochs_process_each_sample_at_least_as_often_as_asked(assignment, epochs, passes):
    assert assignment.overlap_epochs(epochs, 8) == passes
    assert epochs <= assignment.effective_epochs(passes, 8) < epochs + assignment.copies_among(8)


SCHEMES_OF_MANY = [
    fs.Disjoint(),
    fs.FullOverlap(),
    fs.Coarse(64),
    fs.MediumCoarse(4),
    fs.FineGrained(4),
    fs.HouseholdShards(64, 16),
    fs.HouseholdOverlap(64, fs.FineGrained(4)),
    fs.NeighbourhoodOverlap(64, 4),
]


@pytest.mark.parametrize("assignment", SCHEMES_OF_MANY, ids=repr)
def test_a_million_samples_are_dealt_to_a_thousand_workers_in_little_memory(assignment):
    """In under 200 MB; how long it takes is for the bench to say."""
    tracemalloc.start()
    try:
        assignment.assign(1_280_000, 1024, seed=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200e6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fs.Disjoint().assign(3, 4, 0),
            r"'samples' must be at least the number of workers, 4 \(got 3\)",
        ),
        (lambda: fs.Disjoint().assign(3, 0, 0), r"'workers' must be at least 1 \(got 0\)"),
        (lambda: fs.Disjoint().assign(3, 2, -1), r"'seed' must be at least 0 \(got -1\)"),
        (lambda: fs.MediumCoarse(0), r"'copies' must be at least 1 \(got 0\)"),
        (
            lambda: fs.MediumCoarse(9).assign(90, 8, 0),
            r"'copies' must be at most the number of workers, 8 \(got 9\)",
        ),
        (
            lambda: fs.FineGrained(9).assign(90, 8, 0),
            r"'copies' must be at most the number of workers, 8 \(got 9\)",
        ),
        (lambda: fs.FineGrained(2.0), r"'copies' must be a whole number \(got 2.0\)"),
        (lambda: fs.Coarse(0), r"'shards' must be at least 1 \(got 0\)"),
        (
            lambda: fs.Coarse(3).assign(90, 8, 0),
            r"'shards' must divide the number of workers, 8 \(got 3\)",
        ),
        (
            lambda: fs.HouseholdShards(4, 3),
            r"'shards' must divide the number of households, 4 \(got 3\)",
        ),
        (lambda: fs.HouseholdShards(0, 1), r"'households' must be at least 1 \(got 0\)"),
        (
            lambda: fs.HouseholdShards(3, 1).assign(90, 8, 0),
            r"'households' must divide the number of workers, 8",
        ),
        (
            lambda: fs.HouseholdShards(4, 2, "disjoint"),
            r"'inside' must be an assignment such as fs.Disjoint\(\)",
        ),
        (
            lambda: fs.NeighbourhoodOverlap(8, 3),
            r"'neighbourhoods' must divide the number of households, 8 \(got 3\)",
        ),
        (
            lambda: fs.NeighbourhoodOverlap(3, 3).assign(90, 8, 0),
            r"'households' must divide the number of workers, 8 \(got 3\)",
        ),
        (
            lambda: fs.HouseholdOverlap(4, 2),
            r"'between' must be an assignment such as fs.Disjoint\(\) \(got 2\)",
        ),
        (
            lambda: fs.HouseholdOverlap(4, fs.MediumCoarse(5)),
            r"'between' must fit 4 households as if they were workers: 'copies' must be at most",
        ),
        (
            lambda: fs.HouseholdOverlap(4, fs.MediumCoarse(2)).assign(90, 6, 0),
            r"'households' must divide the number of workers, 6 \(got 4\)",
        ),
        (
            lambda: find_assignment("fine"),
            r"unknown assignment 'fine'; known: coarse, disjoint, fine_grained",
        ),
        (
            lambda: fs.run("digits-mlp", fs.SyncSGD(), workers=4, assignment=fs.FineGrained(5)),
            r"'copies' must be at most the number of workers, 4 \(got 5\)",
        ),
    ],
)
def test_what_does_not_fit_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert isinstance(raised.value, fs.FlockstepError)
    assert "\n" not in str(raised.value)


def test_schemes_are_found_by_either_name():
    assert find_assignment("MediumCoarse") is find_assignment("medium_coarse") is fs.MediumCoarse
