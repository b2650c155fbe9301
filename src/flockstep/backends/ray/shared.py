"""A worker's side of shared tensors: which home holds which shard, and how each is reached."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError
from torch import Tensor

from flockstep.backends.cluster import ClusterComm, CoordinatedTensor, MakeShared
from flockstep.backends.ray import homes as memory
from flockstep.codecs import Codec
from flockstep.comm import add_decoded, apply_changes, read_changes_nbytes
from flockstep.errors import WorkerLost

_READERS = count(1)  # handles of this process: a home knows what each of them has read

Finish = Callable[[], None] | None
"""What is left to do when all shards have been asked; None if it is done."""


class ShardAccess(ABC):
    """One shard of a shared tensor. Its operations take flat tensors of the CPU, of just this
    shard.
    """

    @abstractmethod
    def read(self, out: Tensor) -> Finish: ...

    @abstractmethod
    def read_changes(self, known: Tensor, is_first: bool) -> Callable[[], int]:
        """Of which the end says how many bytes have travelled."""

    @abstractmethod
    def write(self, tensor: Tensor) -> Finish: ...

    @abstractmethod
    def add(self, tensor: Tensor, scale: float) -> Finish: ...

    @abstractmethod
    def add_encoded(self, codec: Codec, message: Tensor, scale: float) -> Finish: ...

    @abstractmethod
    def blend(self, tensor: Tensor, weight: float, before: Tensor) -> Finish: ...


class MappedShard(ShardAccess):
    """A shard whose home is on this host: its very pages."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def read(self, out: Tensor) -> None:
        out.copy_(self.value)

    def read_changes(self, known: Tensor, is_first: bool) -> Callable[[], int]:
        now = self.value.clone()  # others may change it while elements are counted
        nbytes = now.nbytes if is_first else read_changes_nbytes(now, known)
        known.copy_(now)
        return lambda: nbytes

    def write(self, tensor: Tensor) -> None:
        self.value.copy_(tensor)

    def add(self, tensor: Tensor, scale: float) -> None:
        memory.add(self.value, tensor, scale)

    def add_encoded(self, codec: Codec, message: Tensor, scale: float) -> None:
        add_decoded(codec, message, self.value, scale)

    def blend(self, tensor: Tensor, weight: float, before: Tensor) -> None:
        memory.blend(self.value, tensor, weight, before)


class RemoteShard(ShardAccess):
    """A shard whose home is on another host. It has changed when the home has answered."""

    def __init__(self, actor: Any, key: str, reader: str) -> None:
        self._actor = actor
        self._key = key
        self._reader = reader  # whose handle this is

    def read(self, out: Tensor) -> Finish:
        return self._answer(self._actor.read.remote(self._key), out)

    def read_changes(self, known: Tensor, is_first: bool) -> Callable[[], int]:
        reference = self._actor.read_changes.remote(self._key, self._reader, is_first)

        def finish() -> int:
            is_whole, answer = ray.get(reference)
            if is_whole:
                memory.as_bytes(known)[:] = answer
            else:
                apply_changes(memory.readable(answer, torch.uint8), known)
            return len(answer)

        return finish

    def write(self, tensor: Tensor) -> Finish:
        return self._answer(self._actor.write.remote(self._key, memory.as_bytes(tensor)))

    def add(self, tensor: Tensor, scale: float) -> Finish:
        return self._answer(self._actor.add.remote(self._key, memory.as_bytes(tensor), scale))

    def add_encoded(self, codec: Codec, message: Tensor, scale: float) -> Finish:
        data = memory.as_bytes(message.cpu())
        return self._answer(self._actor.add_encoded.remote(self._key, codec, data, scale))

    def blend(self, tensor: Tensor, weight: float, before: Tensor) -> Finish:
        return self._answer(
            self._actor.blend.remote(self._key, memory.as_bytes(tensor), weight), before
        )

    @staticmethod
    def _answer(reference: Any, out: Tensor | None = None) -> Finish:
        def finish() -> None:
            answer = ray.get(reference)
            if out is not None:
                memory.as_bytes(out)[:] = answer

        return finish


