"""Codecs as their papers print them, in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.codecs.cases import memory_of
from tests.strategies.harness import Vector, distributed, drive, flat, net, sgd

import flockstep as fs
from flockstep.codecs.sparse import share_of

SIZE = 40


def draws(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def through(codec, values, memory=None):
    """What the message for some numbers stands for."""
    tensor = torch.from_numpy(values)
    return codec.decode(codec.encode(tensor, memory), tensor).numpy()


# --- SignSGD --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("scale", ["one", "mean"])
def test_the_majority_decides_and_a_tie_gives_zero(workers, scale):
    """Bernstein et al.: sign(Σ sign(g_i))."""
    gradients = draws(workers, 50)

    def program(comm):
        own = torch.from_numpy(gradients[comm.rank].copy())
        codec = fs.SignSGD(scale)
        codec.average(comm, own, codec.memory(own, seed=comm.seed, rank=comm.rank))
        return own

    told = fs.launch(program, workers)
    size = 1 if scale == "one" else np.abs(gradients).mean()
    expected = np.sign(np.sign(gradients).sum(axis=0)) * size
    assert (0 in expected) == (workers == 4)
    assert np.allclose(told[0].numpy(), expected, rtol=1e-6)
    assert all(torch.equal(each, told[0]) for each in told)


def test_signs_with_error_feedback():
    """Karimireddy et al., Algorithm 2: p = g + e;  Δ = (‖p‖₁/d) sign(p);  e = p − Δ."""
    codec = fs.SignSGD(error_feedback=True)
    memory, error = codec.memory(torch.zeros(SIZE, dtype=torch.float64)), np.zeros(SIZE)
    for gradient in draws(6, SIZE):
        p = gradient + error
        delta = np.abs(p).sum() / SIZE * np.sign(p)
        error = p - delta
        assert np.allclose(through(codec, gradient, memory), delta, rtol=1e-6)
        assert np.allclose(memory.error, error, atol=1e-6)


def test_the_sign_of_zeros_is_drawn_for_each_message():
    codec, zeros = fs.SignSGD("one"), torch.zeros(9)
    memory = codec.memory(zeros)
    signs = [codec.decode(codec.encode(zeros, memory), zeros) for _ in range(40)]
    assert all(sign.unique().numel() == 1 for sign in signs)
    assert {float(sign[0]) for sign in signs} == {-1.0, 1.0}
    mean = fs.SignSGD()
    assert not mean.decode(mean.encode(zeros), zeros).any()


# --- TernGrad -------------------------------------------------------------------------------------


def test_ternary_levels_and_what_is_clipped():
    """Wen et al., eq. 1 and 5, with the standard deviation of the authors' code."""
    values = draws(100, seed=2) ** 3  # far out
    for start in (0, 64):
        part = values[start : start + 64]
        bound = 2.5 * np.sqrt(((part - part.mean()) ** 2).mean())
        clipped = np.clip(part, -bound, bound)
        scale = np.abs(clipped).max()
        assert scale < np.abs(part).max()
        codec = fs.TernGrad(bucket=64)
        decoded = through(codec, values, codec.memory(torch.from_numpy(values)))[start:][:64]
        assert np.allclose(np.unique(np.abs(decoded)), [0, scale], rtol=1e-6)
        assert (decoded * part >= 0).all()
        assert np.allclose(
            decoded[np.abs(part) >= bound], np.sign(part[np.abs(part) >= bound]) * scale
        )


def test_equal_numbers_are_not_clipped_away():
    for values in (np.full(7, -3.0), np.array([0.25])):
        assert np.array_equal(through(fs.TernGrad(), values), values)


# --- Natural --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_become_one_of_the_powers_of_two_around_them(dtype):
    """Horváth et al., Definition 1."""
    values = (draws(2000) * 10.0 ** np.arange(-10, 10).repeat(100)).astype(dtype)
    decoded = through(fs.Natural(), values)
    below = 2.0 ** np.floor(np.log2(np.abs(values.astype(np.float64))))
    assert (np.sign(decoded) == np.sign(values)).all()
    assert np.isin(np.abs(decoded) / below, (1, 2)).all()
    assert 0.2 < (np.abs(decoded) == below).mean() < 0.8


