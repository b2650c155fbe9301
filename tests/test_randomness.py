"""Every draw has a stream of its own, for any seed."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flockstep as fs
from flockstep.codecs import CODECS
from flockstep.data.sampling import ORDERS, SHUFFLES
from flockstep.randomness import (
    Purpose,
    borrowed_stream,
    numpy_stream,
    seed_torch,
    stream_seed,
    torch_stream,
)

SOURCE = Path(fs.__file__).parent
LAST_SEED = 2**63 - 1
SEEDS = (0, 1, 2, 4096, 2**32, 2**32 + 1, 2**44, 2**62, LAST_SEED)
RANKS = range(12)

NAMES = st.tuples(
    st.sampled_from(Purpose),
    st.integers(0, LAST_SEED),
    st.lists(st.integers(0, 2**64 - 1), max_size=3).map(tuple),
)


def test_no_two_purposes_seeds_or_ranks_share_a_stream():
    names = [
        (purpose, seed, *numbers)
        for purpose, seed in product(Purpose, SEEDS)
        for numbers in ((), *((rank,) for rank in RANKS), *product(RANKS, range(3)))
    ]
    assert len(names) == len(Purpose) * len(SEEDS) * (1 + 12 + 36)
    assert len({stream_seed(*name) for name in names}) == len(names)
    assert len({numpy_stream(*name).bytes(8) for name in names}) == len(names)
    words = {tuple(torch.randint(2**32, (2,), generator=torch_stream(*n)).tolist()) for n in names}
    assert len(words) == len(names)


@given(NAMES, NAMES)
def test_streams_are_equal_if_and_only_if_their_names_are(one, other):
    """Also where zeros stand at the end, or a number takes more than 32 bits."""
    (purpose, seed, numbers), (another, seed_too, numbers_too) = one, other
    mine, theirs = (purpose, seed, *numbers), (another, seed_too, *numbers_too)
    assert (stream_seed(*mine) == stream_seed(*theirs)) == (mine == theirs)
    assert stream_seed(*mine) != stream_seed(*mine, 0)
    assert numpy_stream(*mine).bytes(16) == numpy_stream(*mine).bytes(16)


def test_torch_streams_use_more_bits_than_torch_does_of_a_seed():
    first, second = (torch.Generator().manual_seed(seed) for seed in (5, 5 + 2**32))
    assert torch.equal(torch.rand(9, generator=first), torch.rand(9, generator=second))

    words = [torch_stream(Purpose.SWARM, 0, rank).get_state()[24 : 24 + 624 * 8] for rank in (0, 1)]
    changed = (words[0].view(torch.int64) != words[1].view(torch.int64)).float().mean()
    assert changed == 1
    assert all(each.view(torch.int64).max() < 2**32 for each in words)


def test_torch_streams_are_uniform():
    drawn = torch.rand(100_000, generator=torch_stream(Purpose.SWARM, 0, 0), dtype=torch.float64)
    assert float(drawn.mean()) == pytest.approx(1 / 2, abs=0.005)
    assert float(drawn.var()) == pytest.approx(1 / 12, abs=0.001)


def test_a_worker_alone_in_its_process_draws_what_a_simulated_one_does():
    before = torch.get_rng_state()
    try:
        seed_torch(7, 2)
        alone = torch.rand(5)
    finally:
        torch.set_rng_state(before)
    simulated = fs.launch(lambda comm: torch.rand(5), workers=3, seed=7)
    assert torch.equal(alone, simulated[2])
    assert not torch.equal(simulated[0], simulated[1])


# --- what used to be shared -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_is_not_the_order_of_the_samples(seed):
    memory = fs.QSGD(4).memory(torch.zeros(8), seed=seed, rank=3)
    rounding = memory.draw.permutation(1000)
    order = fs.Sampling().drawn(np.arange(1000), seed, 3, epoch=0)
    assert not np.array_equal(rounding, order)


def draws_of_groups(seed: int) -> list[list[int]]:
    """What the groups of EAWild draw their delegates with."""

    def program(comm: fs.Comm) -> list[int]:
        model = torch.nn.Linear(2, 1)
        strategy = fs.EAWild(groups=2, delegate="random")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = strategy.init(fs.Worker(comm, model, optimizer, fs.SyncSGD()))
        return torch.randint(1 << 30, (8,), generator=state.group.draw).tolist()

    return fs.launch(program, workers=4, seed=seed)


def test_groups_draw_their_delegates_apart_in_every_seed():
    first, second = draws_of_groups(seed=0), draws_of_groups(seed=1)
    assert first[0] == first[1]
    assert first[2] == first[3]
    assert len({tuple(each) for each in first + second}) == 4


def test_seeds_that_are_4096_apart_gossip_differently():
    """They used to be the same 32 bits to torch."""
    sent = {
        fs.run("digits-mlp", fs.GoSGD(0.5), workers=3, epochs=1, seed=seed).metrics["bytes_sent"]
        for seed in (0, 4096, 8192)
    }
    assert len(sent) > 1


def test_orders_dealt_anew_every_epoch_are_those_of_the_assignment_in_the_first():
    sampling = fs.Sampling(shuffle="global")
    parts = [sampling.parts(fs.Disjoint(), 100, 4, 0, epoch)[0].tolist() for epoch in range(3)]
    assert parts[0] == fs.Disjoint().assign(100, 4, seed=0)[0].tolist()
    assert len({tuple(part) for part in parts}) == 3


def test_a_codec_without_a_memory_draws_from_torchs_global_generator():
    before = torch.get_rng_state()
    try:
        messages = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            messages.append(fs.QSGD(4).encode(torch.linspace(-1, 1, 999)).tolist())
    finally:
        torch.set_rng_state(before)
    assert messages[0] == messages[1] != messages[2]
    assert borrowed_stream().bytes(8) != borrowed_stream().bytes(8)


# --- any seed -------------------------------------------------------------------------------------

DRAWING = [
    fs.GoSGD(0.5),
    fs.ADPSGD(),
    fs.PSOPS(period=2),
    fs.PSOPS(period=2, random="vector"),
    fs.EAWild(groups=2, delegate="random"),
]
CODECS_TO_TRY = [
    fs.Float16(),
    fs.Int8(),
    fs.Natural(),
    fs.OneBit(),
    fs.SignSGD(),
    fs.QSGD(4),
    fs.TernGrad(),
    fs.Threshold(0.01),
    fs.TopK(0.1),
    fs.QuantisedTopK(0.1),
    fs.RandomK(0.1),
    fs.PowerSGD(1),
]
COMPRESSED = [fs.SyncSGD(codec=codec) for codec in CODECS_TO_TRY]


def test_all_codecs_are_tried():
    assert {codec.name for codec in CODECS_TO_TRY} == set(CODECS)


def trained(strategy: fs.Strategy, seed: int, **how: object) -> list[torch.Tensor]:
    result = fs.run(
        "digits-mlp",
        strategy,
        workers=4,
        epochs=1,
        batch_size=120,
        seed=seed,
        compute=fs.Compute(jitter=0.1),
        **how,
    )
    return [*result.model.parameters(), torch.tensor(result.metrics["seconds"])]


@pytest.mark.parametrize("strategy", [*DRAWING, *COMPRESSED], ids=repr)
@pytest.mark.parametrize("seed", [2**44, LAST_SEED])
def test_every_strategy_and_codec_takes_any_seed(strategy, seed):
    first, again = trained(strategy, seed), trained(strategy, seed)
    assert all(map(torch.equal, first, again))
    assert all(bool(tensor.isfinite().all()) for tensor in first)


@pytest.mark.parametrize(
    ("order", "shuffle"),
    [pair for pair in product(ORDERS, SHUFFLES) if pair != ("shuffle_once", "global")],
)
def test_every_order_takes_any_seed(order, shuffle):
    sampling = fs.Sampling(order, shuffle)
    first, second = (
        trained(fs.SyncSGD(), seed, sampling=sampling) for seed in (LAST_SEED, LAST_SEED - 1)
    )
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("scheme", [fs.Disjoint(), fs.FineGrained(2), fs.MediumCoarse(2)], ids=repr)
def test_every_assignment_takes_any_seed(scheme):
    first, second = (scheme.assign(100, 4, seed)[0].tolist() for seed in (LAST_SEED, LAST_SEED - 1))
    assert first != second


@pytest.mark.parametrize(
    "call",
    [
        lambda seed: fs.launch(lambda comm: None, workers=1, seed=seed),
        lambda seed: fs.run("digits-mlp", fs.SyncSGD(), workers=1, seed=seed),
        lambda seed: fs.Disjoint().assign(4, 2, seed),
    ],
)
@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (-1, r"^'seed' must be at least 0 \(got -1\)$"),
        (2**63, r"^'seed' must be below 2\*\*63 \(got 9223372036854775808\)$"),
        (1.0, r"^'seed' must be a whole number \(got 1.0\)$"),
    ],
)
def test_other_seeds_are_refused(call, seed, message):
    with pytest.raises(ValueError, match=message):
        call(seed)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_numbers_that_do_not_fit_into_a_name_are_refused(number):
    with pytest.raises(ValueError, match=f"must be at least 0 and below 2.*got {number}"):
        stream_seed(Purpose.WORKER, 0, number)


def test_a_strategy_of_ones_own_has_streams_that_nothing_else_draws():
    def drawn(*name):
        return tuple(torch.rand(4, generator=fs.random_stream(*name)).tolist())

    names = [("a", 0), ("b", 0), ("a", 1), ("a", 2**32), ("a", 0, 0), ("a", 0, 1)]
    assert len({drawn(*name) for name in names}) == len(names)
    assert drawn("a", 0) == drawn("a", 0)
    with pytest.raises(fs.InvalidField, match=r"^'name' must be a text \(got 0\)$"):
        fs.random_stream(0, 0)


# --- who draws ------------------------------------------------------------------------------------

MAKERS = {
    "manual_seed",
    "seed",
    "default_rng",
    "SeedSequence",
    "RandomState",
    "Generator",
    "PCG64",
    "Random",
    "SystemRandom",
    "initial_seed",
    "train_test_split",
}
ELSEWHERE = {
    # Only to fill them with a state that was saved.
    "strategies/_state.py": {"Generator", "default_rng"},
    # A data set that is made up: the same rows whatever the seed of a run.
    "tasks/gradient_noise.py": {"Generator", "manual_seed"},
}


def made_in(path: Path) -> set[str]:
    """What makes or seeds a generator there."""
    return {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and (name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in MAKERS
    }


def test_nobody_else_makes_a_generator_or_seeds_one():
    paths = {str(path.relative_to(SOURCE)): path for path in SOURCE.rglob("*.py")}
    made = {name: made_in(path) for name, path in paths.items()}
    here = made.pop("randomness.py")
    assert {"default_rng", "SeedSequence", "Generator", "manual_seed"} <= here
    assert {name: what for name, what in made.items() if what} == ELSEWHERE


def test_every_purpose_is_drawn_for():
    used = {
        node.attr
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Purpose"
    }
    assert used == {purpose.name for purpose in Purpose}
