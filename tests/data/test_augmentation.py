"""Padding, cropping and flipping, against an implementation that goes image by image."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flockstep as fs
from flockstep.data.augmentation import PadCropFlip, ResizedCropFlip


def one_by_one(random, images, padding):
    """The same offsets and flips, drawn in the same order, applied with plain slices to one
    image after the other.
    """
    count, channels, height, width = images.shape
    tops, lefts = random.integers(0, 2 * padding + 1, (2, count))
    flips = random.integers(0, 2, count)
    changed = []
    for image, top, left, flip in zip(images.numpy(), tops, lefts, flips, strict=True):
        canvas = np.zeros((channels, height + 2 * padding, width + 2 * padding), image.dtype)
        canvas[:, padding : padding + height, padding : padding + width] = image
        window = canvas[:, top : top + height, left : left + width]
        changed.append(window[:, :, ::-1] if flip else window)
    return torch.from_numpy(np.stack(changed)) if changed else images


@settings(deadline=None)
@given(
    shape=st.tuples(*(st.integers(low, high) for low, high in [(0, 9), (1, 3), (1, 12), (1, 12)])),
    padding=st.integers(0, 5),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_a_batch_becomes_what_image_after_image_would(shape, padding, dtype, seed):
    images = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape)).to(dtype)
    labels, before = torch.arange(len(images)), images.clone()
    changed, same = PadCropFlip(padding)(np.random.default_rng(seed), images, labels)
    assert same is labels
    assert changed.dtype == dtype
    assert torch.equal(changed, one_by_one(np.random.default_rng(seed), images, padding))
    assert torch.equal(images, before)


def test_the_seed_decides_all():
    images = torch.arange(64 * 3 * 8 * 8).view(64, 3, 8, 8)
    first, again, other = (
        PadCropFlip()(np.random.default_rng(seed), images)[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_offset_and_both_directions_are_as_likely():
    """One bright pixel in the middle tells where the window was; 5×5 offsets, flipped or not,
    2,000 times each.
    """
    count, padding = 50_000, 2
    images = torch.zeros(count, 1, 5, 6, dtype=torch.uint8)
    images[:, 0, 2, 2] = 1
    (changed,) = PadCropFlip(padding)(np.random.default_rng(0), images)
    # Of 6 columns the pixel stands left of the middle; a flip takes column c to 5 - c, so both have
    # own columns, but for the two that overlap: rows alone, and columns and flips together, have
    # known shares.
    rows, columns = changed[:, 0].nonzero()[:, 1:].T
    assert len(rows) == count  # the pixel never leaves
    assert torch.bincount(rows, minlength=5).tolist() == pytest.approx([count / 5] * 5, rel=0.05)
    share = count / 10
    assert torch.bincount(columns, minlength=6).tolist() == pytest.approx(
        [share, 2 * share, 2 * share, 2 * share, 2 * share, share], rel=0.05
    )


def test_images_that_are_not_contiguous_are_augmented_alike():
    images = torch.randint(0, 256, (8, 6, 6, 3), dtype=torch.uint8)
    view = images.permute(0, 3, 1, 2)
    for_view, for_copy = (
        PadCropFlip(1)(np.random.default_rng(0), each)[0] for each in (view, view.contiguous())
    )
    assert torch.equal(for_view, for_copy)


def test_it_travels_to_workers():
    assert pickle.loads(pickle.dumps(PadCropFlip(3))) == PadCropFlip(3)


@pytest.mark.parametrize("padding", [-1, 1.5, True])
def test_a_bad_padding_is_named(padding):
    with pytest.raises(fs.InvalidField, match="'padding' must be"):
        PadCropFlip(padding)


def test_images_without_channels_are_named():
    with pytest.raises(
        fs.InvalidField, match=r"'images' must be of shape .* \(got \(4, 28, 28\)\)"
    ):
        PadCropFlip()(np.random.default_rng(0), torch.zeros(4, 28, 28))


# Windows of any size


def windows(width, height, count=2000, augment=None):
    random = np.random.default_rng(0)
    drawn = [(augment or ResizedCropFlip()).window(random, width, height) for _ in range(count)]
    return np.array([box for box, _ in drawn]), np.array([mirrored for _, mirrored in drawn])


@settings(deadline=None)
@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    area=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted).map(tuple),
    shape=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)).map(sorted).map(tuple),
    seed=st.integers(0, 1000),
)
def test_a_window_lies_within_the_picture_and_has_an_allowed_shape(
    width, height, area, shape, seed
):
    augment = ResizedCropFlip(area, shape)
    (left, top, right, bottom), _ = augment.window(np.random.default_rng(seed), width, height)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert shape[0] * 0.999 <= (right - left) / (bottom - top) <= shape[1] * 1.001


def test_windows_have_every_area_shape_and_place_that_is_allowed():
    boxes, mirrored = windows(1000, 1000)
    left, top, right, bottom = boxes.T
    across, down = right - left, bottom - top
    areas, shapes = across * down / 1e6, across / down
    assert 0.08 <= areas.min() < 0.09
    assert areas.max() > 0.9
    assert 0.75 <= shapes.min() < 0.76
    assert 1.32 < shapes.max() <= 4 / 3
    assert (shapes > 1).mean() == pytest.approx(0.5, abs=0.05)  # lying as often as upright
    assert (left / (1000 - across)).mean() == pytest.approx(0.5, abs=0.03)
    assert (top / (1000 - down)).mean() == pytest.approx(0.5, abs=0.03)
    assert mirrored.mean() == pytest.approx(0.5, abs=0.05)


def test_of_a_picture_into_which_no_window_fits_the_middle_is_taken():
    boxes, _ = windows(1000, 50, count=50, augment=ResizedCropFlip(area=(0.9, 1.0)))
    expected = (500 - 50 * 4 / 6, 0, 500 + 50 * 4 / 6, 50)
    assert np.allclose(boxes, expected)


def test_what_is_drawn_for_a_picture_does_not_depend_on_those_before_it():
    """A wide one takes all ten tries, a square one mostly the first."""
    after = []
    for width in (100, 4000):
        random = np.random.default_rng(5)
        ResizedCropFlip().window(random, width, 100)
        after.append(ResizedCropFlip().window(random, 64, 48))
    assert after[0] == after[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"area": (0.0, 1.0)}, "'area' must be above 0 and at most 1 (got 0.0)"),
        ({"area": (0.5, 1.5)}, "'area' must be above 0 and at most 1 (got 1.5)"),
        ({"area": 0.5}, "'area' must be two numbers (got 0.5)"),
        ({"shape": (2.0, 0.5)}, "'shape' must be the least, then the most (got (2.0, 0.5))"),
        ({"shape": (0.5, float("inf"))}, "'shape' must be above 0 and finite (got inf)"),
    ],
)
def test_a_bad_bound_of_windows_is_named(fields, message):
    with pytest.raises(fs.InvalidField) as raised:
        ResizedCropFlip(**fields)
    assert message in str(raised.value)
