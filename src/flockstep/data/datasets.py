"""Data sets that come with the library."""

from __future__ import annotations

import functools

import torch
from torch.utils.data import TensorDataset


@functools.cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 handwritten digits, 8×8, scaled to [0, 1]: 1,437 to train with, 360 to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=360, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in parts)
    return TensorDataset(train_x.float(), train_y.long()), TensorDataset(test_x.float(), test_y.long())
