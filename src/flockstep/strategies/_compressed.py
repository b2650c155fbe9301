"""What strategies with a `codec` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flockstep.codecs import Codec, Memory
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


class Averager:
    """Means over the workers, of tensors of one kind that follow each other; through a codec, if
    there is one.
    """

    def __init__(self, worker: Worker, codec: Codec | None, like: Tensor) -> None:
        self._comm = worker.comm
        self._codec = codec
        self._memory: Memory | None = None
        if codec is not None:
            self._memory = codec.memory(
                like, worker.flat.shapes, seed=worker.comm.seed, rank=worker.comm.rank
            )

    def average(self, tensor: Tensor) -> None:
        """Replace `tensor` on every worker by the mean."""
        if self._codec is None or self._memory is None:
            self._comm.all_reduce(tensor, op="mean")
        else:
            self._codec.average(self._comm, tensor, self._memory)
