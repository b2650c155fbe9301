"""Parameters, operations and their ratio, against sums written out by hand and against published
figures.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flockstep.errors import InvalidField
from flockstep.models import (
    GPT,
    MLP,
    Cifar10Full,
    DenseNet40,
    DigitsCNN,
    LeNet,
    LeNet5,
    ResNet18,
    ResNet20,
    RowLSTM,
)
from flockstep.models.counting import cc_ratio, count_parameters, flops_per_sample

GREY, COLOUR = torch.zeros(2, 1, 28, 28), torch.zeros(2, 3, 32, 32)


def convolution(inputs, outputs, kernel, pixels):
    """Multiply-adds: each output value of a square image is a sum over all inputs and the
    kernel.
    """
    return outputs * pixels**2 * inputs * kernel**2


def residual(stages, blocks, projected):
    """Multiply-adds of a residual network: stages are (channels, pixels)."""
    (before, pixels), last = stages[0], stages[-1][0]
    total = convolution(3, before, 3, pixels) + last * 10
    for channels, pixels in stages:
        total += convolution(before, channels, 3, pixels)
        total += (2 * blocks - 1) * convolution(channels, channels, 3, pixels)
        total += convolution(before, channels, 1, pixels) if projected and before != channels else 0
        before = channels
    return total


def dense(growth):
    """Multiply-adds of DenseNet-40: three blocks of twelve layers, transitions of 1×1 between
    them.
    """
    total, channels = convolution(3, 16, 3, 32), 16
    for pixels in (32, 16, 8):
        for _ in range(12):
            total += convolution(channels, growth, 3, pixels)
            channels += growth
        total += convolution(channels, channels, 1, pixels) if pixels > 8 else channels * 10
    return total


def decoder(length, layers, width, vocabulary):
    """Multiply-adds of a GPT: queries, keys, values, output; scores and sums over the whole
    length; 4× and back.
    """
    projections = length * width * 3 * width + length * width * width
    attention = length * length * width + length * length * width
    features = length * width * 4 * width + length * 4 * width * width
    return layers * (projections + attention + features) + length * width * vocabulary


BY_HAND = {
    "MLP": (lambda: MLP(64, 32, 10), torch.zeros(2, 64), 64 * 32 + 32 * 10),
    "LeNet5": (
        LeNet5,
        GREY,
        convolution(1, 6, 5, 28) + convolution(6, 16, 5, 10) + 400 * 120 + 120 * 84 + 84 * 10,
    ),
    "LeNet": (
        LeNet,
        GREY,
        convolution(1, 20, 5, 28) + convolution(20, 50, 5, 10) + 1250 * 500 + 500 * 10,
    ),
    "Cifar10Full": (
        Cifar10Full,
        COLOUR,
        convolution(3, 32, 5, 32)
        + convolution(32, 32, 5, 16)
        + convolution(32, 64, 5, 8)
        + 1024 * 10,
    ),
    "ResNet20": (ResNet20, COLOUR, residual([(16, 32), (32, 16), (64, 8)], 3, projected=False)),
    "ResNet18": (
        ResNet18,
        COLOUR,
        residual([(64, 32), (128, 16), (256, 8), (512, 4)], 2, projected=True),
    ),
    "ResNet18-group": (
        lambda: ResNet18("group"),
        COLOUR,
        residual([(64, 32), (128, 16), (256, 8), (512, 4)], 2, projected=True),
    ),
    "DenseNet40": (DenseNet40, COLOUR, dense(12)),
    "DenseNet40-growth-3": (lambda: DenseNet40(growth=3), COLOUR, dense(3)),
    # Four gates, each from the row's 128 features and from the 128 of the state, at each of the 28
    # rows.
    "RowLSTM": (RowLSTM, GREY, 28 * (28 * 128 + 4 * (128 + 128) * 128) + 128 * 10),
    "GPT": (GPT, torch.zeros(2, 64, dtype=torch.long), decoder(64, 4, 128, 65)),
    "GPT-short": (GPT, torch.zeros(3, 10, dtype=torch.long), decoder(10, 4, 128, 65)),
    "DigitsCNN": (
        DigitsCNN,
        torch.zeros(2, 64),
        convolution(1, 32, 3, 8) + convolution(32, 64, 3, 8) + 1024 * 10,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_operations_are_those_of_the_sum_by_hand(name):
    make, example, multiply_adds = BY_HAND[name]
    assert flops_per_sample(make(), example) == 2 * multiply_adds


@pytest.mark.parametrize(
    ("model", "example", "published", "tolerance"),
    [
        (LeNet5, GREY, 416_520, 0),
        (ResNet20, COLOUR, 40.8e6, 0.01),  # others report 40.6 M, or 41 M
        (ResNet18, COLOUR, 0.56e9, 0.01),
    ],
)
def test_multiply_adds_are_those_that_were_published(model, example, published, tolerance):
    with torch.device("meta"):
        assert flops_per_sample(model(), example.to("meta")) / 2 == pytest.approx(
            published, rel=tolerance
        )


@pytest.mark.parametrize(
    ("model", "example", "ratio"),
    [
        (LeNet5, GREY, 13.50),
        (Cifar10Full, COLOUR, 274.58),
        (DenseNet40, COLOUR, 519.38),
        (ResNet18, COLOUR, 99.41),
    ],
)
def test_the_ratio_is_operations_over_parameters(model, example, ratio):
    """Wongpanich et al. give 555 for DenseNet-40, of rounded figures. The layers of cifar10-full,
    as Caffe has them, make 24.6 M ÷ 89,578.
    """
    with torch.device("meta"):
        assert cc_ratio(model(), example.to("meta")) == pytest.approx(ratio, abs=0.005)


# Layers that torch's counter does not see on a CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_counted_in_every_precision(layer, gates, dtype):
    model = layer(8, 16, num_layers=2, bidirectional=True, batch_first=True).to(dtype)
    first, second = gates * 16 * (8 + 16), gates * 16 * (2 * 16 + 16)
    assert flops_per_sample(model, torch.zeros(3, 5, 8, dtype=dtype)) == 2 * 5 * 2 * (
        first + second
    )


class OnGraphicsCard(nn.Module):
    """A layer of 16 from 8 that runs as torch's LSTM does on a graphics card."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.zeros(*shape) for shape in [(64, 8), (64, 16), (64,), (64,)]
        )

    def forward(self, x):
        state, steps = x.new_zeros(1, x.shape[0], 16), x.transpose(0, 1)
        options = (2, 16, 0, 1, False, 0.0, False, False, [], None)
        return torch.ops.aten._cudnn_rnn(
            steps, list(self.weights), 4, None, state, state, *options
        )[0]


