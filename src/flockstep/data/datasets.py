"""Data sets by name: what they are, their files, and how the files become tensors.

digits comes with scikit-learn. The files of the others lie under FLOCKSTEP_DATA or in the user's
cache, where `flockstep data fetch NAME` puts them; their checksums are verified at each load.
ImageNet is a folder of the user's own there, and nothing of it is fetched or verified."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flockstep.data import formats
from flockstep.data.augmentation import PadCropFlip
from flockstep.data.files import (
    Archive,
    DataFile,
    Files,
    Form,
)
from flockstep.data.image_folder import ImageFolder, OwnPictures
from flockstep.data.memory import InMemory
from flockstep.data.normalisation import (
    CIFAR10_PIXELS,
    FASHION_MNIST_PIXELS,
    MNIST_PIXELS,
    Normalized,
)
from flockstep.fields import require, require_integer, require_name

Pair = tuple[InMemory, InMemory]
Roots = Sequence[Path] | None


@dataclass(frozen=True)
class DataSet:
    """A data set by name.

    Fields:
        name: in the table, on the command line and in messages.
        load: gives the data to train with and to test with; kept in memory from the first call on.
        sample_shape: of one input, as a model sees it.
        classes: how many a label, or a character, can be.
        dtype: of the inputs, as a model sees them.
        files: empty for a set that needs none.
        pictures: the folder of a set that its users get for themselves.
    """

    name: str
    load: Callable[[], tuple[Any, Any]]
    sample_shape: tuple[int, ...]
    classes: int
    dtype: torch.dtype = torch.float32
    files: Files = field(default_factory=lambda: Files(""))
    pictures: OwnPictures | None = None

    @property
    def nbytes(self) -> int:
        """To be downloaded."""
        return self.files.nbytes

    def is_there(self) -> bool:
        """Whether all files are; their checksums are not looked at."""
        if self.pictures is not None:
            return self.pictures.find() is not None
        return not self.files.forms or self.files.find() is not None

    def example(self, count: int = 1) -> Tensor:
        """A batch of zeros like the inputs of a model, for which no file is needed."""
        require_integer("count", count, 1)
        return torch.zeros((count, *self.sample_shape), dtype=self.dtype)


SHAKESPEARE_ALPHABET = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase


@functools.cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 handwritten digits, 8×8, scaled to [0, 1]: 1,437 to train with, 360
    to test.
    """
    rows = torch.from_numpy(_digits_table())
    images, labels = (rows[:, :-1] / 16.0).float(), rows[:, -1].long()
    order = torch.from_numpy(np.load(DIGITS_ORDER).astype(np.int64))
    train, test = order[:-DIGITS_TEST], order[-DIGITS_TEST:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


# The rows of the digits, those to test with at the end, as scikit-learn's own split has them:
# train_test_split(…, test_size=360, stratify=labels, random_state=0). A test holds them equal.
DIGITS_ORDER = Path(__file__).with_name("digits_order.npy")
DIGITS_TEST = 360


def _digits_table() -> np.ndarray:
    """64 pixels of 0 to 16 and a label in each row, read from scikit-learn's own file: importing
    scikit-learn for that takes two seconds of every process.
    """
    found = find_spec("sklearn")
    folders = [] if found is None else found.submodule_search_locations or []
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


@functools.cache
def mnist() -> Pair:
    """MNIST's handwritten digits, 28×28, normalised: 60,000 to train with, 10,000 to test."""
    return load_idx(MNIST_FILES, MNIST_PIXELS)


@functools.cache
def fashion_mnist() -> Pair:
    """Fashion-MNIST's pieces of clothing, 28×28, normalised: 60,000 to train with, 10,000 to
    test.
    """
    return load_idx(FASHION_MNIST_FILES, FASHION_MNIST_PIXELS)


@functools.cache
def cifar10() -> Pair:
    """CIFAR-10's colour photographs, 32×32, normalised: 50,000 to train with, augmented, and
    10,000 to test.
    """
    return load_cifar(CIFAR10_FILES, CIFAR10_PIXELS)


def tiny_shakespeare(context: int = 64) -> Pair:
    """40,000 lines of Shakespeare in windows of `context` characters: the first 90 % to train with,
    the rest to test.

    An input is (context,) places in SHAKESPEARE_ALPHABET; its target is the same, one character on.
    """
    require_integer("context", context, 1)
    return _tiny_shakespeare(context)


@functools.cache
def _tiny_shakespeare(context: int) -> Pair:
    return load_text(TINY_SHAKESPEARE_FILES, context)


def imagenet() -> tuple[ImageFolder, ImageFolder]:
    """ImageNet's photographs, from a folder of your own, cut to 224×224 and normalised: those in
    train/CLASS to train with, augmented, and those in val/CLASS to test.
    """
    return IMAGENET_PICTURES.load()


def load_idx(files: Files, pixels: Normalized, roots: Roots = None) -> Pair:
    """Grey images and labels from four idx files: images and labels to train with, images and
    labels to test.
    """
    train_images, train_labels, test_images, test_labels = files.load(roots)
    return _idx_part(train_images, train_labels, pixels), _idx_part(
        test_images, test_labels, pixels
    )


def _idx_part(images: tuple[str, Any], labels: tuple[str, Any], pixels: Normalized) -> InMemory:
    x = formats.images(*images, shape=(28, 28))
    y = formats.labels(*labels, count=len(x), classes=10)
    return InMemory(torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y), prepare=pixels)


