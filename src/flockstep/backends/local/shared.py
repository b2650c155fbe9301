"""Shared tensors that really are shared: every worker reads and writes the same pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flockstep.backends.local.arena import ALIGNMENT, Arena
from flockstep.backends.local.process_slot import ProcessSlot
from flockstep.codecs import Codec
from flockstep.comm import Meter, SharedTensor, add_decoded, read_changes_nbytes


def _header_words(members: int) -> int:
    """Whose turn it is, and four words for each member: waits for the lock, has retired, waits
    for a change, how often it has changed the value.
    """
    return 1 + 4 * members


def _header_bytes(members: int) -> int:
    return -(-8 * _header_words(members) // ALIGNMENT) * ALIGNMENT


class LocalShared(SharedTensor):
    """A tensor in the arena. Nothing is locked but by `lock()`, which the kernel frees if its
    holder dies.
    """

    def __init__(
        self,
        slot: ProcessSlot,
        offset: int,
        name: str,
        like: Tensor,
        ranks: tuple[int, ...],
        rank: int,
        meter: Meter,
    ) -> None:
        self.name = name
        self.shape = like.shape
        self.dtype = like.dtype
        self.meter = meter
        self._slot = slot
        self._offset = offset
        self._ranks = ranks
        self._rank = rank
        members = len(ranks)
        words = slot.arena.words(offset, _header_words(members))
        self._turn = words[:1]
        of_members = words[1:].reshape(4, members)
        self._waits_for_lock, self._retired, self._waits_for_change, self._changes = of_members
        where = offset + _header_bytes(members)
        self._value = slot.arena.tensor(where, like.numel(), like.dtype).view(like.shape)

    @staticmethod
    def create(arena: Arena, value: Tensor, members: int) -> int:
        """Make a home with this value; return its offset."""
        header = _header_bytes(members)
        offset = arena.allocate(header + value.nbytes)
        arena.tensor(offset + header, value.numel(), value.dtype).view(value.shape).copy_(value)
        return offset

    def _read(self, out: Tensor) -> None:
        landed = self._changes_by_others()
        out.copy_(self._value)
        self._note(landed, reads=True)

    def _read_changes(self, known: Tensor, is_first: bool) -> None:
        landed = self._changes_by_others()
        now = self._value.clone()  # others may change it while elements are counted
        self._has_arrived(now.nbytes if is_first else read_changes_nbytes(now, known))
        known.copy_(now)
        self._note(landed, reads=True)

    def _write(self, tensor: Tensor) -> None:
        self._value.copy_(tensor)
        self._note(self._changes_by_others(), changes=True)
        self._wake(self._waits_for_change)

    def _add(self, tensor: Tensor, scale: float) -> None:
        self._value.add_(tensor.to(self._value.device), alpha=scale)
        self._note(self._changes_by_others(), changes=True)
        self._wake(self._waits_for_change)

    def _add_encoded(
        self, codec: Codec, messages: Sequence[Tensor], scale: float, sent: Tensor
    ) -> None:
        (message,) = messages
        add_decoded(codec, message, self._value, scale)
        self._note(self._changes_by_others(), changes=True)
        self._wake(self._waits_for_change)

    def _blend(self, tensor: Tensor, weight: float) -> Tensor:
        # What is added is measured from the value that is returned, so that what the centre gains
        # the caller can lose, whatever others do to the value in between.
        landed = self._changes_by_others()
        before = self._value.clone()
        self._value.add_(tensor.to(before.device) - before, alpha=weight)
        self._note(landed, reads=True, changes=True)
        self._wake(self._waits_for_change)
        return before.to(tensor.device)

    def _wait_until(self, holds: Callable[[Tensor], bool], out: Tensor) -> None:
        landed = 0

        def look() -> bool:
            nonlocal landed
            landed = self._changes_by_others()
            return holds(out.copy_(self._value))

        self._waits_for_change[self._rank] = 1
        self._slot.wait(look, f"wait_until of shared {self.name!r}")
        self._waits_for_change[self._rank] = 0
        self._note(landed, reads=True)

    def _changes_by_others(self) -> int:
        """How many have landed. Every member counts its own once they have, so none is missed.

        Without the lock, a value may already have some of a change that is still under way.
        """
        if not self.counts_staleness:
            return 0
        changes = self._changes.tolist()  # a few numbers, which numpy would take longer to add
        return int(sum(changes)) - int(changes[self._rank])

    def _note(self, landed: int, *, reads: bool = False, changes: bool = False) -> None:
        """Count a change, and what this worker knows of those by others."""
        if changes and self.counts_staleness:
            self._has_changed(landed)
            self._changes[self._rank] += 1
        if reads:
            self._has_read(landed)

    def pages(self) -> Tensor:
        return self._value

    def _lock(self, in_turn: bool) -> None:
        if in_turn:
            self._slot.wait(self._has_turn, f"lock in turn of shared {self.name!r}")
        self._acquire()

    def _unlock(self, in_turn: bool) -> None:
        if in_turn:
            self._pass_turn()
        self._release()

    def retire(self) -> None:
        # Turns are passed by holders only, so nobody can pass one to this worker meanwhile.
        self._acquire()
        self._retired[self._rank] = 1
        if self._turn[0] == self._rank:
            self._pass_turn()
        self._release()

    def _acquire(self) -> None:
        arena, offset = self._slot.arena, self._offset
        self._waits_for_lock[self._rank] = 1
        self._slot.wait(lambda: arena.try_lock(offset), f"lock of shared {self.name!r}")
        self._waits_for_lock[self._rank] = 0

    def _release(self) -> None:
        self._slot.arena.unlock(self._offset)
        self._wake(self._waits_for_lock)

    def _wake(self, waits: NDArray[np.int64]) -> None:
        """Wake those who have a one there."""
        waiting = waits.tolist()  # a copy first: numpy does not search an array that others change
        if any(waiting):
            self._slot.wake(rank for rank, waits in zip(self._ranks, waiting, strict=True) if waits)

    def _has_turn(self) -> bool:
        """The turn of one who was lost before passing it belongs to the next: nobody needs to
        write that down.
        """
        turn = self._turn[0]
        if turn == self._rank:
            return True
        is_lost = self._slot.status_table.missed[self._ranks[turn]]
        return bool(is_lost) and self._first_from(int(turn)) == self._rank

    def _pass_turn(self) -> None:
        """To the next member that still takes turns; to nobody when all have retired."""
        following = self._first_from(self._rank + 1)
        if following is not None:
            self._turn[0] = following
            self._slot.wake((self._ranks[following],))

    def _first_from(self, rank: int) -> int | None:
        """The first member from `rank` on, in a circle, that has neither retired nor been lost."""
        members, missed = len(self._ranks), self._slot.status_table.missed
        for distance in range(members):
            member = (rank + distance) % members
            if not self._retired[member] and not missed[self._ranks[member]]:
                return member
        return None