def test_a_recurrent_layer_of_a_graphics_card_is_counted():
    with torch.device("meta"):
        model, example = OnGraphicsCard(), torch.zeros(3, 5, 8)
    assert flops_per_sample(model, example) == 2 * 5 * 64 * (8 + 16)


@pytest.mark.parametrize("frozen", [False, True])
def test_transformer_layers_are_counted_though_torch_fuses_them(frozen):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(not frozen)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    length, width, features = 5, 8, 16
    projections, attention = length * width * 4 * width, 2 * length * length * width
    by_hand = 3 * (projections + attention + 2 * length * width * features)
    assert flops_per_sample(model, torch.zeros(2, length, width)) == 2 * by_hand


class CrossAttention(nn.Module):
    """Six queries of four heads look at nine keys of two heads, with values of another width."""

    def forward(self, x):
        query, key, value = (
            x.new_zeros(len(x), 4, 6, 8),
            x.new_zeros(len(x), 2, 9, 8),
            x.new_zeros(len(x), 2, 9, 8),
        )
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def test_attention_with_shared_keys_is_counted_for_every_query_head():
    assert flops_per_sample(CrossAttention(), torch.zeros(3, 1)) == 2 * 4 * (6 * 9 * 8 + 6 * 9 * 8)


class Products(nn.Module):
    """A matrix by a vector, and a vector by a vector."""

    def forward(self, x):
        return x @ x[0], x[0] @ x[0]


def test_products_with_vectors_are_counted():
    assert flops_per_sample(Products(), torch.zeros(5, 7)) == (2 * 5 * 7 + 2 * 7) / 5


# Examples


