"""Readers of idx, of CIFAR's two formats and of text: what is right is read, what is wrong is
named.
"""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from flockstep.data import formats
from flockstep.errors import DataError

IDX_TYPES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def idx_file(array: np.ndarray, code: int | None = None) -> bytes:
    code = IDX_TYPES[array.dtype.str[1:]] if code is None else code
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@settings(deadline=None)
@given(
    st_numpy.arrays(
        st.sampled_from(sorted(IDX_TYPES)),
        st_numpy.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5),
    )
)
def test_what_is_written_as_idx_is_read_as_it_was(array):
    read = formats.idx("file", idx_file(array))
    assert read.dtype == array.dtype
    assert read.flags.writeable  # torch warns of a tensor that is not
    np.testing.assert_array_equal(read, array)


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_an_idx_array_or_a_data_error(content):
    try:
        assert isinstance(formats.idx("file", content), np.ndarray)
    except DataError as error:
        assert str(error).startswith("file must ")


SMALL_IDX = idx_file(np.arange(6, dtype="u1").reshape(2, 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"must start with an idx magic number: .* \(got \[\]\)"),
        (b"\x00\x00\x08", r"magic number: .* \(got \[0, 0, 8\]\)"),
        (b"\x1f\x8b" + SMALL_IDX[2:], r"magic number: .* \(got \[31, 139, 8, 2\]\)"),
        (b"\x00\x00\x0a" + SMALL_IDX[3:], r"a type of 8, 9, 11 … 14, .* \(got \[0, 0, 10, 2\]\)"),
        (b"\x00\x00\x08\x00", r"1 to 32 dimensions \(got \[0, 0, 8, 0\]\)"),
        (b"\x00\x00\x08\xff" + bytes(4 * 255), r"1 to 32 dimensions \(got \[0, 0, 8, 255\]\)"),
        (SMALL_IDX[:6], r"must have 12 bytes before its numbers, of 2 dimensions \(got 6\)"),
        (SMALL_IDX[:-1], r"must be 18 bytes long for an array of shape \(2, 3\) \(got 17\)"),
        (SMALL_IDX + b"\x00", r"must be 18 bytes long for an array of shape \(2, 3\) \(got 19\)"),
        (
            b"\x00\x00\x08\x02" + b"\xff" * 8,
            r"for an array of shape \(4294967295, 4294967295\) \(got 12\)",
        ),
        (b"\x00\x00\x0e\x04" + bytes(4) + b"\xff" * 12, r"must be an array that numpy can hold"),
    ],
    ids=[
        *(
            "nothing",
            "short magic",
            "gz",
            "type",
            "no dimension",
            "many dimensions",
            "half a header",
            "short",
            "long",
        ),
        *("huge", "empty and huge"),
    ],
)
def test_what_is_no_idx_file_is_named(content, message):
    with pytest.raises(DataError, match=message) as raised:
        formats.idx("some/file", content)
    assert str(raised.value).startswith("some/file must ")


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"a" * 999)[:-9],
        gzip.compress(b"a") + b"tail",
        b"\x1f\x8b\x08" + b"\xff" * 30,
    ],
    ids=["text", "truncated", "with a tail", "garbage"],
)
def test_what_is_no_gz_file_is_named(content):
    with pytest.raises(DataError, match="^file must be a whole gz file "):
        formats.unpacked("file", content)


def test_images_of_another_shape_or_type_are_named():
    images = np.zeros((5, 28, 28), np.uint8)
    assert formats.images("file", images, (28, 28)) is images
    with pytest.raises(
        DataError, match=r"^file must hold .* shape \(28, 28\) \(got uint8 of shape \(5, 28, 27\)\)"
    ):
        formats.images("file", images[..., 1:], (28, 28))
    with pytest.raises(
        DataError, match=r"must hold images of bytes, .* \(got int32 of shape \(5, 28, 28\)\)"
    ):
        formats.images("file", images.astype(np.int32), (28, 28))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 9, 10, 11], r"must hold labels of 0 to 9 \(got 10 at 2\)"),
        ([0, -1, 2, 3], r"must hold labels of 0 to 9 \(got -1 at 1\)"),
        ([0, 1, 2, 2**70], r"must hold labels of 0 to 9 \(got 1180591620717411303424 at 3\)"),
        (
            [1, 2, 3],
            r"must hold 4 labels, whole numbers, one an image \(got int64 of shape \(3,\)\)",
        ),
        (np.zeros((4, 1), np.uint8), r"must hold 4 labels, .* \(got uint8 of shape \(4, 1\)\)"),
        (
            np.full(4, np.nan),
            r"must hold 4 labels, whole numbers, one an image \(got float64 of shape \(4,\)\)",
        ),
    ],
)
def test_labels_that_cannot_be_are_named(labels, message):
    with pytest.raises(DataError, match="^file " + message):
        formats.labels("file", labels, 4, 10)


IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
LABELS = [3, 0, 9, 5]


def cifar_binary(labels=LABELS, images=IMAGES) -> bytes:
    return b"".join(
        bytes([label]) + image.tobytes() for label, image in zip(labels, images, strict=True)
    )


def test_a_binary_batch_is_read():
    images, labels = formats.cifar_binary("file", cifar_binary())
    np.testing.assert_array_equal(images, IMAGES)
    assert labels.tolist() == LABELS
    assert labels.dtype == np.int64
    assert images.flags.writeable
    assert images.flags.c_contiguous


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"must be records of 3073 bytes \(got 0 bytes\)"),
        (cifar_binary()[:-1], r"must be records of 3073 bytes \(got 12291 bytes\)"),
        (cifar_binary([3, 0, 9, 10]), r"must hold labels of 0 to 9 \(got 10 at 3\)"),
    ],
)
def test_what_is_no_binary_batch_is_named(content, message):
    with pytest.raises(DataError, match="^file " + message):
        formats.cifar_binary("file", content)


class Python2:
    """Writes pickles as Python 2 did, with its strings of bytes, which Python 3 cannot write."""

    def bytes(self, value: bytes) -> bytes:
        short = len(value) < 256
        return (
            b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))
        ) + value

    def number(self, value: int) -> bytes:
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)

    def list(self, values: list[bytes]) -> bytes:
        return b"](" + b"".join(values) + b"e"

    def dict(self, values: dict[bytes, bytes]) -> bytes:
        return b"}(" + b"".join(self.bytes(key) + value for key, value in values.items()) + b"u"

    def array(
        self, content: bytes, shape: tuple[int, ...], code: bytes = b"u1", fortran: bool = False
    ) -> bytes:
        """numpy.core.multiarray._reconstruct(numpy.ndarray, (0,), 'b'), then its state."""
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        dtype = (
            b"cnumpy\ndtype\n"
            + self.bytes(code)
            + b"K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        )
        numbers = b"(" + b"".join(map(self.number, shape)) + b"t"
        return (
            made
            + b"(K\x01"
            + numbers
            + dtype
            + (b"\x88" if fortran else b"\x89")
            + self.bytes(content)
            + b"tb"
        )

    def file(self, value: bytes) -> bytes:
        return b"\x80\x02" + value + b"."


PY2 = Python2()


def cifar_python(**changes: bytes) -> bytes:
    """A batch with the keys of the original ones."""
    values = {
        "batch_label": PY2.bytes(b"training batch 1 of 5"),
        "labels": PY2.list([PY2.number(label) for label in LABELS]),
        "data": PY2.array(IMAGES.tobytes(), (4, 3072)),
        "filenames": PY2.list([PY2.bytes(b"leptodactylus_pentadactylus_s_000004.png")] * 4),
        **changes,
    }
    return PY2.file(PY2.dict({key.encode(): value for key, value in values.items() if value}))


def test_the_pickles_of_these_tests_are_what_numpy_itself_would_read():
    batch = pickle.loads(
        cifar_python(
            data=PY2.array(b"\x01\x02", (1, 2)).replace(b"K\x00K\x01\x87R(", b"\x89\x88\x87R(")
        ),
        encoding="bytes",
    )
    np.testing.assert_array_equal(batch[b"data"], [[1, 2]])
    assert batch[b"labels"] == LABELS


def test_a_python_batch_is_read_without_a_warning():
    images, labels = formats.cifar_python("file", cifar_python())
    np.testing.assert_array_equal(images, IMAGES)
    assert labels.tolist() == LABELS
    assert labels.dtype == np.int64
    assert images.flags.writeable


def test_a_python_batch_in_the_order_of_fortran_is_read():
    rows = IMAGES.reshape(4, 3072)
    images, _ = formats.cifar_python(
        "file", cifar_python(data=PY2.array(rows.tobytes("F"), (4, 3072), fortran=True))
    )
    np.testing.assert_array_equal(images, IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"must be a pickle of plain values and arrays \(got EOFError\(\)\)"),
        (cifar_python()[:-5], r"must be a pickle of plain values and arrays"),
        (PY2.file(PY2.list([])), r"must be a dict with 'data' and 'labels' \(got list\)"),
        (cifar_python(labels=b""), r"must be a dict with 'data' and 'labels' \(got .*b'filenames'"),
        (cifar_python(data=PY2.bytes(b"pixels")), r"must hold an array as 'data' \(got bytes\)"),
        (cifar_python(data=b"cnumpy\nndarray\n)R"), r"must hold 'data' of type b'u1' \(got None\)"),
        (
            cifar_python(data=PY2.array(bytes(8), (1, 8), b"i8")),
            r"must hold 'data' of type b'u1' \(got b'i8'\)",
        ),
        (
            cifar_python(data=PY2.array(bytes(9), (4, 3072))),
            r"must hold 'data' of as many bytes as its shape says",
        ),
        (
            cifar_python(data=PY2.array(bytes(12), (4, 3))),
            r"of shape \(images, 3072\) \(got \(4, 3\)\)",
        ),
        (
            cifar_python(data=PY2.array(bytes(3072), (3072,))),
            r"of shape \(images, 3072\) \(got \(3072,\)\)",
        ),
        (
            cifar_python(labels=PY2.bytes(b"\x01" * 4)),
            r"must hold a list of whole numbers as 'labels' \(got bytes\)",
        ),
        (
            cifar_python(labels=PY2.list([b"G" + bytes(8)] * 4)),
            r"must hold a list of whole numbers as 'labels'",
        ),
        (
            cifar_python(labels=PY2.list([PY2.number(10)] * 4)),
            r"must hold labels of 0 to 9 \(got 10 at 0\)",
        ),
        (
            cifar_python(labels=PY2.list([PY2.number(-7)] * 4)),
            r"must hold labels of 0 to 9 \(got -7 at 0\)",
        ),
        (
            cifar_python(labels=PY2.list([PY2.number(1)] * 3)),
            r"must hold 4 labels, .* \(got int64 of shape \(3,\)\)",
        ),
    ],
)
def test_what_is_no_python_batch_is_named(content, message):
    with pytest.raises(DataError, match=message) as raised:
        formats.cifar_python("file", content)
    assert str(raised.value).startswith("file must ")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (b"cos\nsystem\nU\x04exit\x85R", "os.system"),
        (b"cbuiltins\neval\nU\x01x\x85R", "builtins.eval"),
        (b"c__builtin__\neval\nU\x01x\x85R", "__builtin__.eval"),
        (b"cnumpy.core.multiarray\nfromfile\nU\x01x\x85R", "numpy.core.multiarray.fromfile"),
        (b"\x8c\x02os\x8c\x06system\x93U\x01x\x85R", "os.system"),
        (b"(ios\nsystem\n", "os.system"),
    ],
)
def test_a_pickle_that_calls_anything_else_is_refused_before_the_call(call, name):
    with pytest.raises(DataError, match=f"'{name}' is no part of an array"):
        formats.cifar_python("file", cifar_python(filenames=call))


