"""Codecs: what travels, what it stands for, and what is remembered."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tests.codecs.cases import DTYPES, FEEDING_BACK, HALF, SPECS, few, memory_of, tensors
from tests.strategies.harness import distributed, flat, net, train

import flockstep as fs
from flockstep.codecs import CODECS
from flockstep.codecs.bits import (
    digits_bytes,
    pack,
    pack_digits,
    packed_bytes,
    unpack,
    unpack_digits,
)
from flockstep.codecs.sparse import largest, share_of


def test_no_codec_is_left_out():
    assert {type(codec) for codec in SPECS} == set(CODECS.values())


def quantised_bytes(codec, elements):
    chunks = [codec.bucket] * (elements // codec.bucket) + [elements % codec.bucket]
    sent = sum(share_of(length, codec.ratio) for length in chunks if length)
    bits = math.ceil(math.log2(codec.bucket))
    tables = 4 * 2**codec.bits * math.ceil(elements / codec.bucket)
    return tables + math.ceil(sent * codec.bits / 8) + math.ceil(sent * bits / 8)


@few
@given(tensor=tensors(DTYPES + HALF), codec=some.sampled_from(SPECS))
def test_messages_are_bytes_and_as_many_as_the_formula_says(tensor, codec):
    message = codec.encode(tensor, memory_of(codec, tensor))
    assert message.dtype is torch.uint8
    assert message.ndim == 1
    size, n = max(4, tensor.element_size()), tensor.numel()  # half precision is worked on in single
    expected = {
        fs.Threshold: lambda: 4 * int((tensor.abs() > 0.5).sum()),
        fs.TopK: lambda: share_of(n, 0.25 if codec.warmup else codec.ratio) * (4 + size),
        fs.QuantisedTopK: lambda: quantised_bytes(codec, n),
        fs.Natural: lambda: math.ceil(n * {4: 9, 8: 12}[size] / 8),
        fs.SignSGD: lambda: math.ceil(n / 8) + (4 if codec.scale == "mean" else 0),
        fs.TernGrad: lambda: math.ceil(n / 5) + 4 * math.ceil(n / codec.bucket),
        fs.RandomK: lambda: 8 + share_of(n, codec.ratio) * size,
        fs.PowerSGD: lambda: (
            8 + (n - 180 + 2 * (12 + 15)) * size + 16 if n >= 180 else 8 + n * size
        ),
        fs.Float16: lambda: 2 * n,
        fs.OneBit: lambda: 8 + math.ceil(n / 8),
        fs.Int8: lambda: n + 4 * math.ceil(n / codec.bucket),
        fs.QSGD: lambda: (
            math.ceil(n * math.ceil(math.log2(2 * codec.levels + 1)) / 8)
            + 4 * math.ceil(n / codec.bucket)
        ),
    }[type(codec)]
    assert message.nbytes == expected()


@few
@given(tensor=tensors(DTYPES + HALF), codec=some.sampled_from(SPECS))
def test_who_has_the_message_and_a_tensor_like_it_can_decode_it(tensor, codec):
    memory = memory_of(codec, tensor)
    message = codec.encode(tensor, memory)
    alone = codec.decode(message.clone(), torch.empty_like(tensor))
    assert torch.equal(alone, codec.decode(message, tensor, memory))


@few
@given(tensor=tensors(DTYPES + HALF), codec=some.sampled_from(SPECS), messages=some.integers(1, 3))
def test_the_length_of_a_message_is_known_before_it_is_made(tensor, codec, messages):
    """Without a memory only where no memory makes a difference."""
    memory = memory_of(codec, tensor)
    for _ in range(messages):
        known, to_all = codec.message_nbytes(tensor, memory), codec.message_nbytes(tensor)
        message = codec.encode(tensor, memory)
        assert known in (None, message.nbytes)
        assert to_all in (None, message.nbytes)
    assert (known is None) == isinstance(codec, fs.Threshold)
    warms_up = isinstance(codec, fs.TopK) and codec.warmup > 0
    assert (to_all is None) == (warms_up or isinstance(codec, fs.Threshold | fs.PowerSGD))


def test_low_rank_of_a_matrix_alone():
    """A memory made of a matrix knows that it is one; without any, all travels as it is."""
    matrix = torch.outer(torch.arange(1.0, 13), torch.arange(1.0, 16))
    memory = fs.PowerSGD(1).memory(matrix)
    message = fs.PowerSGD(1).encode(matrix.view(-1), memory)
    assert message.nbytes == 8 + 16 + 4 * (12 + 15)
    assert torch.allclose(fs.PowerSGD(1).decode(message, matrix).view(12, 15), matrix, rtol=1e-5)
    whole = fs.PowerSGD(1).encode(matrix.view(-1))
    assert whole.nbytes == 8 + 4 * 12 * 15
    assert torch.equal(fs.PowerSGD(1).decode(whole, matrix).view(12, 15), matrix)


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
    """After each message: all that was sent and the error are all that was to be sent. With
    momentum correction that is the velocity.
    """
    draw = torch.Generator().manual_seed(seed)
    memory = memory_of(codec, first, seed)
    sent, wished = torch.zeros_like(first), torch.zeros_like(first)
    for _ in range(messages):
        tensor = (
            first + torch.randn(first.shape, generator=draw).to(first.dtype) * first.abs().max()
        )
        before, new = memory.error.clone(), tensor
        if memory.velocity is not None:
            new = tensor + codec.momentum_correction * memory.velocity
        decoded = codec.decode(codec.encode(tensor, memory), tensor, memory)
        slack = {"rtol": 1e-4, "atol": 1e-5 * (1 + float(wished.abs().max() + new.abs().max()))}
        assert torch.allclose(decoded + memory.error, new + before, **slack)
        sent += decoded
        wished += new
    assert torch.allclose(
        sent + memory.error, wished, rtol=1e-3, atol=1e-4 * (1 + float(wished.abs().max()))
    )


@pytest.mark.parametrize(
    "codec",
    [codec for codec in FEEDING_BACK if not getattr(codec, "momentum_correction", 0)],
    ids=repr,
)
def test_what_is_sent_again_and_again_arrives(codec):
    """The mean of what was decoded comes near the tensor: the error stays bounded while what was
    sent grows.
    """
    tensor = torch.randn(200, generator=torch.Generator().manual_seed(1))
    tensor = tensor.clamp(-0.45, 0.45) if isinstance(codec, fs.Threshold) else tensor
    rounds = {fs.OneBit: 1600, fs.SignSGD: 3200}.get(type(codec), 400)
    memory, total = memory_of(codec, tensor), torch.zeros(200)
    for _ in range(rounds):
        codec.add_decoded(codec.encode(tensor, memory), total, 1.0, memory)
    assert (total / rounds - tensor).abs().max() < 0.12


@few
@given(
    width=some.integers(1, 16),
    numbers=some.lists(some.integers(0, (1 << 16) - 1), min_size=1, max_size=50),
)
def test_bits_are_packed_without_loss(width, numbers):
    given = torch.tensor([number % (1 << width) for number in numbers])
    packed = pack(given.to(torch.uint8) if width <= 8 else given, width)
    assert packed.dtype is torch.uint8
    assert packed.numel() == packed_bytes(len(numbers), width)
    assert torch.equal(unpack(packed, len(numbers), width).long(), given)


@few
@given(digits=some.lists(some.integers(0, 2), min_size=1, max_size=50))
def test_digits_are_packed_without_loss(digits):
    given = torch.tensor(digits, dtype=torch.uint8)
    packed = pack_digits(given.float())
    assert packed.numel() == digits_bytes(len(digits)) == math.ceil(len(digits) / 5)
    assert torch.equal(unpack_digits(packed, len(digits)), given)


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


@pytest.mark.parametrize("codec", [fs.Float16(), fs.QuantisedTopK(0.5)], ids=str)
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_made_finite(codec, wrong):
    tensor = torch.tensor([1.0, wrong, -2.0, 3.0])
    decoded = codec.decode(codec.encode(tensor), tensor)
    assert not decoded[1].isfinite()


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
    # Whose workers agree on common factors, or vote.
    if not isinstance(codec, fs.PowerSGD | fs.SignSGD):
        expected = torch.stack([decoded for _, decoded in told]).mean(0)
        assert torch.allclose(told[0][0], expected, rtol=1e-3, atol=1e-6)


def wire_bytes(codec, elements, shapes, workers):
    """Of a mean of doubles over all workers: messages to all, or sums on the way; None if it
    depends on the values or on the time.
    """
    ring, to_all = 2 * (workers - 1), workers * (workers - 1)
    match codec:
        case fs.Threshold() | fs.TopK(warmup=8):
            return None
        case fs.Float16():
            return ring * 2 * elements
        case fs.RandomK():
            return ring * 8 * share_of(elements, codec.ratio)
        case fs.PowerSGD():
            return ring * codec.nbytes(elements, shapes, itemsize=8)
        case fs.TopK(warmup=0) | fs.Natural():
            return to_all * codec.nbytes(elements, itemsize=8)
    return to_all * codec.nbytes(elements)


ONE_OF_EACH = {type(codec): codec for codec in reversed(SPECS)} | {fs.Threshold: fs.Threshold(0.02)}


@pytest.mark.parametrize("codec", [*ONE_OF_EACH.values(), fs.TopK(0.02, warmup=8)], ids=repr)
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
