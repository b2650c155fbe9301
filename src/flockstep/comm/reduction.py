"""Sums in a fixed order, so that all backends agree bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

REDUCTIONS = ("sum", "mean", "max", "min")
HALF = (torch.float16, torch.bfloat16)


def reduce_in_rank_order(parts: Sequence[Tensor], op: str, out: Tensor) -> None:
    """Write the reduction of `parts` into `out`, which may be the first of them but no other.

    The order of the additions is fixed, so that backends agree bit for bit. Half-precision parts
    are added in float32 and rounded once."""
    is_half = out.dtype in HALF
    total = parts[0].float() if is_half else out if out is parts[0] else out.copy_(parts[0])
    for part in parts[1:]:
        if op == "max":
            torch.maximum(total, part.to(total.dtype), out=total)
        elif op == "min":
            torch.minimum(total, part.to(total.dtype), out=total)
        else:
            total.add_(part)
    if op == "mean":
        total.div_(len(parts))
    if total is not out:
        out.copy_(total)