class Keywords(nn.Module):
    """Takes its input by name, as transformers models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, *, features, scale=None):
        return self.linear(features) * scale


@pytest.mark.parametrize(
    ("model", "example", "flops"),
    [
        (nn.Linear(4, 3), torch.zeros(5, 4), 24),
        (nn.Linear(4, 3), (torch.zeros(5, 4), torch.zeros(5)), 24),
        (nn.Linear(4, 3), [torch.zeros(5, 4), torch.zeros(5)], 24),
        (nn.Linear(4, 3), torch.zeros(5, 6, 4), 6 * 24),
        (Keywords(), {"features": torch.zeros(5, 4), "scale": 2.0}, 24),
        (Keywords(), ({"features": torch.zeros(5, 4), "scale": 2.0}, torch.zeros(5)), 24),
    ],
    ids=["tensor", "tuple", "list", "sequence", "mapping", "tuple of a mapping"],
)
def test_an_example_is_a_batch_in_any_of_its_forms(model, example, flops):
    assert flops_per_sample(model, example) == flops
    assert cc_ratio(model, example) == flops / 15


def test_the_size_of_the_batch_does_not_matter():
    model = LeNet5()
    assert flops_per_sample(model, GREY[:1]) == flops_per_sample(model, torch.zeros(7, 1, 28, 28))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.zeros(0, 4), r"'example' must hold at least one sample \(got \[\(0, 4\)\]\)"),
        (
            torch.tensor(1.0),
            r"'example' must hold a tensor with samples along its first dimension \(got \[\(\)\]\)",
        ),
        (
            {"scale": 2.0},
            r"'example' must hold a tensor with samples along its first dimension \(got \[\]\)",
        ),
        (
            "digits",
            r"'example' must be a tensor, a tuple or list that starts with one, or a mapping .* "
            r"\(got str\)",
        ),
        (
            (),
            r"'example' must be a tensor, a tuple or list that starts with one, or a mapping .* "
            r"\(got tuple\)",
        ),
        (([1, 2], [3, 4]), r"'example' must be a tensor, a tuple or list .* \(got list\)"),
        (
            torch.zeros(2, 5),
            r"^'example' must be a batch that the model takes \(got \[\(2, 5\)\]\): RuntimeError: "
            r"mat1 and mat2 shapes",
        ),
        ({"features": torch.zeros(2, 4)}, r"TypeError: .*unexpected keyword argument 'features'$"),
        ({1: torch.zeros(2, 4)}, r"TypeError: .*keywords must be strings$"),
    ],
)
def test_an_example_that_the_model_cannot_take_is_refused(example, message):
    with pytest.raises(InvalidField, match=message) as raised:
        cc_ratio(nn.Linear(4, 3), example)
    assert "\n" not in str(raised.value)


class Talkative(nn.Module):
    def forward(self, x):
        raise KeyError("first line\n    second line")


def test_a_models_own_message_comes_on_one_line_and_with_its_cause():
    with pytest.raises(InvalidField) as raised:
        flops_per_sample(Talkative(), torch.zeros(1, 1))
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value.__cause__, KeyError)


def test_too_long_a_sequence_is_the_examples_fault():
    with pytest.raises(
        InvalidField, match="'example' must be .* InvalidField: 'tokens' must be at most 64 long"
    ):
        flops_per_sample(GPT(), torch.zeros(1, 65, dtype=torch.long))


def test_a_model_without_parameters_has_operations_and_no_ratio():
    assert flops_per_sample(nn.ReLU(), torch.zeros(2, 4)) == 0
    with pytest.raises(InvalidField, match=r"'model' must have parameters \(got 'ReLU'\)"):
        cc_ratio(nn.ReLU(), torch.zeros(2, 4))


@pytest.mark.parametrize("count", [count_parameters, lambda model: flops_per_sample(model, GREY)])
def test_a_class_is_no_model(count):
    with pytest.raises(
        InvalidField, match="'model' must be an nn.Module, not a class or a function"
    ):
        count(LeNet5)


# Parameters


def test_frozen_parameters_count_and_tied_ones_count_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert count_parameters(model) == 20 + 20 + 8  # and none of the running statistics
    model[0].requires_grad_(False)
    assert count_parameters(model) == 48
    model[1].weight = model[0].weight
    assert count_parameters(model) == 48 - 16


# What is left behind: nothing


class Restless(nn.Module):
    """Draws numbers and changes its buffers in every mode, and tells in which it was."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("in_place", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4))
        self.seen = []

    def forward(self, x):
        self.seen.append((self.training, self.linear.training, torch.is_grad_enabled()))
        self.in_place += torch.randn(4)
        self.replaced = self.replaced + 1
        return self.linear(x)


@pytest.mark.parametrize("x", [torch.zeros(2, 4), torch.zeros(2, 5)], ids=["counted", "refused"])
def test_a_model_is_left_as_it_was(x):
    model = nn.Sequential(Restless(), nn.Dropout(), nn.BatchNorm1d(4)).train()
    model[0].linear.eval()
    flags = [module.training for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = torch.get_rng_state()
    try:
        assert flops_per_sample(model, x) == 2 * 4 * 4
    except InvalidField:
        assert x.shape[1] == 5
    assert model[0].seen == [(False, False, False)]
    assert [module.training for module in model.modules()] == flags
    for now, (same, value) in zip(model.buffers(), buffers, strict=True):
        assert now is same
        assert torch.equal(now, value)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_threads_count_side_by_side():
    """The same model for all of them, and one more thread that trains another meanwhile."""
    model, trained, done = RowLSTM(), MLP(4, 4, 2), threading.Event()
    counts, expected = [], flops_per_sample(model, GREY)

    def train():
        while not done.is_set():
            trained(torch.randn(2, 4)).sum().backward()

    trainer = threading.Thread(target=train)
    counters = [
        threading.Thread(target=lambda: counts.append(flops_per_sample(model, GREY)))
        for _ in range(4)
    ]
    trainer.start()
    for thread in counters:
        thread.start()
    for thread in counters:
        thread.join()
    done.set()
    trainer.join()
    assert counts == [expected] * 4
    assert model.training


def test_the_counter_is_loaded_only_when_somebody_counts():
    names = "('torch._dynamo', 'torch.utils.flop_counter')"
    code = f"import flockstep.models, sys; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
