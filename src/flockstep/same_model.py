"""Whether the flat models of all workers are made of the same leaves: numbers alone are exchanged,
and two that stand at the same place are taken for the same parameter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest

import torch
from torch import Tensor

from flockstep.comm import Comm
from flockstep.errors import MismatchError

Leaf = tuple[str, tuple[int, ...]]
"""Its name, "" if it has none, and its shape."""

TORCH = "torch"
LONGEST_NAME = 60  # characters of it in a message
REMEDY = "fs.jax.Worker takes order=[…] of names, fs.numpy.Worker the order of its dict"


@dataclass(frozen=True)
class Form:
    """What a flat model is made of.

    Fields:
        framework: that gave the leaves their names.
        dtype: of all of them.
        leaves: in the order of the flat tensor.
    """

    framework: str
    dtype: str
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(
        cls, framework: str, dtype: torch.dtype, leaves: Iterable[tuple[str, Sequence[int]]]
    ) -> Form:
        return cls(framework, str(dtype), tuple((name, tuple(shape)) for name, shape in leaves))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.leaves]

    def written(self) -> bytes:
        return json.dumps([self.framework, self.dtype, self.leaves]).encode()

    @classmethod
    def read(cls, text: bytes) -> Form:
        framework, dtype, leaves = json.loads(text)
        return cls(framework, dtype, tuple((name, tuple(shape)) for name, shape in leaves))


def require_same_model(comm: Comm, form: Form) -> None:
    """Complain, on all workers of a comm alike, of models whose numbers would not meet their like.

    Workers of one framework must have the same names and shapes in the same order. Frameworks call
    the same leaves by other names and shape them in other ways: between them the order of names is
    compared where the names are the same, and the shapes, as far as they tell."""
    if comm.size == 1 or _are_equal(comm, form.written()):
        return
    told = comm.all_gather(torch.frombuffer(bytearray(form.written()), dtype=torch.uint8))
    forms = {rank: Form.read(_bytes(part)) for rank, part in told.by_rank().items()}
    first, *others = forms
    for rank in others:
        difference = _difference(first, forms[first], rank, forms[rank])
        if difference is not None:
            raise MismatchError(difference)


def _are_equal(comm: Comm, text: bytes) -> bool:
    """Whether all workers have the same text; two numbers tell it, whatever its length."""
    number = int.from_bytes(sha256(text).digest()[:7])
    most = comm.all_reduce(torch.tensor([number, -number]), op="max")
    return int(most.sum()) == 0  # the largest is the smallest


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy(force=True).tobytes()


def _difference(first: int, one: Form, rank: int, other: Form) -> str | None:
    """What of two workers is not alike, in one line."""
    if one.dtype != other.dtype:
        return (
            f"rank {rank} has parameters of {other.dtype}, rank {first} of {one.dtype}: "
            "all workers of a run need the same type"
        )
    place = _first_difference(one, other)
    if place is None:
        return None
    ours, theirs = _told(one.leaves, place), _told(other.leaves, place)
    is_in_order = one.framework == other.framework and one.names == other.names
    has_remedy = not is_in_order and {one.framework, other.framework} != {TORCH}
    remedy = f". {REMEDY}" if has_remedy else ""
    return (
        f"rank {rank} has {theirs} as leaf {place} where rank {first} has {ours}: "
        f"all workers of a run need the same leaves in the same order{remedy}"
    )


def _told(leaves: Sequence[Leaf], place: int) -> str:
    if place >= len(leaves):
        return "none"
    name, shape = leaves[place]
    named = f"{cut(name, LONGEST_NAME)!r} " if name else "one "
    return f"{named}of shape {shape}"


def _first_difference(one: Form, other: Form) -> int | None:
    """The place of the first leaf that is another one."""
    is_one_framework = one.framework == other.framework
    are_named_alike = is_one_framework or sorted(one.names) == sorted(other.names)
    if not are_named_alike and len(one.leaves) != len(other.leaves):
        return None  # the same numbers may be one leaf here and two there
    fits = _is_equal if is_one_framework else _may_be_equal
    for place, (mine, theirs) in enumerate(zip_longest(one.leaves, other.leaves)):
        if mine is None or theirs is None:
            return place
        if are_named_alike and mine[0] != theirs[0]:
            return place
        if not fits(mine[1], theirs[1]):
            return place
    return None


def _is_equal(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one == other


def _may_be_equal(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes hold the same numbers in the same order; (3, 1) and (3,) do, and any shape
    and a flat one. A matrix and its transpose do not.
    """
    if math.prod(one) != math.prod(other):
        return False
    sides, others = ([size for size in shape if size != 1] for shape in (one, other))
    return sides == others or min(len(sides), len(others)) < 2


def cut(text: str, most: int) -> str:
    """A text without its middle, if it is longer."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
