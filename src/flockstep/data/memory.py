"""Data that lies in memory: a batch is one index operation, and what happens to it is vectorised
over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flockstep.fields import require

Prepare = Callable[..., tuple[Tensor, ...]]


class InMemory(TensorDataset):
    """Tensors of equal length, kept as small as they are on disk and made ready one batch at a
    time.

    Fields:
        tensors: one sample is one row of each.
        prepare: `prepare(*batch)` gives the batch that a model sees: bytes scaled to numbers, say.
            Always used.
        augment: `augment(random, *batch)` changes a batch that is trained with, never one that is
            evaluated; `random` is a numpy generator that depends on (seed, rank, step) alone, so
            that a resumed run goes on alike.

    Example:
        fs.InMemory(images, labels, prepare=lambda x, y: (x.float() / 255, y))
    """

    def __init__(
        self,
        *tensors: Tensor,
        prepare: Prepare | None = None,
        augment: Prepare | None = None,
    ) -> None:
        for tensor in tensors:
            require(isinstance(tensor, Tensor), "tensors", "be tensors", tensor)
            require(tensor.ndim > 0, "tensors", "have samples along the first dimension", tensor)
        lengths = [len(tensor) for tensor in tensors]
        require(len(set(lengths)) == 1, "tensors", "be one or more, of equal length", lengths)
        super().__init__(*tensors)
        self.prepare = prepare
        self.augment = augment

    def batch(self, index: Tensor, random: np.random.Generator | None = None) -> tuple[Tensor, ...]:
        """The samples at `index`; augmented, if there is a source of randomness."""
        # Copies rows; [index] goes by elements.
        batch = tuple(tensor.index_select(0, index) for tensor in self.tensors)
        if random is not None and self.augment is not None:
            batch = self.augment(random, *batch)
        return batch if self.prepare is None else self.prepare(*batch)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[0] for part in self.batch(torch.tensor([index])))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several at once, which a DataLoader asks for."""
        return list(zip(*self.batch(torch.tensor(indices)), strict=True))

    def first(self, count: int) -> InMemory:
        """The first `count` samples, without a copy."""
        return self._part(slice(count))

    def last(self, count: int) -> InMemory:
        """The last `count` samples, without a copy."""
        return self._part(slice(len(self) - count, None))

    def without_augmentation(self) -> InMemory:
        """The same samples, each always the same, without a copy."""
        return InMemory(*self.tensors, prepare=self.prepare)

    def _part(self, rows: slice) -> InMemory:
        tensors = (tensor[rows] for tensor in self.tensors)
        return InMemory(*tensors, prepare=self.prepare, augment=self.augment)
