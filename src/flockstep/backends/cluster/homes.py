"""Where the shards of shared tensors live: tensors by name, changed on behalf of whoever is
connected.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flockstep.backends.cluster.codecs import take_codec
from flockstep.backends.cluster.wire import (
    ADD,
    ADD_ENCODED,
    BLEND,
    CHANGES,
    CREATE,
    DONE,
    READ,
    READ_CHANGES,
    TENSOR,
    WRITE,
    Connection,
    Header,
    WireError,
    raw,
)
from flockstep.codecs import Codec
from flockstep.comm import add_decoded, written_changes
from flockstep.errors import FlockstepError


@dataclass
class Shard:
    """A shard of a shared tensor. The lock keeps one change from tearing another: no update is
    ever lost here.
    """

    value: Tensor
    lock: threading.Lock = field(default_factory=threading.Lock)
    changes: int = 0

    def now(self, own: int) -> tuple[Tensor, int]:
        """A copy of the value, and how many changes others than the asker have made of it."""
        with self.lock:
            return self.value.clone(), self.changes - own


class Homes:
    """The shards that live in this process."""

    def __init__(self) -> None:
        self._shards: dict[str, Shard] = {}
        self._adding = threading.Lock()

    def serve(self, connection: Connection) -> None:
        """Answer one worker's requests, in its order, until it goes. An answer means that the
        change has landed.
        """
        # A worker that asks many homes takes their answers one after the other.
        connection.be_patient()
        scratch = torch.empty(0, dtype=torch.uint8)
        own: Counter[str] = Counter()  # changes by this worker; it hears how many others have made
        # What this worker's handles have, where they read only changes; by name and handle.
        has_read: dict[tuple[str, float], Tensor] = {}
        while (header := connection.header()) is not None:
            if header.kind == CREATE:
                self._create(header, connection)
                continue
            shard = self._shard(header)
            if header.kind == READ:
                by_others = shard.changes - own[header.name]
                connection.send(
                    _described(shard.value, connection.run, by_others), raw(shard.value)
                )
                continue
            if header.kind == READ_CHANGES:
                reader = (header.name, abs(header.number))
                if header.number < 0:  # it has nothing of what it was sent
                    has_read.pop(reader, None)
                value, by_others = shard.now(own[header.name])
                _send_changes(connection, value, by_others, has_read.get(reader))
                has_read[reader] = value
                continue
            change, length = _asked_for(header, connection)
            if len(scratch) < length:
                scratch = torch.empty(length, dtype=torch.uint8)
            given = scratch[:length]
            connection.fill(raw(given))
            if header.kind in HOW_TO_CHANGE:
                given = given.view(header.dtype).view(header.shape)
            try:
                with shard.lock:
                    answer = change(shard.value, given, header.number)
                    by_others = shard.changes - own[header.name]
                    shard.changes += 1
            except CANNOT as error:
                raise WireError(
                    f"shared tensor {header.name!r} of {header.dtype}: {error}"
                ) from None
            own[header.name] += 1
            if answer is None:
                connection.send(Header(DONE, connection.run, number=by_others))
            else:
                connection.send(_described(answer, connection.run, by_others), raw(answer))

    def _create(self, header: Header, connection: Connection) -> None:
        """Make a shard; one that is there already stays as it is."""
        value = connection.tensor(header)
        with self._adding:
            self._shards.setdefault(header.name, Shard(value))
        self._shard(header)  # of the same form, if it was there
        connection.send(Header(DONE, connection.run))

    def _shard(self, header: Header) -> Shard:
        shard = self._shards.get(header.name)
        if shard is None:
            raise WireError(f"no shared tensor {header.name!r} lives here")
        if (shard.value.dtype, shard.value.shape) != (header.dtype, header.shape):
            raise WireError(
                f"shared tensor {header.name!r} is {shard.value.dtype} of "
                f"{tuple(shard.value.shape)} here (asked for {header.dtype} of {header.shape})"
            )
        return shard


def _asked_for(header: Header, connection: Connection) -> tuple[Change, int]:
    """How the value is to change, and how many bytes that follow say by what."""
    if header.kind == ADD_ENCODED:
        codec, length = take_codec(connection, header)
        return functools.partial(_add_encoded, codec), length
    if header.kind not in HOW_TO_CHANGE:
        raise WireError(f"a frame of kind {header.kind} where a request was due")
    return HOW_TO_CHANGE[header.kind], header.nbytes


def _send_changes(
    connection: Connection, value: Tensor, by_others: int, known: Tensor | None
) -> None:
    """What the worker does not have yet; all, if nothing is known of what it has."""
    message = None if known is None else written_changes(value, known)
    if message is None:
        connection.send(_described(value, connection.run, by_others), raw(value))
        return
    shape = tuple(value.shape)
    header = Header(CHANGES, connection.run, "", value.dtype, shape, len(message), by_others)
    connection.send(header, raw(message))


def _described(value: Tensor, run: bytes, by_others: int) -> Header:
    """Of an answer: the value, and how often others had changed it before."""
    shape = tuple(value.shape)
    return Header(TENSOR, run, "", value.dtype, shape, value.nbytes, number=by_others)


def _write(value: Tensor, given: Tensor, _: float) -> None:
    value.copy_(given)


def _add(value: Tensor, given: Tensor, scale: float) -> None:
    is_whole = not value.dtype.is_floating_point and scale.is_integer() and abs(scale) < 1 << 63
    value.add_(given, alpha=int(scale) if is_whole else scale)


def _blend(value: Tensor, given: Tensor, weight: float) -> Tensor:
    before = value.clone()
    value.add_(given.sub_(before), alpha=weight)
    return before


def _add_encoded(codec: Codec, value: Tensor, message: Tensor, scale: float) -> None:
    expected = codec.message_nbytes(value)
    if expected not in (None, len(message)):
        raise WireError(f"a message of {len(message)} bytes, where {codec} has {expected}")
    add_decoded(codec, message, value, scale)


Change = Callable[[Tensor, Tensor, float], Tensor | None]

HOW_TO_CHANGE: dict[int, Change] = {WRITE: _write, ADD: _add, BLEND: _blend}

# What torch and codecs raise who cannot do that to this dtype, with this number, or with a message
# of these bytes.
CANNOT = (RuntimeError, LookupError, ValueError, ArithmeticError, TypeError, FlockstepError)
