"""Readers of the formats in which data sets are published. Bytes in, arrays out; what breaks a
rule is a DataError.
"""

from __future__ import annotations

import gzip
import math
import pickle
import struct
import zlib
from io import BytesIO
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

# What the many operations in a damaged pickle can meet.
_DAMAGED = (
    *(pickle.UnpicklingError, ArithmeticError, AssertionError, AttributeError, EOFError),
    *(LookupError, MemoryError, TypeError, ValueError, struct.error),
)


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
    """Images and labels of a CIFAR-10 python batch, which is a pickled dict of Python 2."""
    batch = _unpickled(name, content)
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        got = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise DataError(f"{name} must be a dict with 'data' and 'labels' (got {got})")
    if not isinstance(batch[b"data"], _Array):
        raise DataError(
            f"{name} must hold an array as 'data' (got {type(batch[b'data']).__name__})"
        )
    rows = batch[b"data"].as_bytes(name)
    if rows.ndim != 2 or rows.shape[1] != math.prod(CIFAR_SHAPE):
        raise DataError(
            f"{name} must hold 'data' of shape (images, {math.prod(CIFAR_SHAPE)}) "
            f"(got {rows.shape})"
        )
    numbers = batch[b"labels"]
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise DataError(
            f"{name} must hold a list of whole numbers as 'labels' (got {type(numbers).__name__})"
        )
    return rows.reshape(-1, *CIFAR_SHAPE), labels(name, numbers, len(rows), CIFAR_CLASSES)


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


class _Dtype:
    """Stands in for a numpy dtype in a pickle."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and the like: nothing to one who reads bytes."""


class _Array:
    """Stands in for a numpy array in a pickle."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.fortran, self.content = state

    def as_bytes(self, name: str) -> Bytes:
        """The array itself, if it is one of bytes."""
        code = getattr(getattr(self, "dtype", None), "code", None)
        if code != b"u1":
            raise DataError(f"{name} must hold 'data' of type b'u1' (got {code!r})")
        try:
            numbers = np.frombuffer(self.content, np.uint8).copy()
            return numbers.reshape(self.shape, order="F" if self.fortran else "C")
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{name} must hold 'data' of as many bytes as its shape says (got: {error})"
            ) from error


class _Unpickler(pickle._Unpickler):
    """Builds plain containers and numbers, and stand-ins for arrays: a pickle could name any
    function to be called.

    In Python: the unpickler in C takes whatever memory a damaged pickle names, and 60,000 strings
    are soon read."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
        ):
            return lambda *_: _Array()
        if (module, name) == ("numpy", "ndarray"):
            return _Array
        if (module, name) == ("numpy", "dtype"):
            return _Dtype
        raise pickle.UnpicklingError(f"{module + '.' + name!r} is no part of an array")


def _unpickled(name: str, content: bytes) -> Any:
    try:
        return _Unpickler(BytesIO(content), encoding="bytes").load()
    except _DAMAGED as error:
        raise DataError(
            f"{name} must be a pickle of plain values and arrays (got {error!r})"
        ) from error
