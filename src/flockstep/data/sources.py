"""Data sets of any kind, as a number of samples and a function that gives a batch of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.dlpack import from_dlpack

from flockstep.data.assignment import Indices
from flockstep.data.image_folder import ImageFolder
from flockstep.data.memory import InMemory
from flockstep.fields import require

KINDS = "be tensors or arrays, a tuple, list or dict of these, or a torch Dataset"
# Made only if asked for: that takes longer than a small batch.
Randomness = Callable[[], np.random.Generator]
Fetch = Callable[[Indices, Randomness | None], Any]
Collate = Callable[[list[Any]], Any]  # makes a batch of samples


@dataclass(frozen=True)
class Source:
    """`fetch(indices, randomness)` gives a batch, augmented only where there is a source of
    randomness.
    """

    samples: int
    fetch: Fetch


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset)


def source_of(dataset: Any) -> Source:
    """A dataset that can be indexed. What lies in memory and what we decode is indexed a batch at
    a time, all else sample by sample.
    """
    if isinstance(dataset, Subset):
        inner, rows = source_of(dataset.dataset), np.asarray(dataset.indices, dtype=np.int64)
        return Source(len(rows), lambda chosen, random: inner.fetch(rows[chosen], random))
    if isinstance(dataset, InMemory | ImageFolder):
        return Source(len(dataset), functools.partial(_fetch_prepared, dataset))
    if isinstance(dataset, TensorDataset):
        return _in_memory(dataset.tensors, tuple)
    if _is_array(dataset):
        return _in_memory([dataset], lambda parts: parts[0])
    if isinstance(dataset, tuple | list) and dataset and all(map(_is_array, dataset)):
        return _in_memory(dataset, tuple)
    if isinstance(dataset, Mapping) and dataset and all(map(_is_array, dataset.values())):
        return _in_memory(
            list(dataset.values()), lambda parts: dict(zip(dataset, parts, strict=True))
        )
    rule = f"{KINDS}, such as fs.dataset('mnist')[0]"
    require(not isinstance(dataset, str | bytes), "dataset", rule, dataset)
    can_be_indexed = (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, Mapping)
    )
    require(can_be_indexed, "dataset", KINDS, f"a {type(dataset).__name__}")
    return samples_of(dataset, default_collate)


def samples_of(dataset: Any, collate: Collate) -> Source:
    """A dataset that is indexed sample by sample."""

    def fetch(chosen: Indices, random: Randomness | None) -> Any:
        return collate(_samples(dataset, chosen.tolist()))

    return Source(len(dataset), fetch)


def stream_batches(
    dataset: Any,
    batch_size: int,
    workers: int,
    rank: int,
    collate: Collate = default_collate,
    drop_last: bool = False,
) -> Iterator[tuple[Any, int]]:
    """The batches of one worker out of a stream, of which every worker takes each `workers`-th
    sample.

    All workers get the same number of batches: where the end of the stream has none left for a
    worker, it sees another's sample again, unless the last batches are dropped."""
    stream = iter(dataset)
    while block := list(islice(stream, batch_size * workers)):
        if drop_last and len(block) < batch_size * workers:
            return
        own = block[rank::workers] or block[:1]
        yield collate(own), len(own)


def in_order(dataset: Any, batch_size: int) -> Iterator[tuple[Any, int]]:
    """All samples once, as they come, as batches with their numbers of samples, which are as
    equal as can be.
    """
    if is_stream(dataset):
        yield from stream_batches(dataset, batch_size, workers=1, rank=0)
        return
    source = source_of(dataset)
    count = -(-source.samples // batch_size)
    for number in range(count):
        chosen = np.arange(number * source.samples // count, (number + 1) * source.samples // count)
        yield source.fetch(chosen, None), len(chosen)


def _fetch_prepared(
    dataset: InMemory | ImageFolder, chosen: Indices, random: Randomness | None
) -> tuple[Tensor, ...]:
    source = random() if random is not None and dataset.augment is not None else None
    return dataset.batch(torch.from_numpy(chosen), source)


def _is_array(data: Any) -> bool:
    return isinstance(data, Tensor | np.ndarray) or hasattr(data, "__dlpack__")


def _tensor(array: Any) -> Tensor:
    """Of an array, be it another framework's: in its memory, where that can be."""
    is_known = isinstance(array, Tensor | np.ndarray)
    return torch.as_tensor(array) if is_known else from_dlpack(array)


def _in_memory(arrays: Any, put_together: Callable[[list[Tensor]], Any]) -> Source:
    tensors = [_tensor(array) for array in arrays]
    require(
        all(tensor.ndim for tensor in tensors),
        "dataset",
        "have samples along its first dimension",
        "a scalar",
    )
    lengths = [len(tensor) for tensor in tensors]
    require(len(set(lengths)) == 1, "dataset", "have parts of equal length", lengths)

    def fetch(chosen: Indices, random: Randomness | None) -> Any:
        index = torch.from_numpy(chosen)
        return put_together([tensor.index_select(0, index) for tensor in tensors])

    return Source(lengths[0], fetch)


def _samples(dataset: Any, chosen: list[int]) -> list[Any]:
    """As torch's DataLoader does: all at once, where a dataset can."""
    if hasattr(dataset, "__getitems__"):
        found: list[Any] = dataset.__getitems__(chosen)
        return found
    return [dataset[index] for index in chosen]
