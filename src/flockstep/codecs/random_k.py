"""Elements chosen at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flockstep.codecs.base import (
    Carrier,
    Codec,
    Memory,
    as_message,
    part_of,
    wide,
    widened,
)
from flockstep.codecs.sparse import share_of
from flockstep.fields import require_number
from flockstep.randomness import Purpose, numpy_stream, stream_seed

HEADER = 8  # the number that the places follow from


@dataclass(frozen=True)
class RandomK(Codec):
    """A `ratio` of the elements, drawn anew for each message, the same on all workers; the rest
    waits, and adds up.

        x_j → x_j if j is drawn, else 0

    The places follow from the seed, so only values travel, and workers' messages are summed on the
    way. With error feedback.

    Bytes: 4 (8 in double precision) an element sent. A mean is one all-reduce of them; a message
        alone has 8 more.

    Fields:
        ratio: the share of the elements that is sent, above 0 and at most 1.

    Paper: Stich et al., "Sparsified SGD with Memory", 2018.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.RandomK(ratio=0.5)), workers=4)
    """

    name: ClassVar[str] = "random_k"
    ratio: float

    def __post_init__(self) -> None:
        require_number("ratio", self.ratio, above=0, at_most=1)

    def nbytes(self, elements: int, itemsize: int = 4) -> int:
        return HEADER + share_of(elements, self.ratio) * itemsize

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int:
        return self.nbytes(like.numel(), wide(like.dtype).itemsize)

    @property
    def feeds_back(self) -> bool:
        return True

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        number = _next_number(memory)
        places = self._places(number, tensor)
        return as_message(torch.tensor([number]).to(tensor.device), tensor[places])

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        total.index_add_(0, *self._parts(message, total), alpha=scale)

    def average(self, carrier: Carrier, tensor: Tensor, memory: Memory) -> None:
        assert memory.error is not None
        unsent = memory.error.add_(widened(tensor))
        places = self._places(_next_number(memory), tensor)
        values = unsent[places]
        unsent[places] = 0
        mean = carrier.all_reduce(values, op="mean")
        tensor.zero_().index_put_((places,), mean.to(tensor.dtype))

    def _parts(self, message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        number = int(part_of(message, 0, 1, torch.int64))
        count = share_of(like.numel(), self.ratio)
        return self._places(number, like), part_of(message, HEADER, count, like.dtype)

    def _places(self, number: int, like: Tensor) -> Tensor:
        draw = numpy_stream(Purpose.PLACES, number)
        chosen = draw.choice(
            like.numel(), share_of(like.numel(), self.ratio), replace=False, shuffle=False
        )
        return torch.from_numpy(chosen).to(like.device)


def _next_number(memory: Memory | None) -> int:
    """Another one for each message, the same on all workers."""
    if memory is None:
        return int(torch.randint(1 << 62, ()))
    memory.messages += 1
    # It travels as a signed word.
    return stream_seed(Purpose.PLACES, memory.seed, memory.messages) >> 1
