"""A torch DataLoader as data: its data set, its settings and its processes; the samples are chosen
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from flockstep.data.background import Loaded
from flockstep.data.batch import Key, Wanted
from flockstep.data.image_folder import ImageFolder
from flockstep.data.sampling import Sampling
from flockstep.data.sources import Collate, Source, samples_of, source_of
from flockstep.errors import InvalidField
from flockstep.fields import require
from flockstep.randomness import Purpose, torch_stream


@dataclass(frozen=True)
class LoaderSettings:
    """What a DataLoader of a user's says, but for who sees which samples: that is decided here."""

    loader: DataLoader[Any]

    def __post_init__(self) -> None:
        loader, rule = self.loader, "be left out: who sees which samples is decided here"
        if loader.batch_size is None:
            raise InvalidField(
                "'batch_size' of the DataLoader must be a number, without a batch_sampler "
                f"(got {loader.batch_size!r})"
            )
        if isinstance(loader.dataset, IterableDataset):
            for field in ("num_workers", "pin_memory", "drop_last"):
                value = getattr(loader, field)
                of_streams = "be left out with an IterableDataset"
                require(not value, field, of_streams, value)
        elif type(loader.sampler) not in (RandomSampler, SequentialSampler):
            name = type(loader.sampler).__name__
            raise InvalidField(
                f"'sampler' of the DataLoader must {rule} (assignment=, sampling=) (got a {name})"
            )
        else:
            number, samples = len(loader.sampler), len(loader.dataset)  # type: ignore[arg-type]
            draws_all = f"draw as many samples as there are, {samples}"
            require(number == samples, "sampler", draws_all, number)

    @property
    def collate(self) -> Collate:
        collate: Collate = self.loader.collate_fn
        return collate

    @property
    def sampling(self) -> Sampling:
        """As `shuffle` of the loader says."""
        sampler = self.loader.sampler
        if not isinstance(sampler, RandomSampler):
            return Sampling("in_order")
        return Sampling("with_replacement" if sampler.replacement else "reshuffle")

    @property
    def drops_last(self) -> bool:
        return self.loader.drop_last

    def source(self) -> Source:
        return loader_source(self.loader.dataset, self.collate)

    def loaded(self, wanted: Wanted, seed: int, rank: int, first_pass: int) -> Loaded:
        loader = self.loader

        def make(keys: Iterator[Key]) -> DataLoader[Any]:
            return DataLoader(
                WholeBatches(loader.dataset, self.collate),
                batch_size=None,
                sampler=keys,
                collate_fn=_as_it_is,
                num_workers=loader.num_workers,
                prefetch_factor=loader.prefetch_factor,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                # What its processes draw does not depend on what the worker's own has drawn.
                generator=torch_stream(Purpose.LOADING, seed, rank, first_pass),
            )

        return Loaded(wanted, make)


class WholeBatches(Dataset[Any]):
    """What the processes of a loader are asked for: batches, as a worker itself would make them."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, key: Key) -> Any:
        return key.fetch(loader_source(self._dataset, self._collate))


def loader_source(dataset: Any, collate: Collate) -> Source:
    """Of a loader's data set: sample by sample, unless that would give the same more slowly, or
    without augmentation.
    """
    if collate is default_collate and isinstance(dataset, TensorDataset | ImageFolder):
        return source_of(dataset)
    return samples_of(dataset, collate)


def _as_it_is(batch: Any) -> Any:
    return batch
