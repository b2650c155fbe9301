"""Batches that grow in the course of a run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from flockstep.data.batch_growth import BatchGrowth
from flockstep.schedules.progress import Progress
from flockstep.schedules.schedules import StepDecay

few = settings(max_examples=60, deadline=None)


def test_batches_grow_at_the_marks_and_not_before():
    growth = BatchGrowth(32)
    assert [growth.size_at(f) for f in (0, 0.4999, 0.5, 0.7499, 0.75, 1)] == [
        32,
        32,
        320,
        320,
        3200,
        3200,
    ]


def test_a_maximum_is_not_exceeded_and_factors_may_be_fractions():
    assert [BatchGrowth(32, maximum=1000).size_at(f) for f in (0, 0.5, 0.75)] == [32, 320, 1000]
    assert [
        BatchGrowth(10, at=(0.2, 0.4, 0.6), factor=1.5).size_at(f) for f in (0, 0.2, 0.4, 0.6)
    ] == [10, 15, 22, 34]
    assert BatchGrowth(32, at=()).size_at(1.0) == 32


@few
@given(
    growth=some.builds(
        lambda initial, marks, factor, room: BatchGrowth(
            initial, tuple(sorted(marks)), factor, None if room is None else initial + room
        ),
        some.integers(1, 512),
        some.sets(some.floats(0.01, 0.99), max_size=4),
        some.floats(1.1, 12),
        some.none() | some.integers(0, 4000),
    ),
    fractions=some.lists(some.floats(0, 1), min_size=2),
)
def test_batches_start_at_the_initial_size_never_shrink_and_stay_whole(growth, fractions):
    sizes = [growth.size_at(fraction) for fraction in [0.0, *sorted(fractions)]]
    assert sizes[0] == growth.initial
    assert sizes == sorted(sizes)
    assert all(isinstance(size, int) for size in sizes)
    assert growth.maximum is None or sizes[-1] <= growth.maximum


@few
@given(step=some.integers(0, 100))
def test_growth_by_n_mirrors_a_decay_by_n(step):
    decayed = StepDecay(gamma=0.1).factor(Progress(step, 100, 0.0))
    assert BatchGrowth(8).size_at(step / 100) * decayed == pytest.approx(8)
