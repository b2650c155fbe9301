"""A tensor that all workers of a comm may read and change at any moment: the rest of the contract.

As of `Comm`, public methods check, count and take the time; a backend supplies the underscored
ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.comm.encoding import decoded_parts, encoded_parts, require_encodable
from flockstep.comm.meter import Meter
from flockstep.errors import MismatchError
from flockstep.fields import require, require_number, require_tensor

if TYPE_CHECKING:
    from flockstep.comm.contract import Comm


class SharedTensor(ABC):
    """A tensor that all workers of a comm may read and change at any moment.

    Lock-free by contract: another worker's change may land between your read and your add, or,
    where memory is really shared, in the middle of either. `lock()` keeps out those who also take
    the lock, and nobody else."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    meter: Meter
    is_home = False  # whether it lives at this worker, which then has it for nothing
    comm: Comm  # whose members share it
    peer = -1  # the world's rank of the other worker at which it lives, if it does
    # Whether changes are updates of something that all work on: not where it belongs to one worker,
    # nor of a clock.
    counts_staleness = False
    # Whether its home makes one change after the other, so that each lands whole.
    lands_whole = False
    # What this worker's last `read_changes` has read. Nobody else touches it: where a home knows
    # what is here, it must be here.
    _last_read: Tensor | None = None
    _known = 0  # how many changes by others are in the value that this worker last read

    def read(self, out: Tensor | None = None) -> Tensor:
        """The value now, written into `out` or into a new tensor."""
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype)
        self._check(out)
        with self._timed("read"):
            self._count(out.nbytes)
            self._read(out.detach())
        return out

    def read_changes(self, out: Tensor | None = None) -> Tensor:
        """The value now, as `read` gives it. Only those elements travel that have changed since the
        last `read_changes` of this handle (`comm/changes.py` says how); at first, the whole value.

        The price is a copy of the value here, and one at a home on another host.
        """
        if self.meter.paused:  # a look from outside teaches the worker nothing
            return self.read(out)
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype)
        self._check(out)
        known, self._last_read = self._last_read, None  # unknown, should the read fail
        is_first = known is None
        if known is None:
            known = torch.empty(self.shape, dtype=self.dtype)
        with self._timed("read_changes"):
            self._count(0)
            self._read_changes(known, is_first)
        self._last_read = known
        out.detach().copy_(known)
        return out

    def write(self, tensor: Tensor) -> None:
        """Replace the value."""
        self._check(tensor)
        with self._timed("write"):
            self._count(tensor.nbytes)
            self._write(tensor.detach())

    def add(
        self,
        tensor: Tensor,
        scale: float = 1,
        *,
        codec: Codec | None = None,
        memory: Memory | None = None,
        may_be_lost: bool = False,
    ) -> Tensor:
        """Add `scale` times `tensor` to the value. Return what was sent: the tensor, or what the
        codec's message stands for; whether it was lost nobody tells.

        The message is decoded where the value lives. Where that is in several places, as between
        hosts, each part of the tensor has a message of its own, with its part of the memory, as
        sharded parameter servers do; what is sent are all of them.
        """
        scale = self._checked_scale(tensor, scale)
        require_encodable(tensor, codec, memory)
        if codec is not None:
            return self._add_through(codec, tensor, scale, memory, may_be_lost)
        with self._timed("add"):
            self._count(tensor.nbytes)
            (self._try_add if may_be_lost else self._add)(tensor.detach(), scale)
        return tensor

    def as_sent(self, tensor: Tensor, codec: Codec, memory: Memory | None = None) -> Tensor:
        """What `add` would send of a tensor through a codec, as far as the memory goes: nothing
        travels.
        """
        self._check(tensor)
        require_encodable(tensor, codec, memory)
        messages = encoded_parts(codec, tensor, memory, self._spans)
        return decoded_parts(codec, messages, tensor, self._spans)

    def blend(self, tensor: Tensor, weight: float, *, may_be_lost: bool = False) -> Tensor:
        """Move the value by `weight` of the way towards `tensor`; return the value it had. One
        round trip. Where it may be lost and is, the caller hears `MessageLost`; if only the answer
        was, the value has changed.
        """
        self._check(tensor)
        require_number("weight", weight)
        require(
            self.dtype.is_floating_point, "dtype", "be a floating-point one to blend", self.dtype
        )
        with self._timed("blend"):
            self._count(2 * tensor.nbytes)
            return (self._try_blend if may_be_lost else self._blend)(tensor.detach(), weight)

    def wait_until(self, holds: Callable[[Tensor], bool]) -> Tensor:
        """Sleep until `holds(value)`, then return that value. It is looked at again whenever the
        value has changed.
        """
        value = torch.empty(self.shape, dtype=self.dtype)
        with self._timed("wait_until"):
            self._count(value.nbytes)
            self._wait_until(holds, value)
        return value

    @property
    def identity(self) -> str:
        """The same on all handles on one value, within one process."""
        return str(id(self))

    def peek(self) -> Tensor:
        """A copy of the value, for nothing: for looking at a run, never for what a method does."""
        before, self.meter.paused = self.meter.paused, True
        try:
            return self.read()
        finally:
            self.meter.paused = before

    @property
    def is_kept_here(self) -> bool:
        """Whether it is this worker that saves the value, of all who share it."""
        return self.comm.rank == self.comm.members[0]

    def known(self) -> list[Any]:
        """What this worker knows of changes, for a checkpoint; where counting begins anew with
        every run, nothing.
        """
        return []

    def know(self, known: list[Any]) -> None:  # noqa: B027
        """Put back what `known` gave."""

    def pages(self) -> Tensor | None:
        """The memory of the value itself, where this worker can reach it; what is done to it is
        seen by all.
        """
        return None

    @contextmanager
    def lock(self, in_turn: bool = False) -> Iterator[None]:
        """Hold the lock inside a `with`. With `in_turn`, workers get it in rank order, round
        after round.
        """
        with self._timed("lock"):
            self._lock(in_turn)
        try:
            yield
        finally:
            self._unlock(in_turn)

    def changing(self) -> AbstractContextManager[None]:
        """A change inside a `with` lands whole, among others that are made so. Where a home makes
        one change after the other that is so anyway, and nobody waits while another's change is
        under way; where memory is shared it takes the lock.
        """
        return nullcontext() if self.lands_whole else self.lock()

    @abstractmethod
    def retire(self) -> None:
        """Give up all further turns, so that those who still take turns do not wait for this
        worker.
        """

    @abstractmethod
    def _read(self, out: Tensor) -> None: ...

    @abstractmethod
    def _read_changes(self, known: Tensor, is_first: bool) -> None:
        """Make `known`, which is what was last read so, the value. Say to `_has_arrived` how many
        bytes travel for it; the first time, those of the whole value.
        """

    @abstractmethod
    def _write(self, tensor: Tensor) -> None: ...

    @abstractmethod
    def _add(self, tensor: Tensor, scale: float) -> None: ...

    @classmethod
    def _add_to_each(
        cls,
        tensors: Sequence[Self],
        tensor: Tensor,
        scale: float,
        codec: Codec | None,
        message: Tensor | None,
    ) -> None:
        """Add what was sent, of which this is the codec's message, if it has one."""
        for each in tensors:
            with each.changing():
                if codec is None or message is None:
                    each._add(tensor, scale)
                else:
                    each._add_encoded(codec, [message], scale, tensor)

    def _add_through(
        self,
        codec: Codec,
        tensor: Tensor,
        scale: float,
        memory: Memory | None,
        may_be_lost: bool,
    ) -> Tensor:
        messages = encoded_parts(codec, tensor, memory, self._spans)
        sent = decoded_parts(codec, messages, tensor, self._spans)
        with self._timed("add"):
            self._count(sum(message.nbytes for message in messages))
            add = self._try_add_encoded if may_be_lost else self._add_encoded
            add(codec, messages, scale, sent)
        return sent

    @property
    def _spans(self) -> Sequence[slice]:
        """The parts of the flat value that live in one place each."""
        return (slice(0, self.shape.numel()),)

    def _add_encoded(
        self, codec: Codec, messages: Sequence[Tensor], scale: float, sent: Tensor
    ) -> None:
        """Add what the messages stand for, one for each of `_spans`; decoded, they are `sent`."""
        self._add(sent, scale)

    @abstractmethod
    def _blend(self, tensor: Tensor, weight: float) -> Tensor: ...

    def _try_add(self, tensor: Tensor, scale: float) -> None:
        """As `_add`, where the network may lose it."""
        self._add(tensor, scale)

    def _try_add_encoded(
        self, codec: Codec, messages: Sequence[Tensor], scale: float, sent: Tensor
    ) -> None:
        """As `_add_encoded`, where the network may lose it."""
        self._add_encoded(codec, messages, scale, sent)

    def _try_blend(self, tensor: Tensor, weight: float) -> Tensor:
        """As `_blend`, where the network may lose the tensor or the answer."""
        return self._blend(tensor, weight)

    @abstractmethod
    def _wait_until(self, holds: Callable[[Tensor], bool], out: Tensor) -> None: ...

    @abstractmethod
    def _lock(self, in_turn: bool) -> None: ...

    @abstractmethod
    def _unlock(self, in_turn: bool) -> None: ...

    def _has_read(self, changes: int) -> None:
        """Backends that count changes say here how many by others are in what was read."""
        if not self.meter.paused:  # a look from outside teaches the worker nothing
            self._known = changes

    def _has_changed(self, changes: int) -> None:
        """Backends that count changes say here how many by others had landed before this one.

        What lives at another worker is a mailbox: the update is its owner's, who empties it."""
        if self.peer < 0:
            self.meter.count_staleness(max(0, changes - self._known))

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return self.meter.call(name, self.peer, self.name)

    def _count(self, nbytes: int) -> None:
        if not self.is_home:
            self.meter.count(nbytes)

    def _has_arrived(self, nbytes: int) -> None:
        """Backends say here how many bytes an answer has whose length depends on the values."""
        if not self.is_home and not self.meter.paused:
            self.meter.bytes_sent += nbytes

    def _checked_scale(self, tensor: Tensor, scale: float) -> float:
        """Raise unless `scale` times the tensor can be added."""
        self._check(tensor)
        require_number("scale", scale)
        if self.dtype.is_floating_point:
            return scale
        require(scale == int(scale), "scale", f"be a whole number for {self.dtype}", scale)
        return int(scale)

    def _check(self, tensor: Tensor) -> None:
        require_tensor("tensor", tensor)
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            own, given = (f"{each.dtype} of shape {tuple(each.shape)}" for each in (self, tensor))
            raise MismatchError(f"shared tensor {self.name!r} is {own} (got {given})")
