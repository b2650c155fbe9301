"""The networks: their sizes, their equations where they are unusual, and that each can be
trained.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flockstep.models
from flockstep.errors import InvalidField
from flockstep.models import (
    GPT,
    MLP,
    AlexNet,
    Cifar10Full,
    DenseNet40,
    DigitsCNN,
    GoogLeNetV2,
    LeNet,
    LeNet5,
    ResNet18,
    ResNet20,
    ResNet50,
    RowLSTM,
)
from flockstep.models.cifar10_full import LocalResponseNorm
from flockstep.models.gpt import CausalAttention
from flockstep.models.normalisation import normalisation_layer
from flockstep.models.resnet import PaddedShortcut

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
# A network that takes the mean over all pixels takes images of any size, and this is faster.
SMALL = (3, 16, 16)

# How to make it, the shape of a sample (None: tokens), the parameters.
MODELS = {
    "MLP": (lambda: MLP(64, 32, 10), (64,), (64 + 1) * 32 + (32 + 1) * 10),
    "LeNet5": (LeNet5, GREY, 61_706),
    "LeNet": (LeNet, GREY, 656_080),
    "Cifar10Full": (Cifar10Full, COLOUR, 89_578),
    "ResNet20": (ResNet20, SMALL, 269_722),
    "ResNet20-group": (lambda: ResNet20("group"), SMALL, 269_722),
    "ResNet18": (ResNet18, SMALL, 11_173_962),
    "ResNet18-group": (lambda: ResNet18("group"), SMALL, 11_173_962),
    "DenseNet40": (DenseNet40, SMALL, 1_019_722),
    "DenseNet40-group": (lambda: DenseNet40("group"), SMALL, 1_019_722),
    "RowLSTM": (RowLSTM, GREY, 137_098),
    "GPT": (GPT, None, 804_096),
    "DigitsCNN": (DigitsCNN, (64,), 29_066),
}
FOR_IMAGENET = [ResNet50, GoogLeNetV2, AlexNet]  # test_imagenet_models.py
CONVOLUTIONAL = [ResNet20, ResNet18, DenseNet40]
every_variant = pytest.mark.parametrize("name", MODELS)
# ResNet-18 is made of the parts of ResNet-20, and many times slower.
every_model = pytest.mark.parametrize(
    "name", [name for name in MODELS if "-" not in name and name != "ResNet18"]
)
every_convolutional = pytest.mark.parametrize(
    "model", CONVOLUTIONAL, ids=lambda model: model.__name__
)


def made(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name][0]()


def samples(name, count=2, dtype=None):
    shape = MODELS[name][1]
    random = torch.Generator().manual_seed(1)
    if shape is None:
        return torch.randint(65, (count, 12), generator=random)
    # Caffe's initialisation wants pixels of 0 … 255, less their mean.
    pixels = 100 if name == "Cifar10Full" else 1
    return (pixels * torch.randn(count, *shape, generator=random)).to(
        dtype or torch.get_default_dtype()
    )


def loss_of(model, x):
    """Of labels that have nothing to do with the samples."""
    logits = model(x).flatten(0, -2)
    return F.cross_entropy(logits, torch.arange(len(logits)) % 10)


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_no_model_is_left_out():
    with torch.device("meta"):
        tested = {type(make()).__name__ for make, *_ in MODELS.values()}
    shown = {name: getattr(flockstep.models, name) for name in flockstep.models.__all__}
    tested |= {model.__name__ for model in FOR_IMAGENET}
    # A layer, and what is made of models.
    others = {"GroupBatchNorm", "Ensemble"}
    assert tested == {name for name, each in shown.items() if isinstance(each, type)} - others


@every_variant
def test_a_model_has_the_parameters_that_were_published_or_announced(name):
    make, _, parameters = MODELS[name]
    with torch.device("meta"):
        model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    # An MLP's depend on its widths.
    assert name == "MLP" or f"{parameters:,} parameters" in type(model).__doc__


def test_the_wide_lenet_is_as_near_to_its_papers_count_as_it_says():
    assert MODELS["LeNet"][2] / 665_000 == pytest.approx(1 - 0.013, abs=0.0005)


def test_without_position_embeddings_the_gpt_is_as_large_as_nanogpts():
    model = made("GPT")
    rest = sum(
        p.numel() for name, p in model.named_parameters() if not name.startswith("positions")
    )
    assert rest == 795_904
    assert round(rest / 1e6, 2) == 0.80


@every_variant
def test_a_model_can_be_made_without_memory(name):
    with torch.device("meta"):
        model, x = MODELS[name][0](), samples(name).to("meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model(x).shape == ((2, 12, 65) if name == "GPT" else (2, 10))


@every_model
def test_the_seed_decides_the_weights(name):
    first, same, other = (
        nn.utils.parameters_to_vector(made(name, seed).parameters()) for seed in (3, 3, 4)
    )
    assert torch.equal(first, same)
    assert (first != other).double().mean() > 0.9


@every_model
def test_a_copy_computes_the_same_and_shares_nothing(name):
    model, x = made(name).eval(), samples(name)
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1)
        assert torch.equal(model(x), expected)


@every_model
def test_a_model_works_in_double_precision(name, double_precision):
    model = made(name)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert model(samples(name)).dtype is torch.float64


@every_model
def test_a_model_works_in_half_precision(name):
    model = made(name).to(torch.bfloat16).eval()
    x = samples(name, count=1, dtype=torch.bfloat16)
    half = model(x)
    assert half.dtype is torch.bfloat16
    assert torch.isfinite(half).all()


@every_model
def test_a_model_leaves_its_input_alone(name):
    x = samples(name)
    made(name)(x)
    assert torch.equal(x, samples(name))


@every_variant
def test_the_loss_of_a_few_samples_falls_in_a_few_steps(name):
    model, x = made(name), samples(name, count=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    before = loss_of(model, x).item()
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    assert loss_of(model, x).item() < 0.97 * before


def test_he_initialisation_keeps_the_size_of_a_signal_through_many_layers():
    torch.manual_seed(0)
    x = torch.randn(500, 200)
    sizes = {}
    for kind in ("torch", "he"):
        model = MLP(*[200] * 9, initialisation=kind)
        weights = [layer.weight for layer in model.layers if isinstance(layer, nn.Linear)]
        sizes[kind] = model(x).pow(2).mean().sqrt().item()
        if kind == "he":
            for weight in weights:
                assert weight.std().item() == pytest.approx(math.sqrt(2 / 200), rel=0.03)
            assert not any(layer.bias.any() for layer in model.layers if hasattr(layer, "bias"))
    assert 0.5 < sizes["he"] < 2
    assert sizes["torch"] < 0.1


# Convolutional networks, written out once more


def weights_of(network, kind):
    return [layer.weight for layer in network.modules() if isinstance(layer, kind)]


def normalised(x):
    """Fresh batch normalisation in evaluation: mean 0, variance 1, gain 1, offset 0."""
    return x / math.sqrt(1 + 1e-5)


@pytest.mark.parametrize("model", [LeNet5, LeNet])
def test_a_lenet_has_relu_after_every_layer_but_the_last(model):
    network, x = made(model.__name__), samples(model.__name__)
    first, second, *linear = (layer for layer in network.layers if hasattr(layer, "weight"))
    x = F.max_pool2d(F.conv2d(x, first.weight, first.bias, padding=2).relu(), 2)
    x = F.max_pool2d(F.conv2d(x, second.weight, second.bias).relu(), 2).flatten(1)
    for layer in linear:
        x = x.relu() @ layer.weight.T + layer.bias
    assert torch.allclose(network(samples(model.__name__)), x, atol=1e-5)


def test_cifar10_full_has_its_layers_in_caffes_order(double_precision):
    network, x = made("Cifar10Full"), samples("Cifar10Full")
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)  # large enough for the local response to matter
    kernel1, bias1, kernel2, bias2, kernel3, bias3, weight, bias = network.parameters()
    norm, pool = LocalResponseNorm(), {"kernel_size": 3, "stride": 2, "ceil_mode": True}
    y = norm(F.max_pool2d(F.conv2d(x, kernel1, bias1, padding=2), **pool).relu())
    y = norm(F.avg_pool2d(F.conv2d(y, kernel2, bias2, padding=2).relu(), **pool))
    y = F.avg_pool2d(F.conv2d(y, kernel3, bias3, padding=2).relu(), **pool)
    assert torch.allclose(network(x), y.flatten(1) @ weight.T + bias)


@pytest.mark.parametrize(("model", "blocks"), [(ResNet20, 3), (ResNet18, 2)])
def test_a_residual_block_adds_its_shortcut_and_rectifies_the_sum(model, blocks):
    network, x = made(model.__name__).eval(), samples(model.__name__)
    kernels = iter(weights_of(network, nn.Conv2d))
    y = normalised(F.conv2d(x, next(kernels), padding=1)).relu()
    for block in range(9 if model is ResNet20 else 8):
        stride = 2 if block and block % blocks == 0 else 1
        residual = normalised(F.conv2d(y, next(kernels), stride=stride, padding=1)).relu()
        residual = normalised(F.conv2d(residual, next(kernels), padding=1))
        if stride == 2 and model is ResNet18:
            y = normalised(F.conv2d(y, next(kernels), stride=2))
        elif stride == 2:
            y = torch.cat([y[:, :, ::2, ::2], torch.zeros_like(y[:, :, ::2, ::2])], dim=1)
        y = (y + residual).relu()
    expected = y.mean(dim=(2, 3)) @ weights_of(network, nn.Linear)[0].T
    assert torch.allclose(network(x), expected, rtol=1e-3, atol=1e-3)


def test_a_dense_layer_sees_all_before_it_and_transitions_take_means():
    network, x = made("DenseNet40").eval(), samples("DenseNet40")
    kernels = iter(weights_of(network, nn.Conv2d))
    y = F.conv2d(x, next(kernels), padding=1)
    for block in range(3):
        if block > 0:
            y = F.avg_pool2d(F.conv2d(normalised(y).relu(), next(kernels)), 2)
        for _ in range(12):
            y = torch.cat([y, F.conv2d(normalised(y).relu(), next(kernels), padding=1)], dim=1)
    expected = normalised(y).relu().mean(dim=(2, 3)) @ weights_of(network, nn.Linear)[0].T
    assert torch.allclose(network(x), expected, rtol=1e-3, atol=1e-3)


# Convolutional networks, part by part


def test_local_response_is_normalised_as_the_formula_says():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64) * 30
    expected = torch.empty_like(x)
    for n in range(2):
        for c in range(3):
            for i in range(5):
                for j in range(4):
                    window = x[n, c, max(i - 1, 0) : i + 2, max(j - 1, 0) : j + 2]
                    # Nine at the border too.
                    mean = sum(float(value) ** 2 for value in window.flatten()) / 9
                    expected[n, c, i, j] = x[n, c, i, j] * (1 + 5e-5 * mean) ** -0.75
    assert torch.allclose(LocalResponseNorm()(x), expected, rtol=1e-12)
    assert not torch.allclose(expected, x, rtol=1e-2)


def test_cifar10_full_pools_partial_windows_by_what_they_hold():
    """As Caffe does: 32 pixels make 16, and the mean at the far border is of the pixels that are
    there.
    """
    pools = [
        layer for layer in Cifar10Full().layers if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d)
    ]
    for pool, (before, after) in zip(pools, [(32, 16), (16, 8), (8, 4)], strict=True):
        assert torch.equal(pool(torch.ones(1, 1, before, before)), torch.ones(1, 1, after, after))


def test_cifar10_full_starts_from_caffes_weights():
    torch.manual_seed(0)
    layers = [layer for layer in Cifar10Full().layers if hasattr(layer, "weight")]
    for layer, deviation in zip(layers, [0.0001, 0.01, 0.01, 0.01], strict=True):
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.05)
        assert not layer.bias.any()


@every_convolutional
def test_convolutions_start_as_he_et_al_say(model):
    torch.manual_seed(0)
    network = model()
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            expected = math.sqrt(2 / (layer.kernel_size[0] ** 2 * layer.out_channels))
            assert layer.weight.std().item() == pytest.approx(expected, rel=0.15)
        elif isinstance(layer, nn.Linear):
            assert not layer.bias.any()


@pytest.mark.parametrize(
    ("model", "layers"), [(ResNet20, 20), (ResNet18, 18 + 3), (DenseNet40, 40)]
)
def test_a_network_is_as_deep_as_its_name_says(model, layers):
    """The projections of the shortcuts, three in ResNet-18, do not count in its name."""
    with torch.device("meta"):
        network = model()
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in network.modules()) == layers


def test_a_padded_shortcut_has_no_parameters_and_loses_no_channel():
    shortcut, x = PaddedShortcut(16, 32), torch.randn(2, 16, 8, 8)
    y = shortcut(x)
    assert list(shortcut.state_dict()) == []
    assert y.shape == (2, 32, 4, 4)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert not y[:, 16:].any()
    assert sum(isinstance(layer, PaddedShortcut) for layer in ResNet20().modules()) == 2


def test_a_dense_network_grows_as_told():
    """Channels before each layer: 16 + i·k; after each block they go on through a transition,
    none lost.
    """
    with torch.device("meta"):
        network = DenseNet40(growth=4)
    shapes = [
        tuple(layer.weight.shape[:2]) for layer in network.modules() if isinstance(layer, nn.Conv2d)
    ]
    expected = [
        (16, 3),
        *((4, 16 + 4 * i) for i in range(12)),
        (64, 64),
        *((4, 64 + 4 * i) for i in range(12)),
    ]
    assert shapes == [*expected, (112, 112), *((4, 112 + 4 * i) for i in range(12))]


# Group normalisation


@pytest.mark.parametrize(
    ("channels", "groups"), [(16, 8), (28, 7), (52, 4), (64, 8), (100, 5), (512, 8), (13, 1)]
)
def test_groups_are_as_many_as_divide_the_channels_up_to_eight(channels, groups):
    layer = normalisation_layer("group", channels)
    assert isinstance(layer, nn.GroupNorm)
    assert (layer.num_groups, layer.num_channels) == (groups, channels)


@every_convolutional
def test_group_normalisation_stands_where_batch_normalisation_stood(model):
    with torch.device("meta"):
        batch, group = model(), model("group")
    replaced = [layer for layer in group.modules() if isinstance(layer, nn.GroupNorm)]
    assert len(replaced) == sum(isinstance(layer, nn.BatchNorm2d) for layer in batch.modules())
    # None of a single channel.
    assert all(layer.num_channels > layer.num_groups for layer in replaced)
    assert list(batch.buffers())
    assert not list(group.buffers())


@every_convolutional
def test_with_group_normalisation_a_sample_does_not_see_its_batch(model):
    torch.manual_seed(0)
    x = torch.randn(3, *SMALL)
    differences = {}
    for kind in ("group", "batch"):
        network = model(kind).train()
        with torch.no_grad():
            differences[kind] = (
                (network(x)[0] - network(torch.stack([x[0], -2 * x[1]]))[0]).abs().max().item()
            )
    assert differences["group"] < 1e-4 < 1e-2 < differences["batch"]


# Sequences


def test_the_row_lstm_classifies_by_its_state_after_the_last_row():
    model, x = made("RowLSTM"), samples("RowLSTM", count=3)
    weights = dict(model.lstm.named_parameters())
    state = cell = torch.zeros(3, 128)
    for row in range(28):
        seen = x[:, 0, row] @ model.transform.weight.T + model.transform.bias
        gates = seen @ weights["weight_ih_l0"].T + weights["bias_ih_l0"]
        gates = gates + state @ weights["weight_hh_l0"].T + weights["bias_hh_l0"]
        enter, forget, new, leave = gates.chunk(4, dim=1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        state = leave.sigmoid() * cell.tanh()
    expected = state @ model.classify.weight.T + model.classify.bias
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert torch.equal(model(x[:, 0]), model(x))


def test_digits_may_come_flat_or_as_images():
    model, x = made("DigitsCNN"), samples("DigitsCNN")
    assert torch.equal(model(x.view(2, 1, 8, 8)), model(x))


def test_no_logit_of_a_gpt_depends_on_a_later_token():
    model, tokens = made("GPT").eval(), torch.randint(65, (2, 64))
    changed = tokens.clone()
    changed[:, 40] = (tokens[:, 40] + 1) % 65
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 64, 65)
    assert torch.allclose(before[:, :40], after[:, :40], atol=1e-6)
    assert ((before - after)[:, 40:].abs().amax(dim=-1) > 1e-4).all()


def test_attention_is_the_softmax_of_scaled_products_over_what_came_before():
    torch.manual_seed(0)
    attention, x = (
        CausalAttention(heads=2, width=6, dropout=0.0).requires_grad_(False),
        torch.randn(1, 5, 6),
    )
    query, key, value = (x[0] @ attention.inward.weight.T).split(6, dim=1)
    mixed = torch.zeros(5, 6)
    for head in (slice(0, 3), slice(3, 6)):
        for i in range(5):
            scores = [float(query[i, head] @ key[j, head]) / math.sqrt(3) for j in range(i + 1)]
            shares = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
            mixed[i, head] = sum(share * value[j, head] for j, share in enumerate(shares))
    assert torch.allclose(attention(x)[0], mixed @ attention.outward.weight.T, atol=1e-6)


def test_a_gpt_starts_as_gpt_2():
    model = made("GPT")
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones(128))
        else:
            expected = 0.02 / math.sqrt(2 * 4) if "outward" in name else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name
    assert sum("outward" in name for name, _ in model.named_parameters()) == 2 * 4
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


def test_a_gpts_embedding_is_its_output_layer():
    model = made("GPT").eval()
    tokens = torch.tensor([[3]])
    before = model(tokens)
    with torch.no_grad():
        model.tokens.weight[7] *= 2  # token 7 is not in the input
    after = model(tokens)
    assert torch.allclose(after[..., 7], 2 * before[..., 7])
    assert torch.equal(after[..., :7], before[..., :7])


def test_a_gpt_drops_out_only_in_training():
    model, tokens = GPT(dropout=0.5), torch.randint(65, (1, 8))
    assert not torch.allclose(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_sequence_longer_than_the_context_is_refused():
    model = GPT(context=16)
    assert model(torch.zeros(1, 16, dtype=torch.long)).shape == (1, 16, 65)
    with pytest.raises(
        InvalidField, match=r"'tokens' must be at most 16 long, the model's context \(got 17\)"
    ):
        model(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ResNet20("layer"),
            "'normalisation' must be one of 'batch', 'group' (got 'layer')",
        ),
        (lambda: ResNet18(None), "'normalisation' must be one of 'batch', 'group' (got None)"),
        (
            lambda: DenseNet40(normalisation=8),
            "'normalisation' must be one of 'batch', 'group' (got 8)",
        ),
        (lambda: DenseNet40(growth=0), "'growth' must be at least 1 (got 0)"),
        (lambda: GPT(layers=0), "'layers' must be at least 1 (got 0)"),
        (lambda: GPT(vocabulary=6.5), "'vocabulary' must be a whole number (got 6.5)"),
        (lambda: GPT(heads=3), "'width' must be a multiple of the 3 heads (got 128)"),
        (lambda: GPT(dropout=1.5), "'dropout' must be between 0 and 1 (got 1.5)"),
        (
            lambda: MLP(64),
            "'widths' must be at least two, of the input and of the output (got (64,))",
        ),
    ],
)
def test_a_value_that_makes_no_network_is_refused(make, message):
    with pytest.raises(InvalidField) as raised, torch.device("meta"):
        make()
    assert str(raised.value) == message
