"""Padding, cropping and flipping, against an implementation that goes image by image."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flockstep as fs
from flockstep.data.augmentation import PadCropFlip


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
