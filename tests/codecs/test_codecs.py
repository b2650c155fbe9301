"""Codecs: what travels, what it stands for, and what is remembered."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.strategies.harness import distributed, flat, net, train

import flockstep as fs
from flockstep.codecs import CODECS
from flockstep.codecs.bits import pack, packed_bytes, unpack
from flockstep.codecs.sparse import largest, share_of

SPECS = [
    fs.Float16(),
    fs.Int8(),
    fs.Int8(bucket=3),
    fs.OneBit(),
    fs.QSGD(1),
    fs.QSGD(4),
    fs.QSGD(7, bucket=5),
    fs.QSGD(127),
    fs.Threshold(0.5),
    fs.TopK(0.1),
    fs.TopK(1.0),
    fs.RandomK(0.3),
    fs.PowerSGD(2),
]
FEEDING_BACK = [codec for codec in SPECS if codec.feeds_back]
DTYPES = [torch.float32, torch.float64]
HALF = [torch.bfloat16, torch.float16]
few = settings(max_examples=40, deadline=None)


def tensors(dtypes=DTYPES):
    return some.builds(
        lambda elements, seed, scale, dtype: (
            torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(dtype)
            * 10.0**scale
        ),
        some.integers(1, 300),
        some.integers(0, 10_000),
        some.integers(-6, 3),
        some.sampled_from(dtypes),
    )


def shapes_of(elements):
    """A matrix that is worth compressing, if there is room for one, and what is left."""
    return (torch.Size([12, 15]),) if elements >= 180 else ()


def memory_of(codec, tensor, seed=0, rank=0):
    return codec.memory(tensor, shapes_of(tensor.numel()), seed=seed, rank=rank)


def test_no_codec_is_left_out():
    assert {type(codec) for codec in SPECS} == set(CODECS.values())


@few
@given(tensor=tensors(DTYPES + HALF), codec=some.sampled_from(SPECS))
def test_messages_are_bytes_and_as_many_as_the_formula_says(tensor, codec):
    message = codec.encode(tensor, memory_of(codec, tensor))
    assert message.dtype is torch.uint8
    assert message.ndim == 1
    size, n = max(4, tensor.element_size()), tensor.numel()  # half precision is worked on in single
    expected = {
        fs.Threshold: lambda: 4 * int((tensor.abs() > 0.5).sum()),
        fs.TopK: lambda: share_of(n, codec.ratio) * (4 + size),
        fs.RandomK: lambda: 8 + share_of(n, codec.ratio) * size,
        fs.PowerSGD: lambda: (n - 180 + 2 * (12 + 15) if n >= 180 else n) * size,
        fs.Float16: lambda: 2 * n,
        fs.OneBit: lambda: 8 + math.ceil(n / 8),
        fs.Int8: lambda: n + 4 * math.ceil(n / codec.bucket),
        fs.QSGD: lambda: (
            math.ceil(n * math.ceil(math.log2(2 * codec.levels + 1)) / 8)
            + 4 * math.ceil(n / codec.bucket)
        ),
    }[type(codec)]
    assert message.nbytes == expected()


def test_one_bit_is_one_thirty_second_and_two_scales():
    assert fs.OneBit().encode(torch.randn(32_000)).nbytes == 32_000 * 4 // 32 + 8


@few
@given(tensor=tensors(DTYPES + HALF), codec=some.sampled_from(SPECS))
def test_a_tensor_stays_as_it_is_and_comes_back_in_its_form(tensor, codec):
    kept, memory = tensor.clone(), memory_of(codec, tensor)
    decoded = codec.decode(codec.encode(tensor, memory), tensor, memory)
    assert torch.equal(tensor, kept)
    assert decoded.shape == tensor.shape
    assert decoded.dtype is tensor.dtype
    assert decoded.isfinite().all()


@few
@given(
    codec=some.sampled_from(FEEDING_BACK),
    first=tensors(),
    messages=some.integers(1, 6),
    seed=some.integers(0, 99),
)
def test_error_feedback_loses_nothing_over_time(codec, first, messages, seed):
    """After each message: all that was sent and the error are all that was to be sent."""
    draw = torch.Generator().manual_seed(seed)
    memory = memory_of(codec, first, seed)
    sent, wished = torch.zeros_like(first), torch.zeros_like(first)
    for _ in range(messages):
        tensor = (
            first + torch.randn(first.shape, generator=draw).to(first.dtype) * first.abs().max()
        )
        before = memory.error.clone()
        decoded = codec.decode(codec.encode(tensor, memory), tensor, memory)
        slack = {"rtol": 1e-4, "atol": 1e-5 * (1 + float(wished.abs().max() + tensor.abs().max()))}
        assert torch.allclose(decoded + memory.error, tensor + before, **slack)
        sent += decoded
        wished += tensor
    assert torch.allclose(
        sent + memory.error, wished, rtol=1e-3, atol=1e-4 * (1 + float(wished.abs().max()))
    )


@pytest.mark.parametrize("codec", FEEDING_BACK, ids=repr)
def test_what_is_sent_again_and_again_arrives(codec):
    """The mean of what was decoded comes near the tensor: the error stays bounded while what was
    sent grows.
    """
    tensor = torch.randn(200, generator=torch.Generator().manual_seed(1))
    tensor = tensor.clamp(-0.45, 0.45) if isinstance(codec, fs.Threshold) else tensor
    memory, total, rounds = memory_of(codec, tensor), torch.zeros(200), 1600
    for _ in range(rounds):
        codec.add_decoded(codec.encode(tensor, memory), total, 1.0, memory)
    assert (total / rounds - tensor).abs().max() < 0.12


def test_random_rounding_is_right_on_average():
    """A test of every element, which an unbiased codec fails with a chance below 2e-5 for another
    seed than this one.

    A rounding lies within one level, so by Hoeffding the mean of N of them is further than t levels
    from its expectation with a chance of at most 2 exp(−2Nt²): 3e-8 for t = 3/√N, and 2 · 256
    elements are looked at."""
    rounds = 1500
    for codec in (fs.QSGD(1), fs.QSGD(4, bucket=64)):
        tensor = torch.randn(256, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        memory, total = codec.memory(tensor, seed=11), torch.zeros_like(tensor)
        for _ in range(rounds):
            codec.add_decoded(codec.encode(tensor, memory), total, 1.0)
        norms = torch.linalg.vector_norm(tensor.view(-1, codec.bucket), dim=1).repeat_interleave(
            codec.bucket
        )
        assert (
            (total / rounds - tensor).abs() < 3 / math.sqrt(rounds) * norms / codec.levels
        ).all()


def test_workers_round_differently():
    tensor = torch.randn(500)
    one, other = (
        fs.QSGD(2).encode(tensor, fs.QSGD(2).memory(tensor, seed=1, rank=rank)) for rank in (0, 1)
    )
    assert not torch.equal(one, other)


@few
@given(
    width=some.integers(2, 8),
    numbers=some.lists(some.integers(0, 255), min_size=1, max_size=50),
)
def test_bits_are_packed_without_loss(width, numbers):
    given = torch.tensor([number % (1 << width) for number in numbers], dtype=torch.uint8)
    packed = pack(given, width)
    assert packed.numel() == packed_bytes(len(numbers), width)
    assert torch.equal(unpack(packed, len(numbers), width), given)


@pytest.mark.parametrize("kind", ["normal", "equal", "one large", "sorted"])
def test_the_largest_are_found_in_large_tensors_too(kind):
    draw = torch.Generator().manual_seed(0)
    tensor = {
        "normal": torch.randn(1 << 19, generator=draw),
        "equal": torch.ones(1 << 19),
        "one large": torch.randn(1 << 19, generator=draw) * (torch.arange(1 << 19) == 77) + 1e-9,
        "sorted": torch.linspace(-1, 1, 1 << 19),
    }[kind]
    found = tensor[largest(tensor, 5000)].abs().sort().values
    assert torch.equal(found, torch.topk(tensor.abs(), 5000).values.sort().values)


def test_levels_of_eight_bits():
    tensor = torch.tensor([-4.0, 0.0, 1.0, 127 / 127 * 4])
    decoded = fs.Int8().decode(fs.Int8().encode(tensor), tensor)
    assert decoded[0] == -4.0
    assert decoded[3] == 4.0
    assert (decoded - tensor).abs().max() <= 4 / 127 / 2 + 1e-6
    zeros = torch.zeros(5)
    assert torch.equal(fs.Int8().decode(fs.Int8().encode(zeros), zeros), zeros)


def test_the_means_of_one_bit():
    tensor = torch.tensor([3.0, -1.0, 1.0, -2.0, 0.0])
    decoded = fs.OneBit().decode(fs.OneBit().encode(tensor), tensor)
    assert decoded.tolist() == [2.0, -1.0, 2.0, -1.0, -1.0]
    equal = torch.full((9,), -3.0)
    assert torch.equal(fs.OneBit().decode(fs.OneBit().encode(equal), equal), equal)


def test_half_precision_has_no_infinity():
    tensor = torch.tensor([1e9, -1e9, 1 / 3])
    decoded = fs.Float16().decode(fs.Float16().encode(tensor), tensor)
    assert decoded.tolist() == pytest.approx([65504.0, -65504.0, 1 / 3], rel=1e-3)


def test_a_threshold_sends_what_has_grown_beyond_it():
    codec, tensor = fs.Threshold(1.0), torch.tensor([0.4, -2.5, 0.0])
    memory = codec.memory(tensor)
    sent = [codec.decode(codec.encode(tensor, memory), tensor).tolist() for _ in range(3)]
    assert sent == [[0.0, -1.0, 0.0], [0.0, -1.0, 0.0], [1.0, -1.0, 0.0]]


@pytest.mark.parametrize("codec", SPECS, ids=repr)
@pytest.mark.parametrize("elements", [1, 200])
def test_the_mean_is_that_of_the_messages_and_the_same_on_all_workers(codec, elements):
    def program(comm):
        tensor = torch.randn(elements, generator=torch.Generator().manual_seed(comm.rank))
        memory, alone = (memory_of(codec, tensor, seed=comm.seed, rank=comm.rank) for _ in range(2))
        decoded = codec.decode(codec.encode(tensor, alone), tensor, alone)
        codec.average(comm, tensor, memory)
        return tensor, decoded

    told = fs.launch(program, 3)
    assert all(torch.equal(mean, told[0][0]) for mean, _ in told)
    if not isinstance(codec, fs.PowerSGD):  # whose workers agree on common factors
        expected = torch.stack([decoded for _, decoded in told]).mean(0)
        assert torch.allclose(told[0][0], expected, rtol=1e-3, atol=1e-6)


def wire_bytes(codec, elements, shapes, workers):
    """Of a mean of doubles over all workers: messages to all, or sums on the way; None if it
    depends on the values.
    """
    ring, to_all = 2 * (workers - 1), workers * (workers - 1)
    match codec:
        case fs.Threshold():
            return None
        case fs.Float16():
            return ring * 2 * elements
        case fs.RandomK():
            return ring * 8 * share_of(elements, codec.ratio)
        case fs.PowerSGD():
            return ring * codec.nbytes(elements, shapes, itemsize=8)
        case fs.TopK():
            return to_all * codec.nbytes(elements, itemsize=8)
    return to_all * codec.nbytes(elements)


@pytest.mark.parametrize(
    "codec", [*(c for c in SPECS if c != fs.Threshold(0.5)), fs.Threshold(0.02)], ids=repr
)
@pytest.mark.parametrize(
    "make",
    [
        fs.SyncSGD,
        lambda codec: fs.LocalSGD(3, codec=codec),
        lambda codec: fs.DiLoCo(3, codec=codec),
    ],
)
def test_every_codec_with_every_strategy_that_takes_one(codec, make):
    """Workers go where they go without a codec, end equal, and what travels is what the formulas
    say.
    """
    workers, strategy = 3, make(codec=codec)

    def program(comm):
        worker, _ = train(comm, strategy, steps=18)
        sent = comm.meter.bytes_sent
        return flat(worker.finish()), sent, worker.flat.shapes

    told = fs.launch(program, workers)
    assert all(torch.equal(parameters, told[0][0]) for parameters, *_ in told)
    start, plain = flat(net()), distributed(make(codec=None), workers=workers, steps=18)[0][1]
    assert torch.cosine_similarity(told[0][0] - start, plain - start, dim=0) > 0.4
    expected = wire_bytes(codec, told[0][0].numel(), told[0][2], workers)
    if expected is not None:
        assert (
            sum(sent for _, sent, _ in told)
            == (18 if isinstance(strategy, fs.SyncSGD) else 6) * expected
        )


def test_a_mean_of_what_is_kept_whole_is_the_mean():
    def program(comm):
        tensor = torch.full((50,), float(comm.rank), dtype=torch.float64)
        codec = fs.TopK(1.0)
        codec.average(comm, tensor, codec.memory(tensor))
        return tensor.tolist()

    assert fs.launch(program, 4) == [[1.5] * 50] * 4


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.__name__)
def test_docstrings_have_their_parts_and_examples_learn(codec):
    text = inspect.getdoc(codec)
    assert "Bytes:" in text
    assert eval(text.split("Example:")[1].strip(), {"fs": fs}).metrics["test_accuracy"] > 0.7
