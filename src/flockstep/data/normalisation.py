"""Pixels as a model sees them: of mean 0 and deviation 1, channel by channel."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalized:
    """Prepares images of bytes: (pixel / 255 - mean) / std, with one mean and std a channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        scale, shift = (each.to(images.device) for each in self._line)
        return images.float().mul_(scale).sub_(shift), *rest

    @functools.cached_property
    def _line(self) -> tuple[Tensor, Tensor]:
        """Scale and shift of each channel. Made once: that takes as long as to prepare a small
        batch.
        """
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
        return 1 / (255 * std), mean / std


# Mean and standard deviation of the training images' pixels, as published with models everywhere;
# the tests compare them with the data, but for those of ImageNet.
MNIST_PIXELS = Normalized((0.1307,), (0.3081,))
FASHION_MNIST_PIXELS = Normalized((0.2860,), (0.3530,))
CIFAR10_PIXELS = Normalized((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
IMAGENET_PIXELS = Normalized((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
