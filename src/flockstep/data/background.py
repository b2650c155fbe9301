"""Batches that are prepared while the model computes: by a thread, or by the processes of a torch
DataLoader. They are the same, in the same order, as if each were made when it is asked for.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from flockstep.data.batch import Batch, Key, Wanted


class InBackground(Iterator[Batch]):
    """Batches of which the next are under way already."""

    @abstractmethod
    def pause(self) -> None:
        """End the threads and processes that prepare batches. Whoever asks for another batch starts
        them again, and gets the very next.
        """


class Ahead(InBackground):
    """`count` batches ahead of the one in use, by one thread."""

    def __init__(self, batches: Iterator[Batch], count: int) -> None:
        self._batches = batches
        self._count = count
        self._pool: ThreadPoolExecutor | None = None
        self._coming: deque[Future[Batch | None]] = deque()

    def __next__(self) -> Batch:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="flockstep-batches")
        while len(self._coming) <= self._count:
            self._coming.append(self._pool.submit(next, self._batches, None))
        batch = self._coming.popleft().result()
        if batch is None:
            raise StopIteration
        return batch

    def pause(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            self._coming = deque(each for each in self._coming if not each.cancelled())


class Loaded(InBackground):
    """By the processes of a DataLoader, that `make` makes of the keys of what is wanted."""

    def __init__(self, wanted: Wanted, make: Callable[[Iterator[Key]], DataLoader[Any]]) -> None:
        self._wanted = wanted
        self._make = make
        self._pending: deque[tuple[Key, Batch]] = deque()  # what the processes have been asked for
        self._coming: Iterator[Any] | None = None
        self._remove_folder: Callable[[], object] = _nothing

    def __next__(self) -> Batch:
        if self._coming is None:
            folder = tempfile.mkdtemp(prefix="flockstep-")
            self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            with _sockets_in(folder):
                self._coming = iter(self._make(self._keys()))
        try:
            data = next(self._coming)
        except Exception as error:  # noqa: BLE001
            # Whatever the data set raises. Its frames would hold torch's iterator and its pipes;
            # where it happened is in its text.
            self.pause()
            raise error.with_traceback(None) from None
        _, batch = self._pending.popleft()
        return replace(batch, data=data)

    def _keys(self) -> Iterator[Key]:
        for key, _ in list(self._pending):  # again, after a pause
            yield key
        for key, batch in self._wanted:
            self._pending.append((key, batch))
            yield key

    def pause(self) -> None:
        # Torch ends the processes with their iterator, which the traceback of an error may hold.
        end = getattr(self._coming, "_shutdown_workers", None)
        if end is not None:
            end()
        self._coming = None
        self._remove_folder()


_STARTING = threading.Lock()


@contextmanager
def _sockets_in(folder: str) -> Iterator[None]:
    """Processes that are started inside have their sockets in this folder.

    Else each makes one of its own for the first tensor that it hands over. One that is told to end
    just then has tidied up already, and leaves it behind."""
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with _STARTING:
        before = settings.get("tempdir")
        settings["tempdir"] = folder
        try:
            yield
        finally:
            if before is None:
                del settings["tempdir"]
            else:
                settings["tempdir"] = before


def _nothing() -> None:
    pass
