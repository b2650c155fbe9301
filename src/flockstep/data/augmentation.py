"""Changes to images that are trained with, vectorised over the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flockstep.fields import require, require_integer


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
