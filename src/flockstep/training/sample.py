"""Some of the training data, for what is found out of them besides training."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from flockstep.data import is_stream, source_of
from flockstep.fields import require


def sample_of(train: Any, samples: int, field: str, without: str, value: Any) -> Any:
    """So many of the training samples, evenly spaced, since data may be sorted. `without`: how the
    field is said where the training data are a stream, which would be used up.
    """
    rule = f"be {without} where the training data are a stream, which would be used up"
    require(not is_stream(train), field, rule, value)
    known = source_of(train).samples
    count = min(samples, known)
    return Subset(train, [number * known // count for number in range(count)])
