"""The networks for ImageNet: sizes and operations against published ones and sums by hand; layers,
written out once more; and one step of training each.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flockstep.errors import InvalidField
from flockstep.models import (
    AlexNet,
    GoogLeNetV2,
    ResNet50,
    count_parameters,
    flops_per_sample,
)

SIDE = 224


NETWORKS = {
    "ResNet50": ResNet50,
    "ResNet50-3x3": lambda: ResNet50(stride_in="3x3"),
    "ResNet50-group": lambda: ResNet50("group"),
    "GoogLeNetV2": GoogLeNetV2,
    "AlexNet": AlexNet,
    "AlexNet-joined": lambda: AlexNet(groups=1),
}


def on_paper(name):
    """A network and a picture that take no memory."""
    with torch.device("meta"):
        return NETWORKS[name](), torch.zeros(1, 3, SIDE, SIDE)


@functools.cache
def counted(name):
    """FLOPs and parameters."""
    model, picture = on_paper(name)
    return flops_per_sample(model, picture), count_parameters(model)


def ratio(name):
    flops, parameters = counted(name)
    return flops / parameters


def convolution(inputs, outputs, kernel, pixels, groups=1):
    """Multiply-adds: each output value of a square image is a sum over inputs and the kernel."""
    return outputs * pixels**2 * inputs // groups * kernel**2


def bottlenecks(halved_late):
    """Multiply-adds of ResNet-50, table 1 of the paper. In a stage's first block its first 1×1
    gives halved maps, or, where the 3×3 halves them, those of the stage before.
    """
    total, before = convolution(3, 64, 7, 112) + 2048 * 1000, 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        pixels = 56 // 2**stage
        entering = pixels * 2 if stage and halved_late else pixels
        total += convolution(before, 4 * width, 1, pixels)  # the projection
        for block in range(blocks):
            total += convolution(before, width, 1, entering if block == 0 else pixels)
            total += convolution(width, width, 3, pixels)
            total += convolution(width, 4 * width, 1, pixels)
            before = 4 * width
    return total


# Appendix of Ioffe & Szegedy (2015): output size, 1×1, before 3×3, 3×3, before two of 3×3, these,
# projection; 0 where there is none. 4c and 4d with the projections that their outputs need.
INCEPTION = [
    (28, 64, 64, 64, 64, 96, 32),
    (28, 64, 64, 96, 64, 96, 64),
    (14, 0, 128, 160, 64, 96, 0),
    (14, 224, 64, 96, 96, 128, 128),
    (14, 192, 96, 128, 96, 128, 128),
    (14, 160, 128, 160, 128, 160, 96),
    (14, 96, 128, 192, 160, 192, 96),
    (7, 0, 128, 192, 192, 256, 0),
    (7, 352, 192, 320, 160, 224, 128),
    (7, 352, 192, 320, 192, 224, 128),
]
OUTPUTS = [256, 320, 576, 576, 576, 576, 576, 1024, 1024, 1024]


def inception():
    """Multiply-adds and parameters of the table."""
    layers = [(3, 64, 7, 112), (64, 64, 1, 56), (64, 192, 3, 56)]
    inputs, seen = 192, 28
    for (pixels, plain, few, single, fewer, double, projected), outputs in zip(
        INCEPTION, OUTPUTS, strict=True
    ):
        layers += [(inputs, few, 1, seen), (few, single, 3, pixels)]
        layers += [(inputs, fewer, 1, seen), (fewer, double, 3, seen), (double, double, 3, pixels)]
        if plain:
            layers += [(inputs, plain, 1, pixels), (inputs, projected, 1, pixels)]
        passed = inputs if plain == 0 else 0
        assert plain + single + double + projected + passed == outputs
        inputs, seen = outputs, pixels
    weights = sum(before * after * kernel**2 for before, after, kernel, _ in layers)
    normalised = sum(2 * after for _, after, *_ in layers)
    operations = sum(convolution(*layer) for layer in layers) + 1024 * 1000
    return operations, weights + normalised + 1025 * 1000


def alexnet(maps, groups):
    """Multiply-adds and parameters; the second, fourth and fifth convolution may be grouped."""
    first, second, third, fourth, fifth = maps
    layers = [
        (3, first, 11, 55, 1),
        (first, second, 5, 27, groups),
        (second, third, 3, 13, 1),
        (third, fourth, 3, 13, groups),
        (fourth, fifth, 3, 13, groups),
        (36 * fifth, 4096, 1, 1, 1),
        (4096, 4096, 1, 1, 1),
        (4096, 1000, 1, 1, 1),
    ]
    parameters = sum(
        before // group * after * kernel**2 + after for before, after, kernel, _, group in layers
    )
    return sum(convolution(*layer) for layer in layers), parameters


ORIGINAL, NARROWER = (96, 256, 384, 384, 256), (64, 192, 384, 256, 256)


BY_HAND = {
    "ResNet50": (bottlenecks(halved_late=False), 25_557_032),
    "ResNet50-3x3": (bottlenecks(halved_late=True), 25_557_032),
    "ResNet50-group": (bottlenecks(halved_late=False), 25_557_032),
    "GoogLeNetV2": inception(),
    "AlexNet": alexnet(ORIGINAL, groups=2),
    "AlexNet-joined": alexnet(ORIGINAL, groups=1),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_sizes_and_operations_are_those_of_the_sums_by_hand(name):
    multiply_adds, parameters = BY_HAND[name]
    assert counted(name) == (2 * multiply_adds, parameters)


@pytest.mark.parametrize(
    ("name", "parameters", "multiply_adds", "operations_per_parameter"),
    [
        ("ResNet50", 25_557_032, 3.86e9, 301.91),  # "3.8 × 10⁹" in the paper
        ("ResNet50-3x3", 25_557_032, 4.09e9, 320.00),
        ("GoogLeNetV2", 11_194_984, 2.02e9, 360.67),
        ("AlexNet", 60_965_224, 0.724e9, 23.76),
        ("AlexNet-joined", 62_378_344, 1.135e9, 36.40),
    ],
)
def test_figures_are_those_that_are_announced(
    name, parameters, multiply_adds, operations_per_parameter
):
    flops, size = counted(name)
    assert size == parameters
    assert flops / 2 == pytest.approx(multiply_adds, rel=0.001)
    assert ratio(name) == pytest.approx(operations_per_parameter, abs=0.005)
    assert f"{parameters:,} parameters" in type(on_paper(name)[0]).__doc__


@pytest.mark.parametrize("name", ["ResNet50", "GoogLeNetV2", "AlexNet"])
def test_a_model_can_be_made_without_memory_and_scores_a_thousand_classes(name):
    model, picture = on_paper(name)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model(picture).shape == (1, 1000)


def test_the_ratios_of_the_paper_are_explained_as_far_as_they_can_be():
    """Wongpanich et al. (2020): 308 for ResNet-50, of 7.7 G and 25 M; about 109 for AlexNet; for
    GoogLeNet-v2 736, of 9.7 G and 13.5 M, which make 718.5.
    """
    assert ratio("ResNet50") == pytest.approx(308, rel=0.025)
    assert counted("ResNet50")[0] == pytest.approx(7.7e9, rel=0.005)

    # A backward pass is two forward passes.
    assert 3 * ratio("AlexNet-joined") == pytest.approx(109, rel=0.002)
    operations, parameters = alexnet(NARROWER, groups=1)
    assert parameters == 61_100_840
    assert 2 * operations / parameters == pytest.approx(23.38, abs=0.005)

    flops, parameters = counted("GoogLeNetV2")
    assert 9.7e9 / flops == pytest.approx(2.4, abs=0.005)
    assert 13.6e6 / parameters == pytest.approx(1.21, abs=0.006)


@pytest.mark.parametrize("model", [ResNet50, GoogLeNetV2, AlexNet])
def test_one_step_on_two_pictures_gives_every_parameter_a_gradient(model):
    torch.manual_seed(0)
    network, pictures = model(), torch.randn(2, 3, SIDE, SIDE)
    F.cross_entropy(network(pictures), torch.tensor([3, 999])).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any(), name


def weights_of(network, kind):
    return [layer.weight for layer in network.modules() if isinstance(layer, kind)]


def normalised(x):
    """Fresh batch normalisation in evaluation: mean 0, variance 1, gain 1, offset 0."""
    return x / math.sqrt(1 + 1e-5)


@pytest.mark.parametrize("stride_in", ["1x1", "3x3"])
def test_a_bottleneck_adds_its_shortcut_and_rectifies_the_sum(stride_in):
    torch.manual_seed(0)
    network, x = ResNet50(classes=7, stride_in=stride_in).eval(), torch.randn(2, 3, 33, 40)
    kernels = iter(weights_of(network, nn.Conv2d))
    y = normalised(F.conv2d(x, next(kernels), stride=2, padding=3)).relu()
    y = F.max_pool2d(y, 3, 2, 1)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            narrow, middle = (stride, 1) if stride_in == "1x1" else (1, stride)
            residual = normalised(F.conv2d(y, next(kernels), stride=narrow)).relu()
            kernel = next(kernels)
            residual = normalised(F.conv2d(residual, kernel, stride=middle, padding=1)).relu()
            residual = normalised(F.conv2d(residual, next(kernels)))
            if block == 0:
                y = normalised(F.conv2d(y, next(kernels), stride=stride))
            y = (y + residual).relu()
    expected = y.mean(dim=(2, 3)) @ weights_of(network, nn.Linear)[0].T
    assert torch.allclose(network(x), expected, rtol=1e-3, atol=1e-3)


def test_an_inception_module_puts_its_branches_side_by_side():
    torch.manual_seed(0)
    network, x = GoogLeNetV2(classes=7).eval(), torch.randn(2, 3, 40, 33)
    kernels = iter(weights_of(network, nn.Conv2d))

    def convolved(x, stride=1):
        kernel = next(kernels)
        padding = kernel.shape[-1] // 2
        return normalised(F.conv2d(x, kernel, stride=stride, padding=padding)).relu()

    y = F.max_pool2d(convolved(x, 2), 3, 2, 1)
    y = F.max_pool2d(convolved(convolved(y)), 3, 2, 1)
    for number, (_, plain, *_) in enumerate(INCEPTION):
        stride = 1 if plain else 2
        branches = [convolved(y)] if plain else []
        branches.append(convolved(convolved(y), stride))
        branches.append(convolved(convolved(convolved(y)), stride))
        if not plain:
            branches.append(F.max_pool2d(y, 3, 2, 1))
        elif number == len(INCEPTION) - 1:
            branches.append(convolved(F.max_pool2d(y, 3, 1, 1)))
        else:
            branches.append(convolved(F.avg_pool2d(y, 3, 1, 1)))
        y = torch.cat(branches, dim=1)
        assert y.shape[1] == OUTPUTS[number]
    expected = y.mean(dim=(2, 3)) @ weights_of(network, nn.Linear)[0].T
    assert torch.allclose(network(x), expected, rtol=1e-3, atol=1e-3)


def test_alexnets_response_is_normalised_as_its_paper_says():
    with torch.device("meta"):
        layers = [each for each in AlexNet().layers if isinstance(each, nn.LocalResponseNorm)]
    assert len(layers) == 2
    torch.manual_seed(0)
    x = 30 * torch.randn(1, 8, 1, 1, dtype=torch.float64)
    for layer in layers:
        for channel in range(8):
            near = x[0, max(0, channel - 2) : channel + 3, 0, 0]
            expected = x[0, channel, 0, 0] / (2 + 1e-4 * (near**2).sum()) ** 0.75
            assert float(layer(x)[0, channel, 0, 0]) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNet50(stride_in="5x5"), "'stride_in' must be one of '1x1', '3x3' (got '5x5')"),
        (lambda: ResNet50(classes=0), "'classes' must be at least 1 (got 0)"),
        (lambda: GoogLeNetV2(classes=2.0), "'classes' must be a whole number (got 2.0)"),
        (lambda: AlexNet(groups=3), "'groups' must be one of 1, 2 (got 3)"),
    ],
)
def test_a_bad_field_is_named(make, message):
    with pytest.raises(InvalidField) as raised, torch.device("meta"):
        make()
    assert str(raised.value) == message
