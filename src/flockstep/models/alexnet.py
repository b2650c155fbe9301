"""AlexNet, for pictures of 224×224."""

from __future__ import annotations

from torch import Tensor, nn

from flockstep.fields import require_choice, require_integer


class AlexNet(nn.Module):
    """Five convolutions and three linear layers: 60,965,224 parameters.

    Paper: Krizhevsky, Sutskever & Hinton, "ImageNet classification with deep convolutional neural
    networks", 2012. Its maps of 55×55 need pictures of 227×227, though it says 224×224. Chosen:
    224×224 with 2 pixels of zeros around them, which gives the same.

    FLOPs per parameter, forward: 23.8 as published (1.45 G), 36.4 without groups (2.27 G), and 23.4
    in the narrower form of Krizhevsky's "One weird trick", 2014 (1.43 G, 61,100,840 parameters).
    Wongpanich, You & Demmel (2020) give about 109, without saying of which figures. Without groups
    forward and backward pass together, which is three times the forward pass, make 109.2; their
    308 of ResNet-50 is the forward pass alone.

    Fields:
        groups: 2 as published: the second, fourth and fifth convolution see the maps of their own
            graphics card only. 1: all maps, 62,378,344 parameters.
        classes: that it tells apart.
    """

    def __init__(self, groups: int = 2, classes: int = 1000) -> None:
        super().__init__()
        require_choice("groups", groups, (1, 2))
        require_integer("classes", classes, 1)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 96, 11, stride=4, padding=2), nn.ReLU(), _across_channels(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(96, 256, 5, padding=2, groups=groups), nn.ReLU(), _across_channels(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(),
            nn.Conv2d(384, 384, 3, padding=1, groups=groups), nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1, groups=groups), nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Flatten(),
            nn.Linear(256 * 6 * 6, 4096), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )  # fmt: skip
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits

    def _initialise(self) -> None:
        """As published: Gaussians of deviation 0.01, and biases of 1 where that feeds the ReLUs of
        the second, fourth and fifth convolution and of the hidden linear layers; 0 elsewhere.
        """
        layers = [each for each in self.layers if isinstance(each, nn.Conv2d | nn.Linear)]
        for number, layer in enumerate(layers, start=1):
            nn.init.normal_(layer.weight, std=0.01)
            if layer.bias is not None:
                nn.init.constant_(layer.bias, 1.0 if number in (2, 4, 5, 6, 7) else 0.0)


def _across_channels() -> nn.Module:
    """The paper's b = a / (2 + 10⁻⁴ · Σ a²)^0.75 over five channels; torch takes the mean of the
    five, so its factor is five times as large.
    """
    return nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)
