"""Process groups of torch.distributed: each made once, when it is first needed, and kept.

They are made directly, not through `init_process_group`, so that a program may use
torch.distributed for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from flockstep.comm import reduce_in_rank_order

# A wait that is cut into slices can be given up: within a slice nothing else is heard.
SLICE = timedelta(milliseconds=100)

# What torch still does for nobody in this process: groups whose work was given up, and threads that
# wait in torch. Torch waits for the work of a group when the group is destroyed, so they never are.
abandoned: list[Any] = []

Key = tuple[str, tuple[int, ...], str]


class Groups:
    """The groups of one worker. `host` is the address of this host at which gloo listens."""

    def __init__(
        self, store: tuple[str, int], run: str, host: str, rank: int, seconds: float
    ) -> None:
        self._address = store
        self._run = run
        self._host = host
        self._rank = rank
        self._timeout = timedelta(seconds=seconds)
        self._groups: dict[Key, Any] = {}
        self._making: dict[Key, threading.Lock] = {}
        self._guard = threading.Lock()

    def has(self, name: str, members: tuple[int, ...], device: torch.device) -> bool:
        return (name, members, device.type) in self._groups

    def of(self, name: str, members: tuple[int, ...], device: torch.device) -> Any:
        """The group of these members: on gloo for tensors of the CPU, on NCCL for those of a
        GPU.
        """
        key = (name, members, device.type)
        with self._guard:
            lock = self._making.setdefault(key, threading.Lock())
        # A message that is sent and one that is received may both be the first between two workers.
        with lock:
            if key not in self._groups:
                # A connection of its own: one that was given up while it waited would keep all
                # others waiting.
                store = TCPStore(*self._address, is_master=False, timeout=self._timeout)
                prefix = f"{self._run} {name} {' '.join(map(str, members))} {device.type}"
                make = self._gloo if device.type == "cpu" else self._nccl
                self._groups[key] = make(
                    PrefixStore(prefix, store), members.index(self._rank), len(members)
                )
        return self._groups[key]

    def _gloo(self, store: Store, rank: int, size: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # torch's types leave its options out
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        options._threads = 2
        return gloo(store, rank, size, options)

    def _nccl(self, store: Store, rank: int, size: int) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)


def patiently(wait: Callable[[], Any], check: Callable[[], None]) -> Any:
    """Do in a thread what torch does in one piece, so that `check`, called now and then, can end
    the wait.
    """
    outcome: list[Any] = []

    def do() -> None:
        try:
            outcome.extend((wait(), None))
        except RuntimeError as error:  # all that torch.distributed raises
            outcome.extend((None, error))

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(SLICE.total_seconds())
    while thread.is_alive():
        try:
            check()
        except BaseException:
            abandoned.append(thread)
            raise
        thread.join(SLICE.total_seconds())
    value, error = outcome
    if error is not None:
        raise error
    return value


Finish = Callable[[Any], None]
"""Waits for a work of torch.distributed."""


def all_reduce(group: Any, tensor: Tensor, op: str, finish: Finish) -> None:
    """Reduce in place, in rank order: every member reduces its slice of all tensors and gives it to
    all others.

    The bytes are those of a ring all-reduce, and the result is the same to the bit on every
    backend."""
    size, elements = group.size(), tensor.numel()
    share = -(-elements // size)
    if tensor.is_contiguous() and share * size == elements:
        whole = tensor.view(-1)
    else:
        whole = tensor.new_empty(share * size)
        whole[:elements].view(tensor.shape).copy_(tensor)
        whole[elements:].zero_()
    received = torch.empty_like(whole)
    finish(group.alltoall_base(received, whole, [], []))
    slices = list(received.view(size, share))
    reduce_in_rank_order(slices, op, out=slices[0])
    finish(group._allgather_base(whole, slices[0]))
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole[:elements].view(tensor.shape))


def all_gather(group: Any, tensor: Tensor, lengths: list[int], finish: Finish) -> list[Tensor]:
    """All members' tensors, flat; `lengths` are their numbers of elements. A group of one is
    None.
    """
    share = max(lengths)
    own = tensor.contiguous().view(-1)
    if own.numel() < share:
        own = torch.cat([own, own.new_zeros(share - own.numel())])
    parts = own.new_empty(len(lengths), share)
    if group is None:
        parts[0] = own
    elif share:
        finish(group._allgather_base(parts.view(-1), own))
    return [part[:length].clone() for part, length in zip(parts, lengths, strict=True)]


def broadcast(group: Any, tensor: Tensor, root: int, finish: Finish) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    whole = tensor.contiguous()
    finish(group.broadcast([whole], options))
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)
