"""The thesis' grid of households, recomputed: local batches, steps, and what is left at the end of
an epoch. 45,000 samples on 16 workers, 182 epochs, an effective batch of 128.
"""

from __future__ import annotations

import pytest
import torch

import flockstep as fs
from flockstep.data import plan_batches

SAMPLES, WORKERS, EPOCHS, EFFECTIVE = 45_000, 16, 182, 128

# H, L_W, the local batch exactly, rounded, and rounded up; iterations of an epoch; steps in all of
# household shards S_H = H, 2 and 1; the last batch of an epoch with S_H = H.
GRID = [
    (2, 2, 10.67, 11, 11, 256, 46592, None, 46592, 8),
    (2, 4, 12.80, 13, 13, 217, 39494, None, 39403, 5),
    (2, 8, 14.22, 14, 15, 201, 36582, None, 36582, 13),
    (2, 16, 15.06, 15, 16, 188, 34216, None, 34125, 8),
    (2, 32, 15.52, 16, 16, 176, 32032, None, 32032, 13),
    (2, 64, 15.75, 16, 16, 176, 32032, None, 32032, 13),
    (2, 128, 15.88, 16, 16, 176, 32032, None, 32032, 13),
    (4, 2, 12.80, 13, 13, 217, 39494, 39403, 39836, 5),
    (4, 4, 18.29, 18, 19, 157, 28574, 28483, 28750, 5),
    (4, 8, 23.27, 23, 24, 123, 22386, 22295, 22540, 7),
    (4, 16, 26.95, 27, 27, 105, 19110, 19019, 19182, 5),
    (4, 32, 29.26, 29, 30, 97, 17654, 17654, 17848, 29),
    (4, 64, 30.57, 31, 31, 91, 16562, 16562, 16698, 23),
    (4, 128, 31.27, 31, 32, 91, 16562, 16562, 16698, 23),
    (8, 2, 14.22, 14, 15, 201, 36582, 36984, 36984, 13),
    (8, 4, 23.27, 23, 24, 123, 22386, 22540, 22517, 7),
    (8, 8, 34.13, 34, 35, 83, 15106, 15226, 15226, 25),
    (8, 16, 44.52, 45, 45, 63, 11466, 11500, 11500, 23),
    (8, 32, 52.51, 53, 53, 54, 9828, 9798, 9775, 4),
    (8, 64, 57.69, 58, 58, 49, 8918, 8924, 8924, 29),
    (8, 128, 60.68, 61, 61, 47, 8554, 8510, 8487, 7),
]
CELLS = pytest.mark.parametrize("row", GRID, ids=lambda row: f"H{row[0]}-L{row[1]}")


def timetable(households, shards, batch, drop_last=False):
    assignment = fs.HouseholdShards(households, shards)
    return plan_batches(
        torch.arange(SAMPLES),
        batch,
        assignment.overlap_epochs(EPOCHS, WORKERS),
        assignment,
        None,
        workers=WORKERS,
        rank=0,
        seed=0,
        drop_last=drop_last,
    ).timetable


@CELLS
def test_local_batches_are_those_of_the_grid(row):
    households, world_period, exact, nearest, up = row[:5]
    settings = (EFFECTIVE, WORKERS, households, world_period)
    assert fs.local_batch(*settings) == pytest.approx(exact, abs=0.005)
    assert fs.local_batch(*settings, rounding="nearest") == nearest
    assert fs.local_batch(*settings, rounding="up") == up
    assert type(fs.local_batch(*settings, rounding="up")) is int


def test_a_local_batch_that_is_whole_stays_as_it_is():
    """0.1·30 is more than 3 in binary numbers, and 3 is not rounded up to 4."""
    assert fs.local_batch(128, 16, 1, 1, "up") == 8
    assert fs.local_batch(30, 10, 10, 1, "up") == fs.local_batch(30, 10, 10, 1) == 3
    assert fs.local_batch(5, 2, 1, 9, "nearest") == 3
    assert fs.local_batch(1, 16, 1, 1, "nearest") == 1


def test_a_rounding_that_nobody_knows_is_refused():
    with pytest.raises(fs.InvalidField, match=r"'rounding' must be one of None, 'nearest', 'up'"):
        fs.local_batch(128, 16, 8, 128, rounding="down")


@CELLS
def test_steps_are_those_of_the_grid(row):
    households, _, _, batch, _, iterations, disjoint, halves, whole, _ = row
    for shards, steps in ((households, disjoint), (2, halves), (1, whole)):
        if steps is not None:
            assert timetable(households, shards, batch).steps == steps
    assert iterations * EPOCHS == disjoint


@CELLS
def test_the_last_batch_of_an_epoch_is_that_of_the_grid_and_gone_with_drop_last(row):
    households, _, _, batch, _, iterations, _, _, _, last = row
    fewest, most = SAMPLES // WORKERS, -(-SAMPLES // WORKERS)  # that a worker holds
    starts, sizes = timetable(households, households, batch).cuts(0, rank=0)
    assert len(starts) == iterations
    assert min(most - starts[-1], sizes[-1]) == last

    table = timetable(households, households, batch, drop_last=True)
    starts, sizes = table.cuts(0, rank=0)
    assert len(starts) == iterations - 1 == fewest // batch
    assert set(sizes) == {batch}
    assert starts[-1] + batch <= fewest
    assert table.steps == len(starts) * EPOCHS
    assert table.epochs == EPOCHS
