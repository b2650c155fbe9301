"""Changes to images that are trained with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flockstep.fields import require, require_integer, require_number

Box = tuple[float, float, float, float]  # left, top, right, bottom

TRIES = 10  # to find a window that lies within the picture


@dataclass(frozen=True)
class PadCropFlip:
    """Zeros around each image, a random window of the image's own size, and every second one
    mirrored, left to right.

    Fields:
        padding: zeros on each side, in pixels; the window lies at 0 … 2·padding from the top and
            from the left.

    Example:
        fs.InMemory(images, labels, augment=PadCropFlip(4))
    """

    padding: int = 4

    def __post_init__(self) -> None:
        require_integer("padding", self.padding, 0)

    def __call__(
        self, random: np.random.Generator, images: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """The images (B, C, H, W) as new ones; whatever else is in the batch, its labels say, as
        it was.
        """
        require(
            images.ndim == 4,
            "images",
            "be of shape (batch, channels, height, width)",
            tuple(images.shape),
        )
        count, _, height, width = images.shape
        top, left = random.integers(0, 2 * self.padding + 1, (2, count))
        mirrored = np.flatnonzero(random.integers(0, 2, count))
        padded = F.pad(images, (self.padding,) * 4)
        # Every window of every image as a view. numpy copies the chosen ones in rows, torch would
        # byte by byte; of the mirrored ones torch turns whole vectors, numpy would byte by byte.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1).numpy()
        chosen = windows[np.arange(count), :, top, left]
        chosen[mirrored] = torch.from_numpy(chosen[mirrored]).flip(-1).numpy()
        return torch.from_numpy(chosen), *rest


@dataclass(frozen=True)
class ResizedCropFlip:
    """A window of random size, shape and place, to be scaled to a square, and every second one
    mirrored, left to right.

    Chosen here: the logarithm of its shape is drawn, so that upright windows are as likely as lying
    ones. Where none of ten fits into the picture, it is the largest in the middle that has an
    allowed shape. Windows need not start at whole pixels.

    Fields:
        area: the least and the most that a window has of the picture's area.
        shape: the least and the most that a window is wide in terms of its height.

    Paper: Szegedy et al., "Going deeper with convolutions", 2015.

    Example:
        fs.ImageFolder("pictures/train", augment=fs.ResizedCropFlip())
    """

    area: tuple[float, float] = (0.08, 1.0)
    shape: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for field, most in (("area", 1.0), ("shape", np.inf)):
            bounds = getattr(self, field)
            is_pair = isinstance(bounds, tuple) and len(bounds) == 2
            require(is_pair, field, "be two numbers", bounds)
            for bound in bounds:
                require_number(field, bound, above=0, at_most=most, finite=field == "shape")
            require(bounds[0] <= bounds[1], field, "be the least, then the most", bounds)

    def window(self, random: np.random.Generator, width: int, height: int) -> tuple[Box, bool]:
        """What is cut of a picture of that size, and whether it is mirrored.

        As many numbers are drawn for every picture, so that those behind it in its batch do not
        depend on how large it is."""
        areas = width * height * random.uniform(*self.area, TRIES)
        lowest, highest = np.log(self.shape)
        shapes = np.exp(random.uniform(lowest, highest, TRIES))
        from_left, from_top, flip = random.random(3)

        widths, heights = np.sqrt(areas * shapes), np.sqrt(areas / shapes)
        fitting = np.flatnonzero((widths <= width) & (heights <= height))
        if fitting.size:
            across, down = float(widths[fitting[0]]), float(heights[fitting[0]])
        else:
            across = min(width, height * self.shape[1])
            down = min(height, width / self.shape[0])
            from_left = from_top = 0.5

        left, top = from_left * (width - across), from_top * (height - down)
        # A sum may be rounded to just above the picture's side.
        box = (left, top, min(left + across, width), min(top + down, height))
        return box, bool(flip < 0.5)
