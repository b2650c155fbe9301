"""Low rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
from flockstep.fields import require_integer
from flockstep.randomness import Purpose, torch_stream

LEAST_SAVING = 2  # a matrix whose factors are not even this much smaller travels as it is


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Every matrix as the product of two thin ones, by one step of power iteration from the factors
    before.

        P = orthogonalise(M Q);   Q ← Mᵀ P;   M → P Qᵀ
        over workers: the mean of M Q, then the mean of Mᵀ P

    Tensors of more dimensions are matrices of their first by all others. Vectors, and matrices
    whose factors are not half as large, travel as they are. Warm start, and error feedback: the
    error is what the mean over the workers leaves out of a worker's own matrix, as in the authors'
    code (the paper's text takes the worker's own factors).

    Bytes: 4 (8 in double precision) an element of P, of Q and of what is not compressed. A mean is
    one all-reduce of all P and the rest, and one of all Q. A message alone has 8 more, and 16 a
    matrix that is compressed: it says where they lie.

    Fields:
        rank: columns of P and Q.

    Paper: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", 2019.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(codec=fs.PowerSGD(rank=2)), workers=4)
    """

    name: ClassVar[str] = "power_sgd"
    rank: int

    def __post_init__(self) -> None:
        require_integer("rank", self.rank, 1)

    def memory(
        self, like: Tensor, shapes: Sequence[torch.Size] = (), *, seed: int = 0, rank: int = 0
    ) -> Memory:
        if not shapes and like.dim() > 1:
            shapes = (like.shape,)
        memory = super().memory(like, shapes, seed=seed, rank=rank)
        draw = torch_stream(Purpose.FACTORS, seed)  # all workers start from the same factors
        for count, _, columns, thin in self._layout(memory).forms:
            memory.bases.append(torch.randn(count, columns, thin, generator=draw).to(memory.error))
        return memory

    def nbytes(self, elements: int, shapes: Sequence[torch.Size] = (), itemsize: int = 4) -> int:
        layout = _Layout.of(tuple(shapes), self.rank)
        factors = sum(
            count * (rows + columns) * thin for count, rows, columns, thin in layout.forms
        )
        return (factors + elements - layout.compressed) * itemsize

    def message_nbytes(self, like: Tensor, memory: Memory | None = None) -> int | None:
        if memory is None:
            return None
        header = self._layout(memory).header().nbytes
        return header + self.nbytes(like.numel(), memory.shapes, wide(like.dtype).itemsize)

    def average(self, carrier: Carrier, tensor: Tensor, memory: Memory) -> None:
        assert memory.error is not None
        own, layout = memory.error.add_(widened(tensor)), self._layout(memory)
        matrices = layout.matrices(own)
        lefts = [matrix @ basis for matrix, basis in zip(matrices, memory.bases, strict=True)]
        rest = layout.rest(own)
        *lefts, rest = _together(carrier, [*lefts, rest])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.mT @ left for matrix, left in zip(matrices, lefts, strict=True)]
        memory.bases = _together(carrier, rights)
        result = layout.joined(
            [left @ right.mT for left, right in zip(lefts, memory.bases, strict=True)], rest, own
        )
        own.sub_(result)
        tensor.copy_(result)

    @property
    def feeds_back(self) -> bool:
        return True

    def _encode(self, tensor: Tensor, memory: Memory | None) -> Tensor:
        """Without a memory nobody knows of matrices, and all travels as it is."""
        layout = self._layout(memory)
        bases = [] if memory is None else memory.bases
        matrices = layout.matrices(tensor)
        lefts = [torch.linalg.qr(m @ basis).Q for m, basis in zip(matrices, bases, strict=True)]
        rights = [matrix.mT @ left for matrix, left in zip(matrices, lefts, strict=True)]
        if memory is not None:
            memory.bases = rights
        return as_message(layout.header().to(tensor.device), *lefts, *rights, layout.rest(tensor))

    def add_decoded(
        self, message: Tensor, total: Tensor, scale: float, memory: Memory | None = None
    ) -> None:
        layout = _Layout.read(message, self.rank) if memory is None else self._layout(memory)
        start = layout.header().nbytes
        flat = part_of(
            message, start, (message.numel() - start) // total.element_size(), total.dtype
        )
        shapes = [(count, rows, thin) for count, rows, _, thin in layout.forms]
        shapes += [(count, columns, thin) for count, _, columns, thin in layout.forms]
        *factors, rest = flat.split(
            [*(a * b * c for a, b, c in shapes), total.numel() - layout.compressed]
        )
        shaped = [factor.view(shape) for factor, shape in zip(factors, shapes, strict=True)]
        half = len(layout.forms)
        products = [p @ q.mT for p, q in zip(shaped[:half], shaped[half:], strict=True)]
        total.add_(layout.joined(products, rest, total), alpha=scale)

    def _layout(self, memory: Memory | None) -> _Layout:
        return _Layout.of(() if memory is None else memory.shapes, self.rank)


