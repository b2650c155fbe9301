"""Readers of the formats in which data sets are published. Bytes in, arrays out; what breaks a
rule is a DataError.
"""

from __future__ import annotations

import gzip
import math
import pickle
import warnings
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flockstep.errors import DataError

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]

CIFAR_SHAPE = (3, 32, 32)
CIFAR_CLASSES = 10

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_DIMENSIONS = 32  # as many as numpy of any version has


def unpacked(name: str, content: bytes) -> bytes:
    """What is in a gz file."""
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} must be a whole gz file (got: {error})") from error


def idx(name: str, content: bytes) -> NDArray[Any]:
    """The array of an idx file, which is: 0, 0, type, number of dimensions, dimensions, numbers;
    all big-endian.
    """
    kind, dimensions = content[2:4] if len(content) >= 4 and content[:2] == b"\0\0" else (0, 0)
    if kind not in _IDX_TYPES or not 1 <= dimensions <= _IDX_DIMENSIONS:
        rule = "start with an idx magic number: 0, 0, a type of 8, 9, 11 … 14, 1 to 32 dimensions"
        raise DataError(f"{name} must {rule} (got {list(content[:4])})")
    dtype = np.dtype(_IDX_TYPES[kind])
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(
            f"{name} must have {start} bytes before its numbers, of {dimensions} dimensions "
            f"(got {len(content)})"
        )
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    length = start + math.prod(shape) * dtype.itemsize
    if len(content) != length:
        raise DataError(
            f"{name} must be {length} bytes long for an array of shape {shape} (got {len(content)})"
        )
    numbers = (
        np.frombuffer(content, dtype, offset=start) if math.prod(shape) else np.empty(0, dtype)
    )
    try:
        return numbers.astype(dtype.newbyteorder("=")).reshape(shape)
    except ValueError as error:  # numpy has no array of shape (0, 2³², 2³²)
        raise DataError(
            f"{name} must be an array that numpy can hold (got shape {shape})"
        ) from error


def cifar_binary(name: str, content: bytes) -> tuple[Bytes, Labels]:
    """Images and labels of a CIFAR-10 binary batch: of each image a byte with its label, then
    its pixels.
    """
    record = 1 + math.prod(CIFAR_SHAPE)
    if not content or len(content) % record:
        raise DataError(f"{name} must be records of {record} bytes (got {len(content)} bytes)")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    pixels = np.ascontiguousarray(rows[:, 1:])
    return pixels.reshape(-1, *CIFAR_SHAPE), labels(name, rows[:, 0], len(rows), CIFAR_CLASSES)


def cifar_python(name: str, content: bytes) -> tuple[Bytes, Labels]:
    """Images and labels of a CIFAR-10 python batch, which is a pickled dict of Python 2.

    Only for bytes whose checksum was found right: unpickling can call anything.
    """
    # This is safe because `files.verified` took the checksum of these very bytes, in memory. No
    # file is opened again, which somebody could have exchanged in the meantime. MD5 is enough:
    # what can be forged are two files that are alike to it, not one that is like a given file.
    with warnings.catch_warnings():
        # NumPy 2.4 dislikes how Python 2 wrote the flags of a dtype.
        warnings.simplefilter("ignore", np.exceptions.VisibleDeprecationWarning)
        batch = pickle.loads(content, encoding="bytes")
    rows: Bytes = batch[b"data"]
    pixels = np.ascontiguousarray(rows).reshape(-1, *CIFAR_SHAPE)
    return pixels, labels(name, batch[b"labels"], len(rows), CIFAR_CLASSES)


def text(name: str, content: bytes, alphabet: str) -> NDArray[np.int64]:
    """The characters of a text as their places in an alphabet, which is sorted."""
    try:
        points = np.frombuffer(content.decode().encode("utf-32-le"), "<u4")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} must be UTF-8 (got {content[error.start :][:1]!r} at byte {error.start})"
        ) from error
    known = np.frombuffer(alphabet.encode("utf-32-le"), "<u4")
    tokens = np.searchsorted(known, points).astype(np.int64)
    strange = points[known[np.minimum(tokens, len(known) - 1)] != points]
    if strange.size:
        raise DataError(
            f"{name} must hold only the characters {alphabet!r} (got {chr(strange[0])!r})"
        )
    return tokens


def images(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> Bytes:
    """`array` if it is images of bytes, each of `shape`."""
    if array.dtype != np.uint8 or array.shape[1:] != shape:
        got = f"{array.dtype} of shape {array.shape}"
        raise DataError(f"{name} must hold images of bytes, each of shape {shape} (got {got})")
    return array


def labels(name: str, values: NDArray[Any] | list[int], count: int, classes: int) -> Labels:
    """`values` if they are one class of 0 … classes - 1 for each of `count` images."""
    array = np.asarray(values)
    # O: whole numbers of more than 64 bits.
    if array.shape != (count,) or array.dtype.kind not in "iuO":
        got = f"{array.dtype} of shape {array.shape}"
        raise DataError(f"{name} must hold {count} labels, whole numbers, one an image (got {got})")
    wrong = np.flatnonzero((array < 0) | (array >= classes))
    if wrong.size:
        raise DataError(
            f"{name} must hold labels of 0 to {classes - 1} (got {array[wrong[0]]} at {wrong[0]})"
        )
    return array.astype(np.int64)
