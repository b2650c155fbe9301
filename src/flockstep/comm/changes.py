"""Reading only what has changed: the elements whose bits differ from what the reader has.

    8 bytes     k, how many of the n elements have changed
    where       4k bytes of indices, or n/8 bytes with a bit for each element: the shorter of both
    values      k elements, as they are now

Where that is no shorter than the value itself, the value itself travels. Either way the reader has
the value then, to the bit. Between hosts a value lives in parts: each has a message of its own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

COUNT_BYTES = 8
INDEX_BYTES = 4
MAX_INDEX = (1 << 31) - 1

# Bits are compared as integers: −0 is not 0, and what is not a number equals itself.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changes_nbytes(changed: int, elements: int, element_bytes: int) -> int:
    """How many bytes travel for so many changed elements."""
    message = COUNT_BYTES + _where_nbytes(changed, elements) + changed * element_bytes
    return min(message, elements * element_bytes)


def read_changes_nbytes(value: Tensor, known: Tensor) -> int:
    """How many bytes travel to who has `known` and wants the value."""
    changed = int(_differing(value, known).count_nonzero())
    return changes_nbytes(changed, value.numel(), value.element_size())


def written_changes(value: Tensor, known: Tensor) -> Tensor | None:
    """The message, as bytes, between flat tensors of the CPU; None where the value itself is as
    short.
    """
    differing = _differing(value, known)
    where = differing.nonzero().view(-1)
    changed, elements = where.numel(), value.numel()
    if changes_nbytes(changed, elements, value.element_size()) == value.nbytes:
        return None
    count = torch.tensor([changed]).view(torch.uint8)
    if _has_indices(changed, elements):
        places = where.to(torch.int32).view(torch.uint8)
    else:
        places = torch.from_numpy(np.packbits(differing.numpy()))
    return torch.cat([count, places, value[where].view(torch.uint8)])


def apply_changes(message: Tensor, known: Tensor) -> None:
    """Make `known`, a flat tensor of the CPU, the value of which this is the message. Raise
    ValueError for what is none.
    """
    elements, element_bytes = known.numel(), known.element_size()
    if len(message) < COUNT_BYTES:
        raise ValueError(f"{len(message)} bytes say no number of changes")
    changed = int(message[:COUNT_BYTES].clone().view(torch.int64))
    values_at = COUNT_BYTES + _where_nbytes(changed, elements)
    if not 0 <= changed <= elements or len(message) != values_at + changed * element_bytes:
        raise ValueError(f"{len(message)} bytes are no {changed} changes of {elements} elements")
    places = message[COUNT_BYTES:values_at].clone()
    if _has_indices(changed, elements):
        where = places.view(torch.int32).long()
    else:
        bits = np.unpackbits(places.numpy(), count=elements)
        where = torch.from_numpy(np.flatnonzero(bits))
    is_there = not changed or (int(where.min()) >= 0 and int(where.max()) < elements)
    if len(where) != changed or not is_there:
        raise ValueError(f"the places of {changed} changes are not among {elements} elements")
    known[where] = message[values_at:].clone().view(known.dtype)


def _differing(value: Tensor, known: Tensor) -> Tensor:
    kind = INTEGERS.get(value.element_size())
    known = known.to(value.device)
    return value != known if kind is None else value.view(kind) != known.view(kind)


def _where_nbytes(changed: int, elements: int) -> int:
    bits = -(-elements // 8)
    return bits if elements > MAX_INDEX else min(INDEX_BYTES * changed, bits)


def _has_indices(changed: int, elements: int) -> bool:
    is_short = INDEX_BYTES * changed == _where_nbytes(changed, elements)
    return is_short and elements <= MAX_INDEX
