"""Shared tensors in shards, one per rank, each served by the launcher of that rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Self

import torch
from torch import Tensor

from flockstep.backends.cluster.codecs import with_codec
from flockstep.backends.cluster.comm import ClusterComm
from flockstep.backends.cluster.control_channel import ControlChannel
from flockstep.backends.cluster.wire import (
    ADD,
    ADD_ENCODED,
    BLEND,
    CHANGES,
    CREATE,
    DONE,
    READ,
    READ_CHANGES,
    REFUSED,
    TENSOR,
    WRITE,
    Connection,
    Header,
    WireError,
    connect,
    raw,
    short_name,
)
from flockstep.codecs import Codec
from flockstep.comm import SharedTensor, apply_changes
from flockstep.errors import WorkerLost

CONNECT_SECONDS = 10.0

# Handles of this process that read only changes: a home knows what each of them has.
_READERS = count(1)
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02
LOOK_SECONDS = 0.1


class CoordinatedTensor(SharedTensor):
    """A shared tensor whose lock and turns the coordinator keeps. Where the value lives is up to
    the child.
    """

    def __init__(self, comm: ClusterComm, name: str, like: Tensor) -> None:
        self.name = name
        self.shape = like.shape
        self.dtype = like.dtype
        self.meter = comm.meter
        self._control = comm.context.control
        self._lock_of = {"lock": f"{comm.name} {name}", "group": comm.name}

    def _lock(self, in_turn: bool) -> None:
        what = f"lock{' in turn' if in_turn else ''} of shared {self.name!r}"
        self._control.ask("lock", what, in_turn=in_turn, **self._lock_of)

    def _unlock(self, in_turn: bool) -> None:
        self._control.tell("unlock", **self._lock_of)

    def retire(self) -> None:
        self._control.tell("retire", **self._lock_of)

    def _wait_until(self, holds: Callable[[Tensor], bool], out: Tensor) -> None:
        """Look again and again, at most fifty times a second; the coordinator hears of some of
        these looks.
        """
        self._read(out)
        if holds(out):
            return
        self._control.tell_waiting("watch", f"wait_until of shared {self.name!r}")
        pause, told = SHORTEST_PAUSE, time.monotonic()
        while True:
            self._control.pause(pause)
            self._read(out)
            if holds(out):
                break
            pause = min(2 * pause, LONGEST_PAUSE)
            if time.monotonic() > told + LOOK_SECONDS:
                self._control.tell("look")
                told = time.monotonic()
        self._control.tell("seen")


@dataclass(frozen=True)
class Directory:
    """Where every rank's launcher serves its shards."""

    addresses: tuple[tuple[str, int], ...]
    run: bytes
    token: bytes = field(repr=False)


class Peers:
    """One worker's connections to the launchers that hold shards, made when first used."""

    def __init__(self, directory: Directory, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self.control: ControlChannel | None = None  # known when the first shared tensor is made
        self._connections: dict[int, Connection] = {}
        self.gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._directory.addresses)

    def at(self, home: int) -> Connection:
        self._require_there(home)
        if home not in self._connections:
            where, run, token = (
                self._directory.addresses[home],
                self._directory.run,
                self._directory.token,
            )
            self._connections[home] = connect(
                where, run, token, "tensors", self._rank, CONNECT_SECONDS, lambda: self._idle(home)
            )
        return self._connections[home]

    def _require_there(self, home: int) -> None:
        if self.control is not None and home in self.control.lost_launchers:
            raise ConnectionError(f"the launcher of rank {home} was given up")

    def _idle(self, home: int) -> None:
        """While `home` does not answer: hear whether the run goes on, and goes on with it."""
        if self.control is not None:
            self.control.catch_up()
            self._require_there(home)

    def after(self, home: int) -> int:
        """Who holds a shard instead of `home`, whose host is gone: the next that is still there."""
        self.gone.add(home)
        for distance in range(1, len(self)):
            other = (home + distance) % len(self)
            if other not in self.gone:
                return other
        raise WorkerLost(f"rank {self._rank} reaches no host that holds shared tensors", self._rank)


