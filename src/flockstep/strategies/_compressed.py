"""What strategies with a `codec` share.

What travels is a change, never raw parameters without something that both sides know already. There
are two ways to lose nothing of it:

    a change that is sent and gone (a gradient, the steps since the last exchange): what a message
    leaves out is remembered by the codec, as its error, and added to what is sent next

    a difference to a copy that others keep: what a message leaves out is still a difference the
    next time, so the codec remembers no error
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.comm import Average, Comm, averager, handle
from flockstep.errors import WorkerLost
from flockstep.fields import require

if TYPE_CHECKING:
    from flockstep.worker import Worker


def require_codec(codec: object, *, of_gradients: bool = False) -> None:
    """`of_gradients`: these are what the method sends, and not changes made of them."""
    if codec is None:
        return
    rule = "be a codec such as fs.OneBit(), or None"
    require(isinstance(codec, Codec), "codec", rule, codec)
    rule = "be one for changes: this one is for gradients, those of SyncSGD"
    is_fitting = of_gradients or (isinstance(codec, Codec) and not codec.is_for_gradients)
    require(is_fitting, "codec", rule, codec)


def memory_of(worker: Worker, codec: Codec, like: Tensor, stream: int = 0) -> Memory:
    """For changes like this tensor. `stream` tells apart what a worker sends to different members:
    each draws its own numbers.
    """
    world = worker.comm
    name = stream * world.size + world.rank
    return codec.memory(like, worker.flat.shapes, seed=world.seed, rank=name)


def memory_of_differences(worker: Worker, codec: Codec, like: Tensor, stream: int = 0) -> Memory:
    """For differences that contain what was not sent before: no error is remembered."""
    memory = memory_of(worker, codec, like, stream)
    return dataclasses.replace(memory, error=None, of_differences=True)


@dataclass
class Averager:
    """Means over the workers, of tensors of one kind that follow each other; through a codec, if
    there is one.

    A codec carries parameters, or what they change by. Statistics behind them, as in a whole state,
    travel beside its message as they are: they change by far more than parameters do, and where
    one message stands for both, as with `OneBit`'s two means, what it leaves out of the one
    would be made up for by the other, until the model bursts.
    """

    memory: Memory | None  # of the codec

    comm: Comm = handle()
    codec: Codec | None = handle()
    plainly: Average = handle()  # without a codec
    count: int = handle()  # of parameters

    @classmethod
    def of(
        cls, worker: Worker, codec: Codec | None, like: Tensor, all_reduce: str = "flat"
    ) -> Averager:
        """For tensors like this one; all workers make it together."""
        return cls.among(worker.comm, 0, worker, codec, like, all_reduce)

    @classmethod
    def among(
        cls,
        comm: Comm,
        stream: int,
        worker: Worker,
        codec: Codec | None,
        like: Tensor,
        all_reduce: str = "flat",
    ) -> Averager:
        """Means over the members of a comm that the worker is in. `stream` tells apart what a
        worker averages with different members: each draws its own numbers.
        """
        parameters = like[: worker.flat.count]
        memory = None if codec is None else memory_of(worker, codec, parameters, stream)
        plainly = averager(comm, all_reduce)
        return cls(memory, comm=comm, codec=codec, plainly=plainly, count=worker.flat.count)

    def average(self, tensor: Tensor) -> None:
        """Replace `tensor` on every worker by the mean."""
        if self.codec is None:
            self.plainly(tensor)
            return
        parameters, statistics = tensor[: self.count], tensor[self.count :]
        self.comm.all_reduce(parameters, "mean", codec=self.codec, memory=self.memory)
        if statistics.numel():
            self.plainly(statistics)


@dataclass
class ReplicaAverager:
    """Means of whole replicas; through a codec, of their changes since they were last equal.

    x_i ← (1/w) Σ_j x_j, or x_i ← x₀ + (1/w) Σ_j C(x_j − x₀)

    Statistics behind the parameters take the first way with a codec, too: C keeps them.
    """

    averager: Averager
    start: Tensor | None  # x₀, for a codec

    @classmethod
    def of(cls, worker: Worker, codec: Codec | None, stream: int = 0) -> ReplicaAverager:
        """All workers make it together, when their replicas are equal."""
        own = worker.flat.state
        start = None if codec is None else own.clone()
        return cls(Averager.among(worker.comm, stream, worker, codec, own), start)

    def average(self, worker: Worker) -> None:
        own = worker.flat.state
        if self.start is None:
            self.averager.average(own)
        else:
            self.averager.average(own.sub_(self.start))  # the change since they were last equal
            own.copy_(self.start.add_(own))

    def are_equal(self, parameters: Tensor) -> None:
        """The replicas have become equal in another way: their parameters, or all of their state.
        Buffers that differ stay changes since they were last equal.
        """
        if self.start is not None:
            self.start[: parameters.numel()] = parameters


@dataclass
class PublicCopies:
    """x̂_k: what others know of worker k. Whoever keeps it adds what k's messages stand for, and so
    does k itself, so that all have the same bits.

        q_k = C((x_k − x̂_k)/τ);   x̂_k ← x̂_k + q_k

    What q_k leaves out is still a part of the next difference. τ is 1, but for codecs that are
    right on average alone (E|C(x)|² ≤ τ|x|²): with those x̂ would run away from x.
    """

    copies: dict[int, Tensor]
    memory: Memory

    codec: Codec = handle()

    @classmethod
    def of(
        cls, worker: Worker, codec: Codec, names: Iterable[int], own: Tensor | None = None
    ) -> PublicCopies:
        """Made when all replicas are equal: everybody knows them then. Of the whole state, or of
        what else is the worker's `own`.
        """
        own = worker.flat.state if own is None else own
        memory = memory_of_differences(worker, codec, own)
        return cls({name: own.clone() for name in names}, memory, codec=codec)

    def message(self, own: Tensor, name: int) -> Tensor:
        """q of the worker's own copy, as bytes. It has an effect where it is heard."""
        difference = own - self.copies[name]
        difference /= self.codec.second_moment(difference.numel())
        return self.codec.encode(difference, self.memory)

    def hear(self, message: Tensor, name: int) -> None:
        """x̂ ← x̂ + q."""
        known = self.copies[name]
        known += self.codec.decode(message, known)

    def share_of_bytes(self, own: Tensor) -> float:
        """How long messages are, of what they stand for, at most 1; a tenth where that depends on
        the values.
        """
        settled = dataclasses.replace(self.memory, messages=sys.maxsize)  # after any warm-up
        nbytes = self.codec.message_nbytes(own, settled)
        return 0.1 if nbytes is None else min(1.0, nbytes / own.nbytes)

    def __getitem__(self, name: int) -> Tensor:
        return self.copies[name]


def written(codec: Codec, message: Tensor) -> Codec:
    """The codec with a message that it has written already, and gives out in place of new ones: one
    that draws numbers, or remembers, would give each receiver another.

    It is the same codec to whoever reads the message."""

    def encode(tensor: Tensor, memory: Memory | None = None) -> Tensor:
        return message

    same = copy.copy(codec)
    object.__setattr__(same, "encode", encode)  # codecs are frozen
    return same


def broadcast_message(
    comm: Comm, write: Callable[[], Tensor], roots: Sequence[int], device: torch.device
) -> tuple[int, Tensor]:
    """The message of the first of `roots` that is not lost, on the device on which it will be
    decoded, and whose it is; the others hear its length first.
    """
    for root in roots:
        message = write() if comm.rank == root else torch.empty(0, dtype=torch.uint8)
        try:
            length = int(comm.broadcast(torch.tensor(message.numel()), root))
            if comm.rank != root:
                message = torch.empty(length, dtype=torch.uint8, device=device)
            return root, comm.broadcast(message, root)
        except WorkerLost:  # raised on every worker alike: all try the next
            if root == roots[-1]:
                raise
    raise ValueError("roots must name a worker")
