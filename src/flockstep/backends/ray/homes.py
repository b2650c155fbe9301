"""Where shared tensors live: actors that hold shards of them, in memory that workers of the same
host map.

A worker on a home's host works on the home's pages themselves, as local processes do: nothing is
sent, and nothing goes through the object store. For a worker on another host the home does the same
to the same pages, and tensors travel as objects of Ray's store: put there once by who sends them,
and read where they lie."""

from __future__ import annotations

import mmap
import os
import secrets
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from flockstep.backends.ray.worker import node_id
from flockstep.codecs import Codec
from flockstep.comm import add_decoded, written_changes

# Elements that are worked on at once: few enough to stay in the cache from one operation to the
# next.
CHUNK = 1 << 18

Bytes = NDArray[np.uint8]


def add(value: Tensor, tensor: Tensor, scale: float) -> None:
    value.add_(tensor, alpha=scale)


def blend(value: Tensor, tensor: Tensor, weight: float, before: Tensor) -> None:
    """Write the value into `before`, then add to it what is measured from there.

    So what the value gains the caller can lose, whatever others do to the value in between.
    """
    difference = torch.empty(min(CHUNK, value.numel()), dtype=value.dtype)
    parts = zip(value.split(CHUNK), tensor.split(CHUNK), before.split(CHUNK), strict=True)
    for now, target, was in parts:
        was.copy_(now)
        now.add_(torch.sub(target, was, out=difference[: len(was)]), alpha=weight)


@dataclass(frozen=True)
class MemoryHandle:
    """Where a home's memory for one shard is, as another process of the same host can find it."""

    node: str
    path: str
    name: str
    nbytes: int

    def map(self, dtype: torch.dtype) -> Tensor | None:
        """The shard itself; None if it cannot be reached from here: on another host, or in a
        container of its own.
        """
        if self.node != node_id():
            return None
        try:
            # A process of the same number in another container is not the home: the name has a
            # secret in it.
            if self.name not in str(Path(self.path).readlink()):
                return None
            descriptor = os.open(self.path, os.O_RDWR)
        except OSError:
            return None
        try:
            return mapped(descriptor, self.nbytes, dtype)
        finally:
            os.close(descriptor)


def mapped(descriptor: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=dtype)


class HomeActor:
    """Holds shards of shared tensors by key. It outlives the workers."""

    def __init__(self) -> None:
        self._memory: dict[str, MemoryHandle] = {}
        self._descriptors: dict[str, int] = {}
        self._shards: dict[str, Tensor] = {}
        self._has_read: dict[str, Tensor] = {}  # by reader: what it has, if it reads only changes

    def hold(self, key: str, nbytes: int, dtype: torch.dtype) -> MemoryHandle:
        """Make the shard of that key unless it is there. Every worker asks; all get the same."""
        if key not in self._memory:
            name = f"flockstep-{secrets.token_hex(16)}"
            descriptor = os.memfd_create(name)
            os.ftruncate(descriptor, nbytes)
            self._descriptors[key] = descriptor
            self._memory[key] = MemoryHandle(
                node_id(), f"/proc/{os.getpid()}/fd/{descriptor}", name, nbytes
            )
            self._shards[key] = mapped(descriptor, nbytes, dtype)
        return self._memory[key]

    def forget(self, run: str) -> None:
        """Free all shards of that run. Who still maps them keeps them."""
        for key in [key for key in self._memory if key.startswith(run)]:
            os.close(self._descriptors.pop(key))
            del self._memory[key], self._shards[key]
        for reader in [reader for reader in self._has_read if reader.startswith(run)]:
            del self._has_read[reader]

    @ray.method(concurrency_group="beat")
    def beat(self) -> None:
        """Answers whatever is done to shards meanwhile."""

    # --- for workers on other hosts ---------------------------------------------------------------

    def read(self, key: str) -> Bytes:
        return as_bytes(self._shards[key])

    def read_changes(self, key: str, reader: str, is_first: bool) -> tuple[bool, Bytes]:
        """Whether this is the whole value, and the bytes."""
        value = self._shards[key].clone()
        known = None if is_first else self._has_read.get(reader)
        message = None if known is None else written_changes(value, known)
        self._has_read[reader] = value
        return message is None, as_bytes(value if message is None else message)

    def write(self, key: str, data: Bytes) -> None:
        as_bytes(self._shards[key])[:] = data

    def add(self, key: str, data: Bytes, scale: float) -> None:
        add(self._shards[key], readable(data, self._shards[key].dtype), scale)

    def add_encoded(self, key: str, codec: Codec, data: Bytes, scale: float) -> None:
        add_decoded(codec, readable(data, torch.uint8), self._shards[key], scale)

    def blend(self, key: str, data: Bytes, weight: float) -> Bytes:
        value = self._shards[key]
        before = torch.empty_like(value)
        blend(value, readable(data, value.dtype), weight, before)
        return as_bytes(before)


def as_bytes(tensor: Tensor) -> Bytes:
    """The memory of a flat tensor. Numpy knows no bfloat16, so all travel as bytes."""
    data: Any = tensor.view(torch.uint8).numpy()
    result: Bytes = data
    return result


def readable(data: Bytes, dtype: torch.dtype) -> Tensor:
    """A tensor of what the object store shows, only to be read: torch warns of that."""
    if not len(data):
        return torch.empty(0, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.frombuffer(data, dtype=dtype)
