"""Python objects on their way through Ray's object store: a pickle, and beside it the memory of
tensors and arrays.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flockstep.backends.local.payload import _Pickler

Parcel = list[NDArray[np.uint8]]
"""The first part is the pickle. Ray stores arrays as they are and shows them to readers without
a copy.
"""


def pack(value: Any) -> Parcel:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    return [np.frombuffer(part, dtype=np.uint8) for part in parts]


def unpack(parcel: Parcel) -> Any:
    """The value, in memory of its own: what the store shows is everybody's, and must not be
    written to.
    """
    stream, *buffers = parcel
    return pickle.loads(stream.data, buffers=[bytearray(buffer) for buffer in buffers])
