"""Truth values of elements.

On a CPU NumPy, which shares memory with torch, is several times as fast at them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def flags_of(tensor: Tensor, holds: Callable[[Any, float], Any], bound: float) -> Tensor:
    """For which elements a comparison, such as `operator.gt`, with a number holds."""
    if tensor.device.type == "cpu":
        return torch.from_numpy(holds(tensor.numpy(), bound))
    flags: Tensor = holds(tensor, bound)
    return flags


def places_of(flags: Tensor) -> Tensor:
    """The places of those that are true, in order."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().view(-1)


def count_of(flags: Tensor) -> int:
    """How many are true."""
    if flags.device.type == "cpu":
        return int(np.count_nonzero(flags.numpy()))
    return int(torch.count_nonzero(flags))