@dataclass
class ShardLocation:
    """One slice of a shared tensor, as a worker sees it."""

    name: str
    start: int
    end: int
    home: int
    seen: Tensor | None = None  # the value last seen here, kept where a home may be lost

    @property
    def elements(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Request:
    """What the homes of all shards are asked for.

    Fields:
        kind: of the frames.
        given: a flat tensor, of which each home is given its part.
        number: the operation's own.
        payloads: what each shard's home is sent in place of its part, by the shard's name.
    """

    kind: int
    given: Tensor | None = None
    number: float = 0.0
    payloads: dict[str, bytes] | None = None

    def payload(self, shard: ShardLocation) -> memoryview | bytes:
        if self.payloads is not None:
            return self.payloads[shard.name]
        return b"" if self.given is None else raw(self.given[shard.start : shard.end])


class ShardedTensor(CoordinatedTensor):
    """A shared tensor whose shards live at the launchers of the ranks.

    An operation asks all homes at once and returns when all have answered, so its changes have
    landed. Under `on_failure="continue"` every worker keeps the value that it last saw: when a home
    is gone with its host, the first to notice makes the shard anew from it, at the next home."""

    lands_whole = True  # shard by shard, as those of sharded parameter servers

    def __init__(
        self,
        comm: ClusterComm,
        peers: Peers,
        name: str,
        like: Tensor,
        home: int | None,
        is_first: bool,
    ) -> None:
        super().__init__(comm, name, like)
        self._peers = peers
        peers.control = comm.context.control
        self._keeps = comm.context.continues
        # Changes by others, as the home of the first shard counts them: it sees all, one at a time.
        self._landed = 0
        self._arrived = 0  # bytes of the answers to a call
        self._reader = next(_READERS)  # which handle it is, of those of this process
        homes = comm.ranks if home is None else comm.ranks[home : home + 1]
        bounds = [like.numel() * k // len(homes) for k in range(len(homes) + 1)]
        key = f"{comm.name} {name}"
        self._shards = [
            ShardLocation(short_name(f"{key} {start}"), start, end, home)
            for home, (start, end) in zip(homes, pairwise(bounds), strict=True)
            if end > start
        ]
        value = like.cpu().contiguous().view(-1)
        if self._keeps:
            for shard in self._shards:
                shard.seen = value[shard.start : shard.end].clone()
        if is_first:
            self._all(Request(CREATE, value))
        if is_first and self._keeps:
            self._all(Request(WRITE, value))  # over what one who is lost may have left of its own
        if self._keeps and not is_first:
            self._known = 1  # that first write

    def _read(self, out: Tensor) -> None:
        whole = (
            out.view(-1)
            if out.is_contiguous() and out.device.type == "cpu"
            else torch.empty(out.numel(), dtype=self.dtype)
        )
        self._all(Request(READ), answers=whole)
        if whole.data_ptr() != out.data_ptr():
            out.copy_(whole.view(out.shape))
        self._has_read(self._landed)

    def _read_changes(self, known: Tensor, is_first: bool) -> None:
        self._arrived = 0
        reader = -self._reader if is_first else self._reader
        self._all(Request(READ_CHANGES, number=reader), answers=known.view(-1))
        self._has_read(self._landed)
        self._has_arrived(self._arrived)

    def _write(self, tensor: Tensor) -> None:
        self._all(Request(WRITE, _flat(tensor)))
        self._note_change()

    def _add(self, tensor: Tensor, scale: float) -> None:
        self._all(Request(ADD, _flat(tensor), scale))
        self._note_change()

    @property
    def _spans(self) -> Sequence[slice]:
        return [slice(shard.start, shard.end) for shard in self._shards]

    def _add_encoded(
        self, codec: Codec, messages: Sequence[Tensor], scale: float, sent: Tensor
    ) -> None:
        payloads = {
            shard.name: with_codec(codec, message)
            for shard, message in zip(self._shards, messages, strict=True)
        }
        self._all(Request(ADD_ENCODED, _flat(sent), scale, payloads))
        self._note_change()

    def _blend(self, tensor: Tensor, weight: float) -> Tensor:
        before = torch.empty(tensor.numel(), dtype=self.dtype)
        self._all(Request(BLEND, _flat(tensor), weight), answers=before)
        self._note_change()
        self._has_read(self._landed)
        return before.view(tensor.shape).to(tensor.device)

    def _note_change(self) -> None:
        if self.counts_staleness:
            self._has_changed(self._landed)

    def _all(self, request: Request, answers: Tensor | None = None) -> None:
        """Ask the homes of all shards, then take all their answers."""
        # Where a home has several shards, one after the other: its answer may wait for us as our
        # request waits for it.
        waves: dict[int, list[ShardLocation]] = {}
        seen: Counter[int] = Counter()
        for shard in self._shards:
            waves.setdefault(seen[shard.home], []).append(shard)
            seen[shard.home] += 1
        for shards in waves.values():
            self._wave(shards, request, answers)

    def _wave(self, shards: list[ShardLocation], request: Request, answers: Tensor | None) -> None:
        _ask_together([(self, shard, request) for shard in shards], answers)

    @classmethod
    def _add_to_each(
        cls,
        tensors: Sequence[Self],
        tensor: Tensor,
        scale: float,
        codec: Codec | None,
        message: Tensor | None,
    ) -> None:
        """Answers are short: all homes can be asked before any is heard."""
        request = Request(ADD, _flat(tensor), scale)
        if codec is not None and message is not None:
            payload = with_codec(codec, message)
            names = [shard.name for each in tensors for shard in each._shards]
            request = Request(ADD_ENCODED, request.given, scale, dict.fromkeys(names, payload))
        _ask_together([(each, shard, request) for each in tensors for shard in each._shards])
        for each in tensors:
            each._note_change()

    def _try(self, shard: ShardLocation, do: Callable[[ShardLocation], None]) -> bool:
        """False if the shard's home is gone, and another may take its place."""
        try:
            do(shard)
        except OSError as error:
            if not self._keeps:
                raise WorkerLost(
                    f"the launcher of rank {shard.home}, home of a shard of shared {self.name!r}, "
                    "is gone",
                    shard.home,
                ) from error
            shard.home = self._peers.after(shard.home)
            return False
        return True

    def _ask(self, shard: ShardLocation, request: Request) -> None:
        payload = request.payload(shard)
        connection = self._peers.at(shard.home)
        header = Header(
            request.kind,
            connection.run,
            shard.name,
            self.dtype,
            (shard.elements,),
            length=len(payload),
            number=request.number,
        )
        connection.send(header, payload)

    def _take(self, shard: ShardLocation, answers: Tensor | None) -> None:
        connection = self._peers.at(shard.home)
        header = connection.header()
        if header is None:
            raise ConnectionError(f"the home at rank {shard.home} closed the connection")
        if header.kind == REFUSED:
            raise WireError(connection.payload(header).decode(errors="replace"))
        if header.kind not in (TENSOR, CHANGES, DONE):
            raise WireError(
                f"rank {shard.home} answered for shared {self.name!r} "
                f"with a frame of kind {header.kind}"
            )
        if shard is self._shards[0]:
            self._landed = int(header.number)
        if header.kind == DONE:
            return
        if answers is None or header.shape != (shard.elements,) or header.dtype != self.dtype:
            raise WireError(
                f"rank {shard.home} answered for shared {self.name!r} with {header.shape}"
            )
        self._arrived += header.length
        here = answers[shard.start : shard.end]
        if header.kind == TENSOR:
            connection.fill(raw(here))
            return
        message = torch.empty(header.length, dtype=torch.uint8)
        connection.fill(raw(message))
        try:
            apply_changes(message, here)
        except ValueError as error:
            raise WireError(f"rank {shard.home}, of shared {self.name!r}: {error}") from None

    def _again(self, shard: ShardLocation, request: Request, answers: Tensor | None) -> None:
        """Make the shard anew at its new home, unless another worker has, and ask there."""
        seen = torch.zeros(0) if shard.seen is None else shard.seen
        connection = self._peers.at(shard.home)
        connection.send(
            Header(
                CREATE,
                connection.run,
                shard.name,
                self.dtype,
                (shard.elements,),
                length=seen.nbytes,
            ),
            raw(seen),
        )
        self._take(shard, None)
        self._ask(shard, request)
        self._take(shard, answers)

    def _remember(self, shard: ShardLocation, request: Request, answers: Tensor | None) -> None:
        """Keep the value as it must be now if nobody else has changed it."""
        seen, here = shard.seen, slice(shard.start, shard.end)
        if seen is None:
            return
        if answers is not None:
            seen.copy_(answers[here])
        if request.given is None:
            return
        given = request.given[here]
        if request.kind == WRITE:
            seen.copy_(given)
        elif request.kind in (ADD, ADD_ENCODED):
            seen.add_(given, alpha=request.number)
        elif request.kind == BLEND:
            seen.lerp_(given, request.number)


def _ask_together(
    asked: Sequence[tuple[ShardedTensor, ShardLocation, Request]], answers: Tensor | None = None
) -> None:
    """Ask all homes, then take all answers."""
    heard = [
        tensor._try(shard, lambda shard: tensor._ask(shard, request))  # noqa: B023
        for tensor, shard, request in asked
    ]
    # All answers are taken before a shard moves: at its new home it must not be given another
    # shard's.
    for place, (tensor, shard, _) in enumerate(asked):
        if heard[place]:
            heard[place] = tensor._try(shard, lambda shard: tensor._take(shard, answers))  # noqa: B023
    for (tensor, shard, request), is_heard in zip(asked, heard, strict=True):
        is_done = is_heard
        while not is_done:
            is_done = tensor._try(shard, lambda shard: tensor._again(shard, request, answers))  # noqa: B023
        if tensor._keeps:
            tensor._remember(shard, request, answers)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1)
