"""The largest elements, with coarse values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flockstep.codecs.base import (
    Codec,
    Memory,
    as_message,
    part_of,
)
from flockstep.codecs.bits import pack, packed_bytes, unpack
from flockstep.codecs.sparse import share_of
from flockstep.fields import require_integer, require_number

RANGE = 6  # standard deviations that all bins cover


@dataclass(frozen=True)
class QuantisedTopK(Codec):
    """The `ratio` of each chunk's elements that are largest by absolute value, as one of a few
    values; the rest waits, and adds up.

        the k = ratio · 4,096 largest |x_j| of a chunk, with mean μ and standard deviation σ:
        bin_j = min(max(round((x_j − μ) / (6σ/B) + B/2), 0), B − 1),   B = 2^bits
        x_j → the mean of its bin, else 0

    This is what SparseLoCo sends, with DiLoCo for its local steps: `fs.DiLoCo(period, outer_lr=1,
    outer_momentum=0, codec=fs.QuantisedTopK(0.01, decay=0.95))`, whose error takes the place of the
    outer momentum. With error feedback, of the coarse values too: decode(encode(x)) + error = x +
    decay · the error before. The bins are those of the authors' code, which has one table of their
    means per parameter tensor; here each chunk has its own.

    Bytes: for each element sent, `bits` for the value and ⌈log₂ bucket⌉ (12) for the place in its
    chunk, packed; 4 · 2^bits (16) a chunk.

    Fields:
        ratio: the share of the elements that is sent, above 0 and at most 1. In the paper 0.008 to
            0.03.
        bits: of a value, 1 to 8.
        bucket: elements of a chunk.
        decay: what is kept of the error from one message to the next. With 1 nothing is lost; in
            the paper 0.95.

    Paper: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025.

    Example:
        fs.run("digits-mlp", fs.DiLoCo(8, 1.0, 0.0, codec=fs.QuantisedTopK(ratio=0.1)), workers=4)
    """

    name: ClassVar[str] = "quantised_top_k"
    ratio: float
    bits: int = 2
    bucket: int = 4096
    decay: float = 1.0

    def __post_init__(self) -> None:
        require_number("ratio", self.ratio, above=0, at_most=1)
        require_integer("bits", self.bits, 1)
        require_number("bits", self.bits, at_most=8)
        require_integer("bucket", self.bucket, 2)
        require_number("decay", self.decay, at_least=0, at_most=1)

    @property
    def feeds_back(self) -> bool:
        return True

    @property
    def place_bits(self) -> int:
        """Bits of a place in a chunk."""
        return (self.bucket - 1).bit_length()

    def nbytes(self, elements: int) -> int:
        sent, tables = self._sent(elements), -(-elements // self.bucket) * (4 << self.bits)
        return tables + packed_bytes(sent, self.bits) + packed_bytes(sent, self.place_bits)

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int:
        return self.nbytes(like.numel())

    def _with_unsent(self, tensor: Tensor, memory: Memory, error: Tensor) -> Tensor:
        return error.mul_(self.decay).add_(tensor)

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        places = [tensor.new_empty(0, dtype=torch.int64)]
        bins = [tensor.new_empty(0, dtype=torch.int64)]
        tables = [tensor.new_empty(0, dtype=torch.float32)]
        start = 0
        for rows, length, kept in self._chunks(tensor.numel()):
            chunks = tensor[start : start + rows * length].view(rows, length)
            start += rows * length
            chosen = torch.topk(chunks.abs(), kept, dim=1, sorted=False).indices
            own_bins, own_tables = self._quantised(chunks.gather(1, chosen))
            places.append(chosen.view(-1))
            bins.append(own_bins.view(-1))
            tables.append(own_tables.view(-1))
        return as_message(
            torch.cat(tables),
            pack(torch.cat(bins), self.bits),
            pack(torch.cat(places), self.place_bits),
        )

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        total.index_add_(0, *self._parts(message, total), alpha=scale)

    def _quantised(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The bins of each row's values, and what each bin of each row stands for."""
        count = 1 << self.bits
        mean = values.mean(dim=1, keepdim=True)
        deviation = values.std(dim=1, keepdim=True, correction=min(1, values.shape[1] - 1))
        width = deviation.mul_(RANGE / count)
        width.masked_fill_(width == 0, 1)
        bins = values.sub(mean).div_(width).add_(count / 2).round_().clamp_(0, count - 1)
        bins = bins.nan_to_num_(0).long()  # what is not finite makes its bin's mean so
        sums = values.new_zeros(len(values), count).scatter_add_(1, bins, values)
        sizes = values.new_zeros(len(values), count).scatter_add_(1, bins, torch.ones_like(values))
        return bins, sums.div_(sizes.clamp_(min=1)).float()

    def _parts(self, message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The places of what was sent, and its values."""
        elements, count = like.numel(), 1 << self.bits
        sent, chunks = self._sent(elements), -(-elements // self.bucket)
        tables = part_of(message, 0, chunks * count, torch.float32)
        of_bins = message[4 * chunks * count :]
        of_places = of_bins[packed_bytes(sent, self.bits) :]
        bins = unpack(of_bins[: packed_bytes(sent, self.bits)], sent, self.bits)
        places = unpack(of_places, sent, self.place_bits)
        # The last chunk, if it is shorter, sends fewer.
        chunk = torch.arange(sent, device=like.device) // share_of(self.bucket, self.ratio)
        values = tables[chunk * count + bins]
        return chunk * self.bucket + places, values.to(like.dtype)

    def _sent(self, elements: int) -> int:
        """How many elements of a tensor are sent."""
        return sum(rows * kept for rows, _, kept in self._chunks(elements))

    def _chunks(self, elements: int) -> list[tuple[int, int, int]]:
        """How many chunks there are of a length, and how many elements of each are sent: the whole
        ones, and what is left.
        """
        whole, left = divmod(elements, self.bucket)
        forms = [(whole, self.bucket), (1, left)]
        return [
            (rows, length, share_of(length, self.ratio)) for rows, length in forms if rows * length
        ]
