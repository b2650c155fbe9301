"""`Comm` over shared memory: workers read and write each other's tensors directly.

A collective: every member writes what it calls, and where its tensor lies, into its row of the
group's table, then a sequence number. Whoever must do something waits until all rows have that
number. Tensors that lie in the arena (a worker's flat tensors do) are used where they are; others
are staged through it. Rows and staging areas alternate between two sets: nobody can come back to a
set before all have left it, since no collective ends before all have come."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flockstep.backends.base import usable_cores
from flockstep.backends.local import payload
from flockstep.backends.local.arena import DTYPES
from flockstep.backends.local.process_slot import STEPS, TOLD, ProcessSlot
from flockstep.backends.local.shared import LocalShared
from flockstep.comm import (
    REDUCTIONS,
    Clock,
    Comm,
    Gathered,
    Meter,
    SharedTensor,
    reduce_in_rank_order,
    shared_form,
    signature,
)
from flockstep.errors import MismatchError

# Columns of a group's table (two rows per member) and of its channels (one row per sender and
# receiver).
SEQ, OP, ARG, DTYPE, ELEMENTS, OFFSET, DIRECT, DONE = range(8)
TAKEN = DONE
COLUMNS = 8
OPS = ("all_reduce", "all_gather", "broadcast", "barrier", "split", "shared")

# Below this many bytes over all members, one reducer is faster than the hand-over to several.
ONE_REDUCER_BYTES = 1 << 22
# A chunk of the sum stays in the cache while every member's part is added to it and while it is
# written back.
CHUNK_ELEMENTS = 1 << 17


class LocalGroup:
    """A group's place in the arena, and who belongs to it."""

    def __init__(self, slot: ProcessSlot, offset: int, ranks: tuple[int, ...]) -> None:
        size = len(ranks)
        self.ranks = ranks  # in the world
        self.homes: dict[str, int] = {}  # where its shared tensors lie
        table, channels = 2 * size * COLUMNS, size * size * COLUMNS
        self.tables = slot.arena.words(offset, table).reshape(2, size, COLUMNS)
        self.channels = slot.arena.words(offset + 8 * table, channels).reshape(size, size, COLUMNS)

    @staticmethod
    def nbytes(size: int) -> int:
        return 8 * COLUMNS * (2 * size + size * size)