@dataclass(frozen=True)
class _Layout:
    """Which parts of a flat tensor are matrices worth compressing. Those of equal shape are
    worked on together.
    """

    # Of each: (matrices, rows, columns, columns of the factors).
    forms: tuple[tuple[int, int, int, int], ...]
    places: tuple[tuple[int, ...], ...]  # for each form, where its matrices begin
    # What lies between, as (start, end); the last has no end.
    rest_of: tuple[tuple[int, int | None], ...]
    compressed: int  # elements of all matrices

    @staticmethod
    @functools.cache
    def of(shapes: tuple[torch.Size, ...], rank: int) -> _Layout:
        by_form: dict[tuple[int, int], list[int]] = {}
        gaps, start, gap = [], 0, 0
        for shape in shapes:
            end = start + shape.numel()
            rows, columns = (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
            if (rows + columns) * min(rank, rows, columns) * LEAST_SAVING < rows * columns:
                by_form.setdefault((rows, columns), []).append(start)
                gaps.append((gap, start))
                gap = end
            start = end
        forms = tuple((len(starts), *form, min(rank, *form)) for form, starts in by_form.items())
        compressed = sum(count * rows * columns for count, rows, columns, _ in forms)
        rest = (*((a, b) for a, b in gaps if b > a), (gap, None))
        return _Layout(forms, tuple(map(tuple, by_form.values())), rest, compressed)

    @staticmethod
    def read(message: Tensor, rank: int) -> _Layout:
        """The one that a message begins with."""
        count = int(part_of(message, 0, 1, torch.int64))
        shapes: list[torch.Size] = []
        end = 0
        for start, form in part_of(message, 8, 2 * count, torch.int64).view(-1, 2).tolist():
            rows, columns = form >> 32, form & 0xFFFFFFFF
            shapes += [torch.Size([start - end]), torch.Size([rows, columns])]
            end = start + rows * columns
        return _Layout.of(tuple(shapes), rank)

    def header(self) -> Tensor:
        """How many matrices there are, and for each, in order, where it begins and its rows and
        columns, in one word.
        """
        found = sorted(
            (start, rows << 32 | columns)
            for (_, rows, columns, _), starts in zip(self.forms, self.places, strict=True)
            for start in starts
        )
        return torch.tensor([len(found), *(number for each in found for number in each)])

    def views(self, flat: Tensor) -> list[list[Tensor]]:
        """The matrices, form by form, where they lie."""
        return [
            [flat[start : start + rows * columns].view(rows, columns) for start in starts]
            for (_, rows, columns, _), starts in zip(self.forms, self.places, strict=True)
        ]

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """For each form, a stack of its matrices."""
        return [torch.stack(views) for views in self.views(flat)]

    def rest(self, flat: Tensor) -> Tensor:
        return torch.cat([flat[start:end] for start, end in self.rest_of])

    def joined(self, matrices: list[Tensor], rest: Tensor, like: Tensor) -> Tensor:
        """A flat tensor of these stacks and this rest."""
        whole = torch.empty_like(like)
        for views, stack in zip(self.views(whole), matrices, strict=True):
            torch._foreach_copy_(views, list(stack))
        gaps = [whole[start:end] for start, end in self.rest_of]
        torch._foreach_copy_(gaps, list(rest.split([gap.numel() for gap in gaps])))
        return whole


def _together(carrier: Carrier, tensors: list[Tensor]) -> list[Tensor]:
    """The means over the workers, in one all-reduce."""
    if not tensors:
        return []
    flat = carrier.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), op="mean")
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
