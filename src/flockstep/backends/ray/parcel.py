"""Python objects on their way through Ray's object store: a pickle, and beside it the memory of
tensors and arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flockstep.backends import pickling

Parcel = list[NDArray[np.uint8]]
"""The first part is the pickle. Ray stores arrays as they are and shows them to readers without
a copy.
"""


def pack(value: Any, called: str = "outcome") -> Parcel:
    """`called` is what an error calls the value."""
    return [np.frombuffer(piece, dtype=np.uint8) for piece in pickling.dump(value, called)]


def unpack(parcel: Parcel) -> Any:
    """The value, in memory of its own: what the store shows is everybody's, and must not be
    written to.
    """
    stream, *buffers = parcel
    return pickling.load([stream.data, *map(bytearray, buffers)])
