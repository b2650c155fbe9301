"""Pictures in folders, one folder per class, which are read and decoded when a batch needs them."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flockstep.data.augmentation import ResizedCropFlip
from flockstep.data.files import folders
from flockstep.data.memory import Prepare
from flockstep.data.normalisation import IMAGENET_PIXELS
from flockstep.errors import DataError, FlockstepError
from flockstep.fields import require, require_integer, require_path

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder(Dataset[tuple[Tensor, ...]]):
    """The pictures in `folder/CLASS/…`, as (3, size, size) and the number of their class.

    Folders are looked into when it is made, pictures when a batch needs them: nothing is kept in
    memory but their names. Whatever a file holds (grey, a palette, CMYK, 16 bits) becomes red,
    green and blue. What cannot be decoded is a DataError with the name of the file.

    A picture is cut to a square and scaled to `size`. Where it is evaluated, or not augmented, that
    is the middle one: its shorter side scaled to `resize`, and `size` of that on each side.

    Fields:
        folder: with a folder of pictures for each class; classes are numbered by name.
        size: height and width of what a model sees, in pixels.
        resize: the length of the shorter side from which the middle is cut; at least `size`.
        augment: what is cut of a picture that is trained with, and whether it is mirrored; drawn
            from a numpy generator that depends on (seed, rank, step) alone. None: the middle.
        classes: their names in the order of their numbers; None: those of the folder. What is
            tested with takes those of what is trained with.
        prepare: `prepare(images, labels)` gives the batch that a model sees, of images of bytes.

    Example:
        train = fs.ImageFolder("pictures/train", augment=fs.ResizedCropFlip())
        test = fs.ImageFolder("pictures/val", classes=train.classes)
    """

    def __init__(
        self,
        folder: str | Path,
        size: int = 224,
        resize: int = 256,
        augment: ResizedCropFlip | None = None,
        classes: Sequence[str] | None = None,
        prepare: Prepare = IMAGENET_PIXELS,
    ) -> None:
        require_path("folder", folder)
        require_integer("size", size, 1)
        require_integer("resize", resize, 1)
        require(resize >= size, "resize", f"be at least 'size', {size}", resize)
        is_known = augment is None or isinstance(augment, ResizedCropFlip)
        require(is_known, "augment", "be an fs.ResizedCropFlip(…)", augment)
        are_names = classes is None or (
            isinstance(classes, tuple | list) and all(isinstance(each, str) for each in classes)
        )
        require(are_names, "classes", "be names, such as train.classes", classes)
        _pillow()  # missed here rather than by a worker
        self.folder = Path(folder).expanduser().absolute()  # workers may start elsewhere
        self.size = size
        self.resize = resize
        self.augment = augment
        self.prepare = prepare
        self.classes, self.names, self.labels = _listed(self.folder, classes)

    def __len__(self) -> int:
        return len(self.names)

    def batch(self, index: Tensor, random: np.random.Generator | None = None) -> tuple[Tensor, ...]:
        """The pictures at `index` and their labels; augmented, if there is a source of
        randomness.
        """
        chosen = index.tolist()
        pixels = np.empty((len(chosen), self.size, self.size, 3), np.uint8)
        for place, number in enumerate(chosen):
            pixels[place] = self._pixels(self.names[number], random)
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        return self.prepare(images, self.labels.index_select(0, index))

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[0] for part in self.batch(torch.tensor([index])))

    def without_augmentation(self) -> ImageFolder:
        """The same pictures, each always the same."""
        same = copy.copy(self)  # which is spared another look into the folders
        same.augment = None
        return same

    def _pixels(self, name: str, random: np.random.Generator | None) -> np.ndarray:
        image = _decoded(self.folder / name)
        if random is None or self.augment is None:
            box, mirrored = _middle(*image.size, self.size / self.resize), False
        else:
            box, mirrored = self.augment.window(random, *image.size)
        pillow = _pillow()
        scaled = image.resize((self.size, self.size), pillow.Resampling.BILINEAR, box)
        pixels = np.asarray(scaled)
        return pixels[:, ::-1] if mirrored else pixels


def image_folders(
    folder: str | Path, size: int = 224, resize: int = 256
) -> tuple[ImageFolder, ImageFolder]:
    """The pictures in `folder/train` to train with, augmented, and those in `folder/val` to test
    with.

    Classes are the folders in `train`, and `val` must have no others. As torchvision has them, and
    as ImageNet is usually unpacked.

    Example:
        train, test = fs.image_folders("pictures")
        task = dataclasses.replace(fs.task("imagenet-resnet50"), train=train, test=test)
    """
    require_path("folder", folder)
    train = ImageFolder(Path(folder) / "train", size, resize, augment=ResizedCropFlip())
    return train, ImageFolder(Path(folder) / "val", size, resize, classes=train.classes)


@dataclass(frozen=True)
class OwnPictures:
    """A set of pictures that everybody has to get for themselves: a folder of that name, with
    `train` and `val` in it, under one of those where data may lie.
    """

    name: str

    def find(self, roots: Sequence[Path] | None = None) -> Path | None:
        """The first folder that has both parts."""
        for root in folders() if roots is None else roots:
            place = root / self.name
            if all(_is_folder(place / part) for part in ("train", "val")):
                return place
        return None

    def load(self, roots: Sequence[Path] | None = None) -> tuple[ImageFolder, ImageFolder]:
        place = self.find(roots)
        if place is None:
            raise self.missing(roots)
        return _loaded(place)

    def missing(self, roots: Sequence[Path] | None = None) -> DataError:
        """What to do about it."""
        places = folders() if roots is None else roots
        looked = " or ".join(str(root / self.name) for root in places)
        return DataError(
            f"data set {self.name!r} must have train/CLASS/*.jpg and val/CLASS/*.jpg in {looked}: "
            "it cannot be fetched, so put your own copy there, or set FLOCKSTEP_DATA"
        )


@functools.cache  # a million names are listed once
def _loaded(place: Path) -> tuple[ImageFolder, ImageFolder]:
    return image_folders(place)


def _listed(folder: Path, known: Sequence[str] | None) -> tuple[tuple[str, ...], list[str], Tensor]:
    """Classes, names of all pictures below the folder, and the number of the class of each."""
    found = _classes_in(folder)
    classes = tuple(found if known is None else known)
    strange = sorted(set(found).difference(classes))
    if strange:
        raise DataError(
            f"{folder} must have no folder that is not a class, of {len(classes)} "
            f"(got {strange[0]!r})"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    for each in found:
        pictures = _pictures_below(folder / each)
        if not pictures:
            raise DataError(f"{folder / each} must have a picture in it: {', '.join(ENDINGS)}")
        names += (f"{each}/{picture}" for picture in pictures)
        labels += [numbers[each]] * len(pictures)
    return classes, names, torch.tensor(labels)


def _classes_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            folders_there = [each.name for each in entries if each.is_dir()]
    except OSError as error:
        _cannot_be_read(error)
    found = sorted(name for name in folders_there if not name.startswith("."))
    if not found:
        raise DataError(f"{folder} must have a folder of pictures for each class (got none)")
    return found


def _pictures_below(folder: Path) -> list[str]:
    """Names relative to the folder, of whatever depth, sorted."""
    found = []
    for place, _, files in os.walk(folder, onerror=_cannot_be_read):
        inside = Path(place).relative_to(folder)
        pictures = (name for name in files if name.lower().endswith(ENDINGS))
        found += [(inside / name).as_posix() for name in pictures if not name.startswith(".")]
    return sorted(found)


def _cannot_be_read(error: OSError) -> NoReturn:
    rule = "must be a folder that can be read"
    raise DataError(f"{error.filename} {rule} (got: {error.strerror})") from error


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # in a folder that this user may not look into
        return False


def _middle(width: int, height: int, share: float) -> tuple[float, float, float, float]:
    """The square in the middle that has this share of the shorter side: left, top, right, bottom.

    Scaled to `size`, with share = size ÷ resize, that is the middle of the picture whose shorter
    side was scaled to `resize`, in one step."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _decoded(path: Path) -> Image:
    """The picture in a file, as red, green and blue."""
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            image.load()
            return _in_colour(image)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        # Pillow reports broken files by all of these.
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DataError(f"{path} must be a picture that can be decoded (got: {reason})") from error


def _in_colour(image: Image) -> Image:
    if image.mode.startswith("I"):  # 16 bits of grey, of which Pillow would cut off what is above 8
        high_bits = np.asarray(image).astype(np.int64) >> 8
        image = _pillow().fromarray(high_bits.clip(0, 255).astype(np.uint8))
    if "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow asks for this step
    return image.convert("RGB")


def _pillow() -> Any:
    """Pillow's module, loaded when somebody needs it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise FlockstepError(
            "folders of pictures need Pillow: pip install 'flockstep[images]'"
        ) from error
    return Image