def test_powers_of_two_and_zero_stay_as_they_are():
    values = np.array([0.0, 1.0, -2.0, 2.0**-126, 2.0**127, -(2.0**-30)], dtype=np.float32)
    for _ in range(20):
        assert np.array_equal(through(fs.Natural(), values), values)


def test_numbers_at_the_ends_of_the_range():
    tiny, largest = 2.0**-127 + 2.0**-140, float(np.finfo(np.float32).max)
    values = np.array([tiny, -tiny, largest, -largest, np.inf, -np.inf, np.nan], np.float32)
    seen = np.array([through(fs.Natural(), values) for _ in range(60)])
    assert set(seen[:, 0]) == {0, 2.0**-126}
    assert set(-seen[:, 1]) == {0, 2.0**-126}
    assert set(seen[:, 2]) == {2.0**127}  # never rounded up to infinity
    assert set(seen[:, 3]) == {-(2.0**127)}
    assert set(seen[:, 4]) == {np.inf}
    assert set(seen[:, 5]) == {-np.inf}
    assert np.isinf(seen[:, 6]).all()


# --- Top-k with coarse values ---------------------------------------------------------------------


def printed_chunk(values, kept, bins):
    """SparseLoCo: the largest of a chunk, each as the mean of its bin."""
    places = np.argsort(-np.abs(values))[:kept]
    chosen = values[places]
    width = 6 * chosen.std(ddof=1) / bins
    of_bin = np.clip(np.round((chosen - chosen.mean()) / width + bins / 2), 0, bins - 1)
    decoded = np.zeros_like(values)
    for number in np.unique(of_bin):
        decoded[places[of_bin == number]] = chosen[of_bin == number].mean()
    return decoded


def test_coarse_values_of_the_largest_in_each_chunk():
    codec = fs.QuantisedTopK(0.1, bucket=80, decay=0.9)
    memory, error = codec.memory(torch.zeros(200, dtype=torch.float64)), np.zeros(200)
    for change in draws(5, 200):
        error = 0.9 * error + change
        sent = np.concatenate(
            [
                printed_chunk(error[start : start + 80], kept, bins=4)
                for start, kept in ((0, 8), (80, 8), (160, 4))
            ]
        )
        error -= sent
        decoded = through(codec, change, memory)
        assert np.allclose(decoded, sent, atol=1e-6)
        assert np.count_nonzero(decoded) == 20
        assert np.allclose(memory.error, error, atol=1e-6)


def test_coarse_values_are_about_fourteen_bits_each():
    elements, codec = 100 * 4096, fs.QuantisedTopK(1 / 128)
    assert codec.nbytes(elements) == 100 * (32 * (12 + 2) / 8 + 16)
    assert codec.encode(torch.randn(elements)).nbytes == codec.nbytes(elements)


# --- Deep gradient compression --------------------------------------------------------------------


def printed_steps(gradients, momentum, shares):
    """Lin et al., Algorithm 4, at a learning rate of 1: gradients[step][worker]."""
    workers, size = gradients.shape[1:]
    x = np.zeros(size)
    u, v = np.zeros((workers, size)), np.zeros((workers, size))
    for of_step, share in zip(gradients, shares, strict=True):
        total = np.zeros(size)
        for k, gradient in enumerate(of_step):
            u[k] = momentum * u[k] + gradient
            v[k] = v[k] + u[k]
            threshold = np.sort(np.abs(v[k]))[-share_of(size, share)]
            mask = np.abs(v[k]) >= threshold
            total += np.where(mask, v[k], 0)
            v[k], u[k] = np.where(mask, 0, v[k]), np.where(mask, 0, u[k])
        x -= total / workers
    return x


def test_momentum_correction_and_the_warm_up_of_sparsity():
    gradients = draws(12, 3, SIZE)
    shares = [0.25] * 2 + [0.0625] * 2 + [0.05] * 8  # of 8 messages; 1/64 and less are below 0.05
    strategy = fs.SyncSGD(codec=fs.TopK(0.05, momentum_correction=0.7, warmup=8))

    def program(comm):
        own = [torch.from_numpy(each[comm.rank]) for each in gradients]
        return flat(drive(comm, strategy, torch.zeros(SIZE, dtype=torch.float64), own).model)

    told = fs.launch(program, 3)
    assert np.allclose(told[0], printed_steps(gradients, 0.7, shares), atol=1e-9)


