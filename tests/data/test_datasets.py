"""Data sets: small ones of the tests' own in every layout and with every fault, and the real
ones where they are.
"""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import flockstep as fs
from flockstep.data import datasets, formats
from flockstep.data.augmentation import PadCropFlip
from flockstep.data.datasets import (
    CIFAR10_FILES,
    CIFAR10_PIXELS,
    DATASETS,
    MNIST_FILES,
    MNIST_PIXELS,
    SHAKESPEARE_ALPHABET,
    DataSet,
    digits,
    find_dataset,
    load_cifar,
    load_idx,
    load_text,
    tiny_shakespeare,
)
from flockstep.data.files import (
    DataFile,
    Files,
    Form,
    folders,
)
from flockstep.errors import DataError

RANDOM = np.random.default_rng(0)


def needs(name: str) -> pytest.MarkDecorator:
    """For tests with the real data."""
    reason = (
        f"data set {name!r} is not there: run 'flockstep data fetch {name}', or set FLOCKSTEP_DATA"
    )
    return pytest.mark.skipif(not DATASETS[name].is_there(), reason=reason)


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def put(place: Path, contents: dict[str, bytes]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (place / name).write_bytes(content)


def message_of(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def idx_of(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


IMAGES = RANDOM.integers(0, 256, (7, 28, 28), dtype=np.uint8)
LABELS = np.array([5, 0, 4, 1, 9, 2, 1], np.uint8)
NAMES = ("train-images", "train-labels", "t10k-images", "t10k-labels")
GREY = dict(zip(NAMES, map(idx_of, (IMAGES[:5], LABELS[:5], IMAGES[5:], LABELS[5:])), strict=True))


def grey_files(contents: dict[str, bytes] = GREY) -> Files:
    """Files like those of MNIST, few and small, with the checksums of these contents."""
    packed = {name: gzip.compress(content) for name, content in contents.items()}
    files = tuple(
        DataFile(f"{name}.gz", md5(packed[name]), None, md5(contents[name])) for name in contents
    )
    return Files("grey", (Form(formats.idx, ("grey", "Grey/raw"), files),))


@pytest.mark.parametrize("folder", ["grey", "Grey/raw"])
@pytest.mark.parametrize("unpacked", [(), NAMES, NAMES[:2]], ids=["gz", "plain", "mixed"])
def test_idx_files_are_found_packed_or_not_in_both_layouts(tmp_path, folder, unpacked):
    for name, content in GREY.items():
        plain = name in unpacked
        put(
            tmp_path / folder,
            {name if plain else f"{name}.gz": content if plain else gzip.compress(content)},
        )
    train, test = load_idx(grey_files(), MNIST_PIXELS, [tmp_path])
    assert train.tensors[0].tolist() == IMAGES[:5, None].tolist()
    assert train.tensors[1].tolist() == LABELS[:5].tolist()
    assert test.tensors[0].tolist() == IMAGES[5:, None].tolist()
    assert test.tensors[1].tolist() == LABELS[5:].tolist()
    assert (train.tensors[0].dtype, train.tensors[1].dtype) == (torch.uint8, torch.int64)


def test_the_first_folder_with_all_files_is_taken(tmp_path):
    put(tmp_path / "first/grey", {"train-images": GREY["train-images"]})
    put(tmp_path / "second/Grey/raw", GREY)
    form, paths = grey_files().find([tmp_path / "first", tmp_path / "second"])
    assert form == grey_files().forms[0]
    assert paths == [tmp_path / "second/Grey/raw" / name for name in NAMES]


def test_pixels_are_normalised_one_batch_at_a_time(tmp_path):
    put(tmp_path / "grey", GREY)
    train, test = load_idx(grey_files(), MNIST_PIXELS, [tmp_path])
    x, y = train.batch(torch.arange(3))
    assert x.dtype == torch.float32
    expected = (torch.from_numpy(IMAGES[:3, None]).double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-6)
    assert y.tolist() == [5, 0, 4]
    assert train.augment is None
    assert test.augment is None


def test_missing_files_are_named_with_the_folders_and_the_remedy(tmp_path):
    message = message_of(DataError, lambda: grey_files().load([tmp_path / "a", tmp_path / "b"]))
    assert message == (
        f"data set 'grey' must have train-images[.gz] in {tmp_path}/a/grey or "
        f"{tmp_path}/a/Grey/raw or "
        f"{tmp_path}/b/grey or {tmp_path}/b/Grey/raw: run 'flockstep data fetch grey', or set "
        "FLOCKSTEP_DATA"
    )


def test_of_a_set_that_is_nearly_there_the_missing_file_is_named(tmp_path):
    put(tmp_path / "Grey/raw", {name: GREY[name] for name in NAMES if name != "t10k-images"})
    assert "must have t10k-images[.gz] in" in message_of(
        DataError, lambda: grey_files().load([tmp_path])
    )


@pytest.mark.parametrize("name", ["t10k-labels", "t10k-labels.gz"])
def test_a_wrong_checksum_is_named_with_both_sums(tmp_path, name):
    put(tmp_path / "grey", {**{each: GREY[each] for each in NAMES[:3]}, name: b"other"})
    file = grey_files().forms[0].files[3]
    message = message_of(DataError, lambda: load_idx(grey_files(), MNIST_PIXELS, [tmp_path]))
    assert (
        message
        == f"{tmp_path}/grey/{name} must have md5 {file.variants[name]} (got {md5(b'other')})"
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    put(tmp_path / "grey", GREY)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    message = message_of(DataError, lambda: grey_files().load([tmp_path]))
    assert (
        message
        == f"{tmp_path}/grey/train-images must be a file that can be read (got: Permission denied)"
    )


@pytest.mark.parametrize(
    ("name", "array", "rule"),
    [
        (
            "t10k-images",
            IMAGES[5:, 1:],
            r"must hold images of bytes, each of shape (28, 28) (got uint8 of shape (2, 27, 28))",
        ),
        (
            "train-labels",
            LABELS[:4],
            r"must hold 5 labels, whole numbers, one an image (got uint8 of shape (4,))",
        ),
        ("train-labels", LABELS[:5] + 5, r"must hold labels of 0 to 9 (got 10 at 0)"),
        (
            "train-images",
            LABELS,
            r"must hold images of bytes, each of shape (28, 28) (got uint8 of shape (7,))",
        ),
    ],
    ids=["shape", "count", "range", "labels for images"],
)
def test_wrong_shapes_and_labels_are_named_with_the_file(tmp_path, name, array, rule):
    contents = {**GREY, name: idx_of(array)}
    put(tmp_path / "grey", contents)
    message = message_of(
        DataError, lambda: load_idx(grey_files(contents), MNIST_PIXELS, [tmp_path])
    )
    assert message == f"{tmp_path}/grey/{name} {rule}"


COLOUR = RANDOM.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
BATCHES = {
    f"batch_{k}": bytes([k])
    + COLOUR[2 * k].tobytes()
    + bytes([9 - k])
    + COLOUR[2 * k + 1].tobytes()
    for k in range(3)
}


def colour_files() -> Files:
    files = tuple(DataFile(name, md5(content)) for name, content in BATCHES.items())
    return Files("colour", (Form(formats.cifar_binary, ("colour",), files),))


def test_all_batches_but_the_last_are_trained_with_and_augmented(tmp_path):
    put(tmp_path / "colour", BATCHES)
    train, test = load_cifar(colour_files(), CIFAR10_PIXELS, [tmp_path])
    assert torch.equal(train.tensors[0], torch.from_numpy(COLOUR[:4]))
    assert torch.equal(test.tensors[0], torch.from_numpy(COLOUR[4:]))
    assert train.tensors[1].tolist() == [0, 9, 1, 8]
    assert test.tensors[1].tolist() == [2, 7]
    assert train.augment == PadCropFlip(padding=4)
    assert test.augment is None


def test_augmentation_comes_before_the_normalisation_so_that_the_border_is_black(tmp_path):
    put(tmp_path / "colour", BATCHES)
    train, _ = load_cifar(colour_files(), CIFAR10_PIXELS, [tmp_path])
    x, y = train.batch(torch.arange(4), np.random.default_rng(3))
    raw, _ = PadCropFlip(4)(np.random.default_rng(3), train.tensors[0], train.tensors[1])
    assert torch.equal(x, CIFAR10_PIXELS(raw)[0])
    assert y.tolist() == [0, 9, 1, 8]
    black = -torch.tensor(CIFAR10_PIXELS.mean) / torch.tensor(CIFAR10_PIXELS.std)
    torch.testing.assert_close(
        CIFAR10_PIXELS(torch.zeros(1, 3, 1, 1, dtype=torch.uint8))[0].flatten(), black
    )


TEXT = "To be, or not to be: that is the question.\n" * 5


def text_files(content: str = TEXT) -> Files:
    form = Form(
        lambda name, raw: formats.text(name, raw, SHAKESPEARE_ALPHABET),
        ("text",),
        (DataFile("t", md5(content.encode())),),
    )
    return Files("text", (form,))


@pytest.mark.parametrize("context", [1, 4, 7, 20])
def test_text_is_cut_into_windows_whose_targets_are_one_character_on(tmp_path, context):
    put(tmp_path / "text", {"t": TEXT.encode()})
    parts = load_text(text_files(), context, [tmp_path])
    cut = len(TEXT) * 9 // 10
    for part, text in zip(parts, (TEXT[:cut], TEXT[cut:]), strict=True):
        x, y = part.tensors
        # Only what fills no window is dropped.
        assert x.shape == y.shape == ((len(text) - 1) // context, context)
        assert "".join(SHAKESPEARE_ALPHABET[token] for token in x.flatten()) == text[: x.numel()]
        assert (
            "".join(SHAKESPEARE_ALPHABET[token] for token in y.flatten()) == text[1 : y.numel() + 1]
        )
        assert (x.dtype, y.dtype) == (torch.int64, torch.int64)


@pytest.mark.parametrize(
    ("context", "rule"), [(0, "at least 1"), (2.5, "a whole number"), (True, "a whole number")]
)
def test_a_context_that_is_no_length_is_named(context, rule):
    message = message_of(fs.InvalidField, lambda: tiny_shakespeare(context))
    assert message == f"'context' must be {rule} (got {context})"


def test_a_context_longer_than_the_text_is_named(tmp_path):
    put(tmp_path / "text", {"t": TEXT.encode()})
    message = message_of(fs.InvalidField, lambda: load_text(text_files(), 22, [tmp_path]))
    assert message == "'context' must be at most 21, what there is to test with (got 22)"
    assert len(load_text(text_files(), 21, [tmp_path])[1]) == 1


def test_the_alphabet_is_sorted_and_has_65_characters():
    assert len(SHAKESPEARE_ALPHABET) == len(set(SHAKESPEARE_ALPHABET)) == 65
    assert list(SHAKESPEARE_ALPHABET) == sorted(SHAKESPEARE_ALPHABET)


def test_data_lies_under_the_variable_then_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FLOCKSTEP_DATA", raising=False)
    assert folders() == [tmp_path / ".cache/flockstep"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert folders() == [Path("/var/cache/flockstep")]
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert folders() == [tmp_path / ".cache/flockstep"]
    monkeypatch.setenv("FLOCKSTEP_DATA", "~/data")
    assert folders() == [tmp_path / "data", tmp_path / ".cache/flockstep"]


def test_a_user_without_a_home_is_told_to_set_the_variable(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FLOCKSTEP_DATA", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert (
        message_of(DataError, folders)
        == "FLOCKSTEP_DATA must be set for a user who has no home folder"
    )
    monkeypatch.setenv("FLOCKSTEP_DATA", "/data")
    assert folders() == [Path("/data")]


def test_the_variable_and_the_cache_are_where_sets_are_looked_for(monkeypatch, tmp_path):
    dataset = DataSet(
        "grey", lambda: load_idx(grey_files(), MNIST_PIXELS), (1, 28, 28), 10, files=grey_files()
    )
    monkeypatch.setenv("FLOCKSTEP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not dataset.is_there()
    put(tmp_path / "cache/flockstep/grey", GREY)
    assert dataset.is_there()
    assert len(dataset.load()[0]) == 5
    put(tmp_path / "data/grey", {**GREY, "train-images": b"damaged"})  # is looked for there first
    assert dataset.is_there()
    assert str(tmp_path / "data/grey/train-images") in message_of(DataError, dataset.load)


def test_a_folder_that_may_not_be_looked_into_has_no_data(monkeypatch, tmp_path):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    found = grey_files().find([tmp_path])
    monkeypatch.undo()
    assert found is None


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "classes", "nbytes"),
    [
        ("digits", (64,), torch.float32, 10, 0),
        ("mnist", (1, 28, 28), torch.float32, 10, 11_594_722),
        ("fashion-mnist", (1, 28, 28), torch.float32, 10, 30_878_645),
        ("cifar10", (3, 32, 32), torch.float32, 10, 170_052_171),
        ("tinyshakespeare", (64,), torch.int64, 65, 1_115_394),
    ],
)
def test_the_table_says_what_a_model_will_see_without_any_file(
    monkeypatch, name, shape, dtype, classes, nbytes
):
    monkeypatch.setenv("FLOCKSTEP_DATA", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    dataset = find_dataset(name)
    example = dataset.example(3)
    assert (example.shape, example.dtype) == ((3, *shape), dtype)
    assert not example.any()
    assert dataset.example().shape == (1, *shape)
    assert (dataset.name, dataset.classes, dataset.nbytes) == (name, classes, nbytes)
    assert dataset.files.name in (name, "")
    assert dataset.is_there() == (name == "digits")


def test_the_files_of_cifar_are_looked_for_in_both_formats_and_layouts(tmp_path):
    for form in CIFAR10_FILES.forms:
        for folder in form.folders:
            root = tmp_path / folder.replace("/", "-")
            put(root / folder, {file.name: b"" for file in form.files})
            assert CIFAR10_FILES.find([root]) == (
                form,
                [root / folder / file.name for file in form.files],
            )


def test_an_unknown_name_is_answered_with_the_known_ones():
    message = message_of(fs.UnknownName, lambda: find_dataset("mnsit"))
    assert message == (
        "unknown data set 'mnsit'; did you mean 'mnist'? "
        "known: cifar10, digits, fashion-mnist, imagenet, mnist, tinyshakespeare"
    )


def test_a_bad_count_is_named():
    assert "'count' must be at least 1 (got 0)" in message_of(
        fs.InvalidField, lambda: DATASETS["mnist"].example(0)
    )


def test_digits_need_no_file_and_are_loaded_once():
    train, test = digits()
    assert isinstance(train, TensorDataset)
    assert (len(train), len(test)) == (1437, 360)
    assert train.tensors[0].shape[1:] == DATASETS["digits"].sample_shape
    assert digits() is digits()


@needs("mnist")
def test_the_real_mnist():
    train, test = check(
        "mnist", 60_000, 10_000, first=[5, 0, 4], last=6, mean=[0.1307], std=[0.3081]
    )
    assert torch.bincount(train.tensors[1]).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert torch.bincount(test.tensors[1]).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert pickle.loads(pickle.dumps(test)).prepare == MNIST_PIXELS


@needs("fashion-mnist")
def test_the_real_fashion_mnist():
    train, test = check(
        "fashion-mnist", 60_000, 10_000, first=[9, 0, 0], last=5, mean=[0.2860], std=[0.3530]
    )
    assert torch.bincount(train.tensors[1]).tolist() == [6000] * 10
    assert torch.bincount(test.tensors[1]).tolist() == [1000] * 10


@needs("cifar10")
def test_the_real_cifar10():
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    train, test = check("cifar10", 50_000, 10_000, first=[6, 9, 9], last=7, mean=mean, std=std)
    assert torch.bincount(train.tensors[1]).tolist() == [5000] * 10
    assert torch.bincount(test.tensors[1]).tolist() == [1000] * 10
    assert train.tensors[0][0, :, 0, 0].tolist() == [59, 62, 63]


def check(name, train_count, test_count, first, last, mean, std):
    """What every set of images has: its counts, shapes, types, first and last labels, and the
    moments of its pixels.
    """
    dataset = DATASETS[name]
    train, test = dataset.load()
    assert dataset.load()[0] is train
    assert (len(train), len(test)) == (train_count, test_count)
    for part in (train, test):
        x, y = part.batch(torch.arange(5))
        assert (x.shape, x.dtype, y.dtype) == (
            (5, *dataset.sample_shape),
            torch.float32,
            torch.int64,
        )
        assert part.tensors[0].dtype == torch.uint8
    assert train.tensors[1][:3].tolist() == first
    assert test.tensors[1][-1] == last
    pixels = train.tensors[0]
    counts = torch.stack(
        [torch.bincount(channel.flatten(), minlength=256) for channel in pixels.unbind(1)]
    ).double()
    share, values = counts / counts.sum(1, keepdim=True), torch.arange(256) / 255
    means = share @ values.double()
    stds = (share @ values.double() ** 2 - means**2).sqrt()
    assert means.tolist() == pytest.approx(mean, abs=6e-5)
    assert stds.tolist() == pytest.approx(std, abs=6e-5)
    assert (train.prepare.mean, train.prepare.std) == (tuple(mean), tuple(std))
    return train, test


@needs("tinyshakespeare")
def test_the_real_shakespeare():
    train, test = tiny_shakespeare()
    assert train.tensors[0].shape == (15_685, 64)
    assert test.tensors[0].shape == (1_742, 64)
    assert int(train.tensors[0].max()) == 64
    assert (
        "".join(SHAKESPEARE_ALPHABET[token] for token in train.tensors[0][0, :14])
        == "First Citizen:"
    )
    assert torch.equal(train.tensors[0][1:, 0], train.tensors[1][:-1, -1])
    assert tiny_shakespeare(64)[0] is train
    assert tiny_shakespeare(context=128)[0].tensors[0].shape == (7_842, 128)


@needs("mnist")
def test_a_real_file_with_one_byte_changed_is_refused(tmp_path):
    _, paths = MNIST_FILES.find()
    for path in paths:
        (tmp_path / "mnist").mkdir(exist_ok=True)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= path == paths[-1]
        (tmp_path / "mnist" / path.name).write_bytes(content)
    message = message_of(DataError, lambda: load_idx(MNIST_FILES, MNIST_PIXELS, [tmp_path]))
    assert f"{tmp_path}/mnist/{paths[-1].name} must have md5 " in message


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        pytest.param("mnist", "MNIST/raw", marks=needs("mnist")),
        pytest.param("fashion-mnist", "FashionMNIST/raw", marks=needs("fashion-mnist")),
    ],
)
def test_the_real_files_are_known_unpacked_and_in_torchvisions_folders(tmp_path, name, folder):
    files = DATASETS[name].files
    _, paths = files.find()
    contents = {
        path.stem if path.suffix == ".gz" else path.name: path.read_bytes() for path in paths
    }
    plain = {
        each: gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        for each, content in contents.items()
    }
    put(tmp_path / folder, plain)
    train_images, _, _, test_labels = (array for _, array in files.load([tmp_path]))
    assert train_images.shape == (60_000, 28, 28)
    assert test_labels.shape == (10_000,)


def test_the_digits_are_those_of_scikit_learn_split_as_it_splits_them(monkeypatch):
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=360, stratify=labels, random_state=0)
    theirs = [torch.as_tensor(part) for part in parts]
    for hides_the_file in (False, True):
        if hides_the_file:  # as a later version of it might
            monkeypatch.setattr(datasets, "find_spec", lambda name: None)
        train, test = datasets.digits.__wrapped__()
        ours = [train.tensors[0], test.tensors[0], train.tensors[1], test.tensors[1]]
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(ours, theirs, strict=True))