def load_cifar(files: Files, pixels: Normalized, roots: Roots = None) -> Pair:
    """Colour images and labels from batches, the last of which is the one to test with."""
    *train, test = (batch for _, batch in files.load(roots))
    images, labels = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*train, strict=True))
    test_images, test_labels = map(torch.from_numpy, test)
    return (
        InMemory(images, labels, prepare=pixels, augment=PadCropFlip(padding=4)),
        InMemory(test_images, test_labels, prepare=pixels),
    )


def load_text(files: Files, context: int, roots: Roots = None) -> Pair:
    """Windows of a text that do not overlap, from its first 90 % and from the rest; only a tail
    is dropped.
    """
    ((_, tokens),) = files.load(roots)
    cut = len(tokens) * 9 // 10
    longest = len(tokens) - cut - 1
    require(
        context <= longest, "context", f"be at most {longest}, what there is to test with", context
    )
    return _windows(torch.from_numpy(tokens[:cut]), context), _windows(
        torch.from_numpy(tokens[cut:]), context
    )


def _windows(tokens: Tensor, context: int) -> InMemory:
    used = (len(tokens) - 1) // context * context
    return InMemory(tokens[:used].view(-1, context), tokens[1 : used + 1].view(-1, context))


def _gz(name: str, md5: str, size: int, plain_md5: str) -> DataFile:
    return DataFile(f"{name}-ubyte.gz", md5, size, plain_md5)


MNIST_FILES = Files(
    "mnist",
    (
        Form(
            formats.idx,
            # Here and below: the folder that is fetched to, then that of torchvision.
            ("mnist", "MNIST/raw"),
            (
                _gz(
                    "train-images-idx3",
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    9912422,
                    "6bbc9ace898e44ae57da46a324031adb",
                ),
                _gz(
                    "train-labels-idx1",
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    28881,
                    "a25bea736e30d166cdddb491f175f624",
                ),
                _gz(
                    "t10k-images-idx3",
                    "9fb629c4189551a2d022fa330f9573f3",
                    1648877,
                    "2646ac647ad5339dbf082846283269ea",
                ),
                _gz(
                    "t10k-labels-idx1",
                    "ec29112dd5afa0611ce80d1b7f02629c",
                    4542,
                    "27ae3e4e09519cfbb04c329615203637",
                ),
            ),
        ),
    ),
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)

FASHION_MNIST_FILES = Files(
    "fashion-mnist",
    (
        Form(
            formats.idx,
            ("fashion-mnist", "FashionMNIST/raw"),
            (
                _gz(
                    "train-images-idx3",
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    26421880,
                    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                ),
                _gz(
                    "train-labels-idx1",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    29515,
                    "9018921c3c673c538a1fc5bad174d6f9",
                ),
                _gz(
                    "t10k-images-idx3",
                    "bef4ecab320f06d8554ea6380940ec79",
                    4422102,
                    "8181f5470baa50b63fa0f6fddb340f0a",
                ),
                _gz(
                    "t10k-labels-idx1",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                    5148,
                    "15d484375f8d13e6eb1aabb0c3f46965",
                ),
            ),
        ),
    ),
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
)

CIFAR10_FILES = Files(
    "cifar10",
    (
        Form(
            formats.cifar_binary,
            ("cifar10/cifar-10-batches-bin", "cifar-10-batches-bin"),
            (
                DataFile("data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25", 30730000),
                DataFile("data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692", 30730000),
                DataFile("data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421", 30730000),
                DataFile("data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb", 30730000),
                DataFile("data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d", 30730000),
                DataFile("test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d", 30730000),
            ),
        ),
        Form(
            formats.cifar_python,
            ("cifar10/cifar-10-batches-py", "cifar-10-batches-py"),
            (
                DataFile("data_batch_1", "c99cafc152244af753f735de768cd75f"),
                DataFile("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
                DataFile("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
                DataFile("data_batch_4", "634d18415352ddfa80567beed471001a"),
                DataFile("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
                DataFile("test_batch", "40351d587109b95175f43aff81a1287e"),
            ),
        ),
    ),
    ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
    Archive(
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        170052171,
        folder="cifar-10-batches-bin",
    ),
)

TINY_SHAKESPEARE_FILES = Files(
    "tinyshakespeare",
    (
        Form(
            functools.partial(formats.text, alphabet=SHAKESPEARE_ALPHABET),
            ("tinyshakespeare",),
            (DataFile("input.txt", "6fb458f1232090904fb40fe944165e91", 1115394),),
        ),
    ),
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
)

IMAGENET_PICTURES = OwnPictures("imagenet")

DATASETS: dict[str, DataSet] = {
    each.name: each
    for each in (
        DataSet("digits", digits, (64,), 10),
        DataSet("mnist", mnist, (1, 28, 28), 10, files=MNIST_FILES),
        DataSet("fashion-mnist", fashion_mnist, (1, 28, 28), 10, files=FASHION_MNIST_FILES),
        DataSet("cifar10", cifar10, (3, 32, 32), 10, files=CIFAR10_FILES),
        DataSet(
            "tinyshakespeare",
            tiny_shakespeare,
            (64,),
            len(SHAKESPEARE_ALPHABET),
            torch.int64,
            TINY_SHAKESPEARE_FILES,
        ),
        DataSet("imagenet", imagenet, (3, 224, 224), 1000, pictures=IMAGENET_PICTURES),
    )
}


def find_dataset(name: str) -> DataSet:
    """The data set of that name."""
    require_name("data set", name, DATASETS)
    return DATASETS[name]


def dataset(name: str) -> tuple[Any, Any]:
    """The samples of a built-in data set to train with, and those to test with.

    Example:
        train, test = fs.dataset("digits")
        inputs, labels = train[:32]
    """
    return find_dataset(name).load()
