"""One worker's samples as a data set, for loops that make their own batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from flockstep.data.assignment import Assignment
from flockstep.data.sources import is_stream
from flockstep.fields import require


def share_of(
    dataset: Any, assignment: Assignment, *, workers: int, rank: int, seed: int
) -> Subset[Any]:
    """The samples of `rank`, in the data set's order. All workers get equally many: whoever holds
    fewer than another sees its first ones again.
    """
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_of_columns = isinstance(dataset, tuple | dict | str | Tensor | np.ndarray)
    require(
        is_indexed and not is_of_columns and not is_stream(dataset),
        "dataset",
        "be a torch Dataset that can be indexed, such as TensorDataset(x, y)",
        f"a {type(dataset).__name__}",
    )
    is_one = isinstance(assignment, Assignment)
    require(is_one, "assignment", "be an assignment such as fs.Disjoint()", assignment)
    parts = assignment.assign(len(dataset), workers, seed)
    most = max(map(len, parts))
    return Subset(dataset, np.resize(np.sort(parts[rank]), most).tolist())