class LocalComm(Comm):
    """A worker process's handle on its group."""

    def __init__(
        self, slot: ProcessSlot, group: LocalGroup, seed: int, meter: Meter, clock: Clock
    ) -> None:
        self.rank = group.ranks.index(slot.rank)
        self.size = len(group.ranks)
        self.seed = seed
        self.meter = meter
        self._slot = slot
        self._group = group
        self.clock: Clock = clock
        self._seq = 0
        self._everyone = range(self.size)
        self._staging: list[tuple[int, int]] = [(0, 0), (0, 0)]  # (offset, bytes) per set
        self._outbox: dict[int, tuple[int, int]] = {}
        self._cores = usable_cores()

    def _tell(self, text: str) -> None:
        status = self._slot.status
        status[TOLD] = payload.store(self._slot.arena, (int(status[TOLD]), text))

    # --- time and memory --------------------------------------------------------------------------

    def now(self) -> float:
        return self.clock.now()

    def elapse(self, seconds: float | None = None, *, times: float = 1.0) -> None:
        if seconds is None:
            self._slot.status[STEPS] += 1
            self.meter.steps += 1

    def empty(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return super().empty(elements, dtype, device)
        arena = self._slot.arena
        return arena.tensor(arena.allocate(elements * dtype.itemsize), elements, dtype)

    # --- groups and shared tensors ----------------------------------------------------------------

    def split(self, color: int) -> LocalComm:
        # Everybody brings a place, which takes no memory until it is used: one is there, whoever is
        # lost meanwhile.
        wish = [color, self._slot.rank, self._slot.arena.allocate(LocalGroup.nbytes(self.size))]
        with self.meter.call("split"):
            wishes = [part.tolist() for part in self._gather("split", torch.tensor(wish))]
        members = [(world, place) for value, world, place in wishes if value == color]
        group = LocalGroup(self._slot, members[0][1], tuple(world for world, _ in members))
        return type(self)(self._slot, group, self.seed, self.meter, self.clock)

    def _shared(self, name: str, like: Tensor, home: int | None) -> SharedTensor:
        arena, homes, ranks = self._slot.arena, self._group.homes, self._group.ranks
        call = f"shared({name!r}: {shared_form(like, home)})"
        described = zlib.crc32(call.encode())
        while True:
            if name not in homes and self.rank == self.members[0]:
                homes[name] = LocalShared.create(arena, like.detach(), self.size)
            wish = [homes.get(name, 0), self._slot.rank, described]
            wishes = [part.tolist() for part in self._gather("shared", torch.tensor(wish))]
            for _, world, theirs in wishes:
                if theirs != described:
                    raise MismatchError(
                        f"rank {self._slot.rank} called {call}, "
                        f"rank {world} with another name, shape, dtype or home"
                    )
            places = [place for place, *_ in wishes if place]
            # None: the one who should have made it was lost, as all see alike. Once more.
            if places:
                homes[name] = places[0]
                return LocalShared(
                    self._slot, homes[name], name, like, ranks, self.rank, self.meter
                )

    def _in_world(self, rank: int) -> int:
        return self._group.ranks[rank]

    # --- collectives ------------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        call = "all_reduce"
        direct = self._enter(call, self._reduction(op), tensor)
        seq, table = self._seq, self._table
        reducers = (
            1 if tensor.nbytes * self.size < ONE_REDUCER_BYTES else min(self.size, self._cores)
        )
        if self.rank < reducers:
            self._await_all(call)
            self._reduce_slice(tensor, op, reducers)
            table[self.rank, DONE] = seq
            if table[:reducers, DONE].min() >= seq:
                self._slot.wake(self._group.ranks)
        self._slot.wait(lambda: bool(table[:reducers, DONE].min() >= seq), call)
        if not direct:
            self._copy_out(tensor, int(table[:, DIRECT].argmin()))

    def _reduce_slice(self, tensor: Tensor, op: str, reducers: int) -> None:
        """Reduce this worker's share of the elements, and write it wherever somebody will look
        for it.
        """
        table, elements, view = self._table, tensor.numel(), self._slot.arena.tensor
        parts = [view(int(offset), elements, tensor.dtype) for offset in table[:, OFFSET]]
        # Members whose tensors lie in the arena find the result there; all others fetch it from the
        # first of them.
        wanted = table[:, DIRECT].astype(bool)
        wanted[wanted.argmin()] = True
        start, end = (elements * (self.rank + k) // reducers for k in (0, 1))
        for low in range(start, end, CHUNK_ELEMENTS):
            chunks = [part[low : min(low + CHUNK_ELEMENTS, end)] for part in parts]
            # The first is wanted, or nobody's any more.
            reduce_in_rank_order(chunks, op, out=chunks[0])
            for rank in range(1, self.size):
                if wanted[rank]:
                    chunks[rank].copy_(chunks[0])

    def _all_gather(self, tensor: Tensor) -> Gathered:
        return self._gather("all_gather", tensor)

    def _reduction(self, op: str) -> int:
        """What members say of an all-reduce, in one word."""
        return REDUCTIONS.index(op) + len(REDUCTIONS) * zlib.crc32(self._inside.encode())

    def _gather(self, call: str, tensor: Tensor) -> Gathered:
        self._enter(call, zlib.crc32(self._inside.encode()), tensor, stage=True)
        came = self._await_all(call)
        parts = []
        for rank in came:
            part = self._region(rank, tensor.dtype).to(tensor.device, copy=True)
            parts.append(
                part.view(tensor.shape)
                if part.numel() == tensor.numel()
                else part.view(-1, *tensor.shape[1:])
            )
        return Gathered(parts, came)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        call = "broadcast"
        # Nobody reads what the others bring.
        self._enter(call, root, tensor, stage=self.rank == root)
        came = self._await_all(call)
        if root not in came:
            raise self._slot.status_table.loss(self._group.ranks[root])
        if self.rank != root:
            self._copy_out(tensor, root)

    def _barrier(self) -> None:
        self._enter("barrier", 0, torch.empty(0))
        self._await_all("barrier")

    def _enter(self, call: str, arg: int, tensor: Tensor, stage: bool | None = None) -> bool:
        """Take part in the group's next collective. Return whether the tensor is used where it
        lies.

        `stage`: copy the tensor into the arena (True), do not (False), or do unless it lies there
        already (None)."""
        self._seq += 1
        own = None if stage else self._slot.arena.offset_of(tensor)
        offset = own or 0
        if own is None and stage is not False:
            offset = self._stage(tensor)
        row = self._table[self.rank]
        row[OP:DONE] = (
            OPS.index(call),
            arg,
            DTYPES.index(tensor.dtype),
            tensor.numel(),
            offset,
            own is not None,
        )
        row[SEQ] = self._seq  # last: it says that the rest of the row is there
        table, seq = self._table, self._seq
        if table[:, SEQ].min() >= seq or self._rest_came(table, seq):
            self._slot.wake(self._group.ranks)
        return own is not None

    def _await_all(self, call: str) -> Sequence[int]:
        """Wait until all members have come, and see that they came for the same. Return who
        came: all, or the rest.
        """
        table, seq = self._table, self._seq
        self._slot.wait(
            lambda: bool(table[:, SEQ].min() >= seq) or self._rest_came(table, seq), call
        )
        came = self._who_came(table, seq)
        # all_gather takes tensors of different sizes.
        agreed = ELEMENTS if call == "all_gather" else OFFSET
        calls = table[:, OP:agreed] if came is self._everyone else table[came, OP:agreed]
        if (calls != calls[0]).any():
            rank = came[int((calls != calls[0]).any(axis=1).argmax())]
            first, other = self._described(came[0]), self._described(rank)
            ranks = self._group.ranks
            raise MismatchError(
                f"rank {ranks[came[0]]} called {first}, rank {ranks[rank]} called {other}"
            )
        return came

    def _rest_came(self, table: NDArray[np.int64], seq: int) -> bool:
        """Whether those who have not come never will, and all others have."""
        return False

    def _who_came(self, table: NDArray[np.int64], seq: int) -> Sequence[int]:
        return self._everyone

    def _described(self, rank: int) -> str:
        _, op, arg, dtype, elements, *_ = map(int, self._table[rank])
        name = OPS[op]
        detail = {"all_reduce": f"({REDUCTIONS[arg % 4]})", "broadcast": f" from {arg}"}.get(
            name, ""
        )
        described = f"{name}{detail} of {elements} × {DTYPES[dtype]}"
        inside = {"all_reduce": arg // len(REDUCTIONS), "all_gather": arg}.get(name, 0)
        if inside == zlib.crc32(self._inside.encode()):
            return described + self._inside
        return f"{described} for {'another codec or tensor' if inside else 'no codec'}"

    @property
    def _table(self) -> NDArray[np.int64]:
        table: NDArray[np.int64] = self._group.tables[self._seq % 2]
        return table

    def _region(self, rank: int, dtype: torch.dtype) -> Tensor:
        row = self._table[rank]
        return self._slot.arena.tensor(int(row[OFFSET]), int(row[ELEMENTS]), dtype)

    def _copy_out(self, tensor: Tensor, rank: int) -> None:
        tensor.copy_(self._region(rank, tensor.dtype).view(tensor.shape))

    def _stage(self, tensor: Tensor) -> int:
        """Copy the tensor to where the others can read it until the collective after the next."""
        which = self._seq % 2
        self._staging[which] = self._at_least(self._staging[which], tensor.nbytes)
        offset, _ = self._staging[which]
        self._slot.arena.tensor(offset, tensor.numel(), tensor.dtype).view(tensor.shape).copy_(
            tensor
        )
        return offset

    def _at_least(self, area: tuple[int, int], nbytes: int) -> tuple[int, int]:
        """The same area if it is large enough, or a new one; at least doubled, so that little is
        left behind.
        """
        if nbytes <= area[1]:
            return area
        size = max(nbytes, 2 * area[1])
        return self._slot.arena.allocate(size), size

    # --- two workers ------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, peer: int) -> None:
        channel, world = self._group.channels[self.rank, peer], self._group.ranks[peer]
        self._slot.wait(lambda: bool(channel[TAKEN] >= channel[SEQ]), f"send to rank {world}")
        area = self._outbox[peer] = self._at_least(self._outbox.get(peer, (0, 0)), tensor.nbytes)
        self._slot.arena.tensor(area[0], tensor.numel(), tensor.dtype).view(tensor.shape).copy_(
            tensor
        )
        channel[DTYPE : OFFSET + 1] = DTYPES.index(tensor.dtype), tensor.numel(), area[0]
        channel[SEQ] += 1
        self._slot.wake((world,))

    def _send_bytes(self, message: Tensor, peer: int, may_be_lost: bool) -> None:
        self._send(message, peer)

    def _recv(self, tensor: Tensor, peer: int) -> None:
        message = self._await_message(peer)
        self._require_alike(message, peer, signature(tensor))
        tensor.copy_(message.view(tensor.shape))
        self._has_taken(peer)

    def _recv_bytes(self, peer: int, device: torch.device, may_be_lost: bool) -> Tensor:
        message = self._await_message(peer)
        any_bytes = message.numel() if message.dtype == torch.uint8 else "any number"
        self._require_alike(message, peer, f"{any_bytes} × {torch.uint8}")
        message = message.to(device, copy=True)
        self._has_taken(peer)
        return message

    def _await_message(self, peer: int) -> Tensor:
        """The next message of `peer`, where it lies until it is taken."""
        channel, world = self._group.channels[peer, self.rank], self._group.ranks[peer]
        self._slot.wait(lambda: bool(channel[SEQ] > channel[TAKEN]), f"recv from rank {world}")
        dtype, elements, offset = map(int, channel[DTYPE : OFFSET + 1])
        return self._slot.arena.tensor(offset, elements, DTYPES[dtype])

    def _has_taken(self, peer: int) -> None:
        channel = self._group.channels[peer, self.rank]
        channel[TAKEN] = channel[SEQ]
        self._slot.wake((self._group.ranks[peer],))

    def _require_alike(self, message: Tensor, peer: int, expected: str) -> None:
        if signature(message) != expected:
            raise MismatchError(
                f"rank {self._group.ranks[peer]} sent {signature(message)}, "
                f"rank {self._slot.rank} expected {expected}"
            )

    def _exchange(self, tensor: Tensor, peer: int) -> Tensor:
        # A send waits for nothing but the peer's taking the message before, so both may send first.
        received = torch.empty_like(tensor)
        self._send(tensor, peer)
        self._recv(received, peer)
        return received

    def _exchange_bytes(self, message: Tensor, peer: int, may_be_lost: bool) -> Tensor:
        self._send_bytes(message, peer, may_be_lost)
        return self._recv_bytes(peer, message.device, may_be_lost)