def test_the_parts_of_the_warm_up():
    codec, tensor = fs.TopK(0.001, warmup=8), torch.randn(4000)
    memory = codec.memory(tensor)
    sent = [codec.encode(tensor, memory).nbytes // 8 for _ in range(10)]
    assert sent == [1000, 1000, 250, 250, 62, 62, 16, 16, 4, 4]


def test_dense_momentum_correction_is_momentum():
    """All elements in every message, those of a warm-up too: SGD with momentum."""
    codec = fs.TopK(1.0, momentum_correction=0.8, warmup=6)

    corrected = distributed(fs.SyncSGD(codec=codec), workers=3, steps=15)[0][1]
    plain = distributed(fs.SyncSGD(), workers=3, steps=15, momentum=0.8)[0][1]
    assert torch.allclose(corrected, plain, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(corrected, flat(net()), rtol=1e-2)


def test_momentum_twice_is_refused():
    strategy = fs.SyncSGD(codec=fs.TopK(0.1, momentum_correction=0.9))

    def program(comm):
        model = Vector(torch.zeros(3))
        fs.Worker(comm, model, sgd(model, momentum=0.9), strategy)

    rule = "'optimizer' must have no momentum of its own with TopK's 'momentum_correction'"
    with pytest.raises(ValueError, match=rule):
        fs.launch(program, 2)
    with pytest.raises(ValueError, match=r"\(got 'SGD\(momentum=0.9\)'\)"):
        fs.run("digits-mlp", strategy, workers=2)
    with pytest.raises(ValueError, match=r"\(got 'Adam\(betas=\(0.9, 0.999\)\)'\)"):
        fs.run("digits-mlp", strategy, workers=2, optimizer="adam")


# --- Right on average -----------------------------------------------------------------------------


def level_distance(codec, tensor):
    """How far the two values lie apart that a number may be rounded to."""
    rows = tensor.view(-1, 64)
    match codec:
        case fs.QSGD():
            of_row = torch.linalg.vector_norm(rows, dim=1) / codec.levels
        case fs.TernGrad():
            of_row = rows.abs().amax(dim=1)
        case fs.Natural():
            return 2.0 ** tensor.abs().log2().floor()
    return of_row.repeat_interleave(64)


@pytest.mark.parametrize(
    "codec",
    [
        fs.QSGD(1, bucket=64),
        fs.QSGD(4, bucket=64),
        fs.TernGrad(clip=None, bucket=64),
        fs.Natural(),
    ],
    ids=repr,
)
def test_random_rounding_is_right_on_average(codec):
    """A test of every element, which an unbiased codec fails with a chance below 1e-5 for another
    seed than this one.

    A rounding lies within one level, so by Hoeffding the mean of N of them is further than t levels
    from its expectation with a chance of at most 2 exp(−2Nt²): 3e-8 for t = 3/√N, and 256 elements
    are looked at."""
    rounds = 1500
    tensor = torch.randn(256, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    memory, total = codec.memory(tensor, seed=11), torch.zeros_like(tensor)
    for _ in range(rounds):
        codec.add_decoded(codec.encode(tensor, memory), total, 1.0)
    bound = 3 / math.sqrt(rounds) * level_distance(codec, tensor)
    assert ((total / rounds - tensor).abs() < bound).all()


@pytest.mark.parametrize("codec", [fs.QSGD(2), fs.TernGrad(), fs.Natural()], ids=repr)
def test_workers_round_differently_and_each_the_same_again(codec):
    tensor = torch.randn(500)
    one, again, other = (
        codec.encode(tensor, memory_of(codec, tensor, seed=1, rank=rank)) for rank in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "codec", [fs.QSGD(4), fs.TernGrad(), fs.TernGrad(clip=None, bucket=64), fs.Natural()], ids=str
)
def test_the_second_moment_of_a_codec_that_is_right_on_average_is_within_its_bound(codec):
    for values in (torch.randn(256), torch.eye(256)[3], torch.full((256,), 4 / 3)):
        memory = codec.memory(values, seed=1)
        squares = [
            codec.decode(codec.encode(values, memory), values).square().sum() for _ in range(200)
        ]
        mean = float(torch.stack(squares).mean())
        assert mean <= 1.02 * codec.second_moment(256) * float(values.square().sum())
    assert codec.second_moment(256) > 1