class Evil:
    """Pickled, it asks whoever reads it to leave a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_does_not_run(protocol, tmp_path):
    evil = pickle.dumps({b"data": Evil(tmp_path / "trace"), b"labels": []}, protocol)
    with pytest.raises(DataError, match="file must be a pickle of plain values and arrays"):
        formats.cifar_python("file", evil)
    assert not list(tmp_path.iterdir())
    pickle.loads(evil)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]  # it would have


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_python_batch_is_read_or_named(at, byte, cut):
    content = bytearray(
        cifar_python(data=PY2.array(bytes(3072), (1, 3072)), labels=PY2.list([PY2.number(1)]))
    )
    # The pixels are most of it, and any pixels are right: all the rest is damaged in turn.
    places = [place for place in range(len(content)) if content[place] or place < 60]
    at = places[at % len(places)]
    content[at] = byte
    try:
        images, labels = formats.cifar_python("file", bytes(content[:at] if cut else content))
        assert images.shape[1:] == (3, 32, 32)
        assert len(images) == len(labels)
    except DataError as error:
        assert str(error).startswith("file must ")
        assert "\n" not in str(error)


def test_text_becomes_places_in_the_alphabet():
    assert formats.text("file", "baß\na".encode(), "\nabß").tolist() == [2, 1, 3, 0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ab\xffab", r"must be UTF-8 \(got b'\\xff' at byte 2\)"),
        (b"abcab", r"must hold only the characters 'ab' \(got 'c'\)"),
        (b"ab\nab", r"must hold only the characters 'ab' \(got '\\n'\)"),
    ],
)
def test_text_of_other_characters_is_named(content, message):
    with pytest.raises(DataError, match="^file " + message):
        formats.text("file", content, "ab")
