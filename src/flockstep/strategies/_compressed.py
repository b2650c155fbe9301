"""What strategies with a `codec` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.comm import Average, Comm, averager, handle
from flockstep.fields import require

if TYPE_CHECKING:
    from flockstep.worker import Worker


def require_codec(codec: object) -> None:
    require(
        codec is None or isinstance(codec, Codec),
        "codec",
        "be a codec such as fs.OneBit(), or None",
        codec,
    )


@dataclass
class Averager:
    """Means over the workers, of tensors of one kind that follow each other; through a codec, if
    there is one.
    """

    memory: Memory | None  # of the codec

    comm: Comm = handle()
    codec: Codec | None = handle()
    plainly: Average = handle()  # without a codec

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
        memory = None
        if codec is not None:
            world = worker.comm
            name = stream * world.size + world.rank
            memory = codec.memory(like, worker.flat.shapes, seed=world.seed, rank=name)
        return cls(memory, comm=comm, codec=codec, plainly=averager(comm, all_reduce))

    def average(self, tensor: Tensor) -> None:
        """Replace `tensor` on every worker by the mean."""
        if self.codec is None or self.memory is None:
            self.plainly(tensor)
        else:
            self.codec.average(self.comm, tensor, self.memory)
