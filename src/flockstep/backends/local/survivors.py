"""`Comm` over shared memory for a run that goes on when workers are lost.

What makes it simple: a collective has one phase. Every member copies its tensor into the arena and
says so in one word, its sequence number; then it waits until each of the others has said so or is
lost, and works out the result for itself. The launcher calls a worker lost once its process is
gone, so its word does not change any more: it took part if it came to write it, and all see the
same. Its copy stays readable. Nobody depends on what another does later, no tensor is changed where
it lies before the result is known, and nothing needs to be undone.

That costs memory traffic: each worker reads all tensors, where `LocalComm` shares the work out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flockstep.backends.local.comm import (
    CHUNK_ELEMENTS,
    SEQ,
    TAKEN,
    LocalComm,
    LocalGroup,
)
from flockstep.backends.local.process_slot import ProcessSlot
from flockstep.comm import Clock, Meter, reduce_in_rank_order


class SurvivingComm(LocalComm):
    """A worker process's handle on those of its group that are still there."""

    def __init__(
        self, slot: ProcessSlot, group: LocalGroup, seed: int, meter: Meter, clock: Clock
    ) -> None:
        super().__init__(slot, group, seed, meter, clock)
        self._worlds = np.array(group.ranks)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self._missed() == 0).tolist())

    def _missed(self) -> NDArray[np.int64]:
        """When each member was missed; zero: it is there. A copy."""
        missed: NDArray[np.int64] = self._slot.status_table.missed[self._worlds]
        return missed

    def _rest_came(self, table: NDArray[np.int64], seq: int) -> bool:
        # First: the word of one who is lost, read after this, is its last.
        is_lost = self._missed() != 0
        return bool((is_lost | (table[:, SEQ] >= seq)).all())

    def _who_came(self, table: NDArray[np.int64], seq: int) -> Sequence[int]:
        came: list[int] = np.flatnonzero(table[:, SEQ] >= seq).tolist()
        return came

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        self._enter("all_reduce", self._reduction(op), tensor, stage=True)
        parts = [self._region(rank, tensor.dtype) for rank in self._await_all("all_reduce")]
        self._took_part = len(parts)
        # The worker's own part is the staged copy, so the sum may stand in its tensor at once.
        is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
        total = tensor.view(-1) if is_plain else torch.empty(tensor.numel(), dtype=tensor.dtype)
        for low in range(0, tensor.numel(), CHUNK_ELEMENTS):
            chunk = slice(low, low + CHUNK_ELEMENTS)
            reduce_in_rank_order([part[chunk] for part in parts], op, out=total[chunk])
        if not is_plain:
            tensor.copy_(total.view(tensor.shape))

    def _send(self, tensor: Tensor, peer: int) -> None:
        channel = self._group.channels[self.rank, peer]
        self._wait_for(peer, lambda: bool(channel[TAKEN] >= channel[SEQ]), "send to")
        if self._is_lost(peer):
            raise self._slot.status_table.loss(self._group.ranks[peer])
        super()._send(tensor, peer)

    def _await_message(self, peer: int) -> Tensor:
        channel = self._group.channels[peer, self.rank]
        self._wait_for(peer, lambda: bool(channel[SEQ] > channel[TAKEN]), "recv from")
        if channel[SEQ] <= channel[TAKEN]:  # what it sent before it was lost is still received
            raise self._slot.status_table.loss(self._group.ranks[peer])
        return super()._await_message(peer)

    def _wait_for(self, peer: int, is_ready: Callable[[], bool], call: str) -> None:
        """Wait until `is_ready()`, or until `peer` is lost."""
        self._slot.wait(
            lambda: self._is_lost(peer) or is_ready(), f"{call} rank {self._group.ranks[peer]}"
        )

    def _is_lost(self, peer: int) -> bool:
        return bool(self._slot.status_table.missed[self._group.ranks[peer]])
