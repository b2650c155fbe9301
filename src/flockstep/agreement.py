"""What all workers say together, so that each decides alike."""

from __future__ import annotations

import math
from typing import Any

import torch

from flockstep.comm import Comm
from flockstep.fields import require, require_choice, require_flag

AGREEMENTS = {"any": "max", "all": "min", "mean": "mean"}  # by which reduction


def agreed(comm: Comm, value: Any, how: str) -> bool | float:
    """Whether `value` is true on any worker, or on all, or the mean of all: the same everywhere."""
    require_choice("how", how, AGREEMENTS)
    if hasattr(value, "item"):  # a tensor of one, or a number of numpy's
        numbers = math.prod(getattr(value, "shape", ()))
        require(numbers == 1, "value", "be one number", value)
        value = value.item()
    if how == "mean":
        require(isinstance(value, int | float), "value", "be a number", value)
    else:
        require_flag("value", value)

    told = torch.tensor(value, dtype=torch.float64)
    found = comm.all_reduce(told, op=AGREEMENTS[how]).item()
    return found if how == "mean" else bool(found)