class RayShared(CoordinatedTensor):
    """A shared tensor in shards, one at each home."""

    def __init__(
        self,
        comm: ClusterComm,
        homes: Sequence[Any],
        run: str,
        name: str,
        like: Tensor,
        home: int | None,
        is_first: bool,
    ) -> None:
        super().__init__(comm, name, like)
        if home is not None:
            homes = [homes[home % len(homes)]]
        bounds = [like.numel() * index // len(homes) for index in range(len(homes) + 1)]
        spans = [
            (home, span)
            for home, span in zip(homes, pairwise(bounds), strict=True)
            if span[1] > span[0]
        ]
        self._places = [slice(*span) for _, span in spans]
        key = f"{run} {comm.name} {name}"
        try:
            held = ray.get(
                [
                    home.hold.remote(key, (b - a) * like.element_size(), self.dtype)
                    for home, (a, b) in spans
                ]
            )
        except RayActorError as error:
            raise self._lost_home(error) from error
        self._shards: list[ShardAccess] = []
        reader = f"{key} {comm.rank} {next(_READERS)}"
        for (home, _), shard in zip(spans, held, strict=True):
            value = shard.map(self.dtype)
            self._shards.append(
                RemoteShard(home, key, reader) if value is None else MappedShard(value)
            )
        self._answer = np.empty(0, dtype=np.uint8)
        if is_first:
            self._write(like)

    def _read(self, out: Tensor) -> None:
        fits = out.is_contiguous() and out.device.type == "cpu"
        flat = out.view(-1) if fits else torch.empty(out.numel(), dtype=self.dtype)
        self._all(lambda shard, span: shard.read(flat[span]))
        if not fits:
            out.copy_(flat.view(out.shape))

    def _read_changes(self, known: Tensor, is_first: bool) -> None:
        flat = known.view(-1)

        def ask(shard: ShardAccess, span: slice) -> Finish:
            finish = shard.read_changes(flat[span], is_first)
            return lambda: self._has_arrived(finish())

        self._all(ask)

    def _write(self, tensor: Tensor) -> None:
        flat = _flat(tensor)
        self._all(lambda shard, span: shard.write(flat[span]))

    def _add(self, tensor: Tensor, scale: float) -> None:
        flat = _flat(tensor)
        self._all(lambda shard, span: shard.add(flat[span], scale))

    def _add_encoded(
        self, codec: Codec, messages: Sequence[Tensor], scale: float, sent: Tensor
    ) -> None:
        following = iter(messages)
        self._all(lambda shard, _: shard.add_encoded(codec, next(following), scale))

    @property
    def _spans(self) -> Sequence[slice]:
        return self._places

    def _blend(self, tensor: Tensor, weight: float) -> Tensor:
        flat, before = _flat(tensor), self._memory_for_answer(tensor)
        self._all(lambda shard, span: shard.blend(flat[span], weight, before[span]))
        return before.view(tensor.shape).to(tensor.device)

    def pages(self) -> Tensor | None:
        shard = self._shards[0] if len(self._shards) == 1 else None
        return shard.value.view(self.shape) if isinstance(shard, MappedShard) else None

    def _memory_for_answer(self, tensor: Tensor) -> Tensor:
        """Memory that is the caller's alone: that of the last answer, if no tensor on it is left,
        else fresh.

        The pages of large fresh memory cost several times the copy into them.
        """
        mine_and_the_calls = 2
        if not tensor.numel():
            return torch.empty(0, dtype=self.dtype)
        if (
            self._answer.nbytes != tensor.nbytes
            or sys.getrefcount(self._answer) > mine_and_the_calls
        ):
            self._answer = np.empty(tensor.nbytes, dtype=np.uint8)
        return torch.from_numpy(self._answer).view(self.dtype)

    def _all(self, do: Callable[[ShardAccess, slice], Finish]) -> None:
        """Ask for all shards, then wait for those that are not done."""
        try:
            for finish in [
                do(shard, span) for shard, span in zip(self._shards, self._places, strict=True)
            ]:
                if finish is not None:
                    finish()
        except RayActorError as error:
            raise self._lost_home(error) from error

    def _lost_home(self, error: RayActorError) -> WorkerLost:
        return WorkerLost(
            f"a home of shared {self.name!r} is lost, and with it a part of the value: {error}"
        )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1)


def maker_of_shared(homes: Sequence[Any], run: str) -> MakeShared:
    """What `work` asks for: makes what serves `comm.shared`."""

    def make(
        comm: ClusterComm, name: str, like: Tensor, home: int | None, is_first: bool
    ) -> RayShared:
        return RayShared(comm, homes, run, name, like, home, is_first)

    return make
