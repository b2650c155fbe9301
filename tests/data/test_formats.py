"""Readers of idx, of CIFAR's two formats and of text: what is right is read, what is wrong is
named.
"""

from __future__ import annotations

import gzip
import hashlib
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
from flockstep.data.files import DataFile, Files, Form
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


class Evil:
    """Pickled, it asks whoever reads it to leave a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def batch_of(md5: str) -> Files:
    file = DataFile("batch", md5)
    return Files("photographs", (Form(formats.cifar_python, ("photographs",), (file,)),))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_in_the_place_of_a_batch_does_not_run(protocol, tmp_path):
    honest = cifar_python()
    evil = pickle.dumps({b"data": Evil(tmp_path / "trace"), b"labels": []}, protocol)
    (tmp_path / "photographs").mkdir()
    (tmp_path / "photographs" / "batch").write_bytes(evil)

    with pytest.raises(DataError, match=r"photographs/batch must have md5 .* \(got "):
        batch_of(hashlib.md5(honest).hexdigest()).load([tmp_path])

    assert not (tmp_path / "trace").exists()
    pickle.loads(evil)
    assert (tmp_path / "trace").exists()  # it would have


def test_the_bytes_that_were_checked_are_those_that_are_unpickled(tmp_path, monkeypatch):
    """A file that is exchanged right after it was read is not looked at again."""
    honest = cifar_python()
    evil = pickle.dumps({b"data": Evil(tmp_path / "trace"), b"labels": []})
    (tmp_path / "photographs").mkdir()
    path = tmp_path / "photographs" / "batch"
    path.write_bytes(honest)
    read = Path.read_bytes

    def read_and_exchange(self: Path) -> bytes:
        content = read(self)
        path.write_bytes(evil)
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_exchange)
    ((_, (images, labels)),) = batch_of(hashlib.md5(honest).hexdigest()).load([tmp_path])
    assert read(path) == evil
    assert not (tmp_path / "trace").exists()
    np.testing.assert_array_equal(images, IMAGES)
    assert labels.tolist() == LABELS


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
