"""Collectives and groups: the same on every backend."""

from __future__ import annotations

import pytest
import torch

import flockstep as fs

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [0, 1, 7, 1000])
def test_all_reduce_gives_every_worker_the_reduction(launch, dtype, elements):
    def program(comm):
        own = (torch.arange(elements) % 13 + comm.rank).to(dtype)
        return {op: comm.all_reduce(own.clone(), op=op) for op in ("sum", "max", "min")}

    base = torch.arange(elements) % 13
    for result in launch(program, 3):
        assert torch.equal(result["sum"], (3 * base + 3).to(dtype))
        assert torch.equal(result["max"], (base + 2).to(dtype))
        assert torch.equal(result["min"], base.to(dtype))


def test_all_reduce_changes_the_tensor_in_place_and_returns_it(launch):
    def program(comm):
        tensor = torch.ones(5)
        return comm.all_reduce(tensor) is tensor, tensor

    for is_same, tensor in launch(program, 4):
        assert is_same
        assert torch.equal(tensor, torch.full((5,), 4.0))


def test_mean_of_integers_is_refused(launch):
    with pytest.raises(
        fs.InvalidField, match=r"'op' must be 'sum', 'max' or 'min' for integers \(got 'mean'\)"
    ):
        launch(lambda comm: comm.all_reduce(torch.ones(2, dtype=torch.int64), op="mean"), 2)


def test_halves_are_added_in_float32(launch):
    """In half precision 2048 + 1 + 1 would stay 2048."""

    def program(comm):
        value = [2048.0, 1.0, 1.0][comm.rank]
        return comm.all_reduce(torch.tensor([value], dtype=torch.float16))

    assert [float(result) for result in launch(program, 3)] == [2050.0] * 3


def test_large_tensors_are_reduced_by_several_workers_at_once(launch):
    """Large enough for the local backend's several reducers, its chunks and its staging."""

    def program(comm):
        elements = 1_234_567
        ordinary = torch.arange(elements, dtype=torch.float32) * (comm.rank + 1)
        lies_well = comm.empty(elements, torch.float32, torch.device("cpu")).copy_(ordinary)
        mixed = (
            ordinary.clone()
            if comm.rank != 1
            else comm.empty(elements, torch.float32, ordinary.device)
        )
        mixed.copy_(ordinary)
        for tensor in (ordinary, lies_well, mixed):
            comm.all_reduce(tensor, op="mean")
        expected = torch.arange(elements, dtype=torch.float32) * 2
        return [torch.allclose(tensor, expected) for tensor in (ordinary, lies_well, mixed)]

    assert launch(program, 3) == [[True, True, True]] * 3


def test_strided_tensors_are_taken_as_they_are(launch):
    def program(comm):
        table = torch.zeros(4, 6)
        column = table[:, 2]
        column.fill_(comm.rank + 1)
        comm.all_reduce(column)
        transposed = torch.full((2, 3), float(comm.rank)).t()
        comm.broadcast(transposed, root=1)
        gathered = comm.all_gather(table[::2, 2])
        return table, transposed, gathered

    for table, transposed, gathered in launch(program, 3):
        assert torch.equal(table.sum(0), torch.tensor([0.0, 0, 24, 0, 0, 0]))
        assert torch.equal(transposed, torch.ones(3, 2))
        assert all(torch.equal(part, torch.full((2,), 6.0)) for part in gathered)


def test_all_gather_takes_different_lengths(launch):
    def program(comm):
        return comm.all_gather(torch.full((comm.rank, 2), comm.rank))

    for parts in launch(program, 4):
        assert [tuple(part.shape) for part in parts] == [(0, 2), (1, 2), (2, 2), (3, 2)]
        assert all(bool((part == rank).all()) for rank, part in enumerate(parts))


def test_what_was_gathered_says_whose_it_is(launch):
    """By the ranks of the comm that was asked, not of the world."""

    def program(comm):
        part = comm.split(comm.rank % 2)
        seen = []
        for here in (comm, part, comm.split(comm.rank)):
            gathered = here.all_gather(torch.tensor([10.0 * comm.rank]))
            by_rank = {rank: float(tensor) for rank, tensor in gathered.by_rank().items()}
            seen.append((len(gathered), gathered.ranks, by_rank))
        return seen

    world = (4, (0, 1, 2, 3), {0: 0.0, 1: 10.0, 2: 20.0, 3: 30.0})
    for rank, seen in enumerate(launch(program, 4)):
        part = (2, (0, 1), {0: 10.0 * (rank % 2), 1: 10.0 * (rank % 2) + 20})
        alone = (1, (0,), {0: 10.0 * rank})
        assert seen == [world, part, alone]


def test_gathered_tensors_are_copies(launch):
    def program(comm):
        own = torch.full((3,), float(comm.rank))
        parts = comm.all_gather(own)
        own.fill_(99)
        parts[comm.rank].add_(1)
        comm.barrier()
        return [float(part[0]) for part in parts]

    assert launch(program, 2) == [[1.0, 1.0], [0.0, 2.0]]


@pytest.mark.parametrize("root", [0, 1, 4])
def test_broadcast_comes_from_the_root(launch, root):
    def program(comm):
        return comm.broadcast(torch.tensor([float(comm.rank)] * 9), root=root)

    assert all(torch.equal(result, torch.full((9,), float(root))) for result in launch(program, 5))


def test_nobody_passes_a_barrier_before_all_have_come(launch):
    def program(comm):
        arrived = comm.shared("arrived", torch.zeros(()))
        with arrived.lock():
            arrived.add(torch.ones(()))
        comm.barrier()
        return float(arrived.read())

    assert launch(program, 6) == [6.0] * 6


def test_many_collectives_in_a_row_do_not_mix(launch):
    def program(comm):
        seen = []
        for turn in range(60):
            size = 1 + turn % 7 * 100
            total = comm.all_reduce(torch.full((size,), float(comm.rank * turn)))
            parts = comm.all_gather(torch.tensor([turn, comm.rank]))
            root = comm.broadcast(torch.tensor(comm.rank), root=turn % comm.size)
            seen.append((float(total[-1]), [part.tolist() for part in parts], int(root)))
        return seen

    for seen in launch(program, 3):
        for turn, (total, parts, root) in enumerate(seen):
            assert total == 3 * turn
            assert parts == [[turn, 0], [turn, 1], [turn, 2]]
            assert root == turn % 3


def test_split_makes_comms_of_those_with_the_same_colour(launch):
    def program(comm):
        part = comm.split(comm.rank % 2)
        inner = part.split(part.rank // 2)
        total = part.all_reduce(torch.tensor(comm.rank))
        inner_total = inner.all_reduce(torch.tensor(comm.rank))
        world = comm.all_reduce(torch.tensor(1))
        return (
            part.rank,
            part.size,
            int(total),
            inner.rank,
            inner.size,
            int(inner_total),
            int(world),
        )

    assert launch(program, 8) == [
        (0, 4, 12, 0, 2, 2, 8),
        (0, 4, 16, 0, 2, 4, 8),
        (1, 4, 12, 1, 2, 2, 8),
        (1, 4, 16, 1, 2, 4, 8),
        (2, 4, 12, 0, 2, 10, 8),
        (2, 4, 16, 0, 2, 12, 8),
        (3, 4, 12, 1, 2, 10, 8),
        (3, 4, 16, 1, 2, 12, 8),
    ]


def test_groups_of_different_sizes_work_side_by_side(launch):
    def program(comm):
        part = comm.split(0 if comm.rank < 1 else 1)
        peer_sum = torch.tensor(0.0)
        for _ in range(part.size * 3):
            part.all_reduce(peer_sum.add_(1))
        shared = part.shared("mine", torch.zeros(2))
        with shared.lock():
            shared.add(torch.ones(2))
        part.barrier()
        return part.size, float(peer_sum), shared.read().tolist()

    alone, *together = launch(program, 4)
    assert alone == (1, 3.0, [1.0, 1.0])
    assert together == [(3, sum(3.0**k for k in range(1, 10)), [3.0, 3.0])] * 3


def test_one_worker_is_a_group_of_its_own(launch):
    def program(comm):
        tensor = torch.arange(4.0)
        comm.all_reduce(tensor, op="mean")
        comm.broadcast(tensor)
        comm.barrier()
        shared = comm.shared("alone", tensor)
        before = shared.blend(tensor + 1, 0.5)
        part = comm.split(7)
        return (
            tensor,
            comm.all_gather(tensor),
            before,
            shared.read(),
            part.size,
            comm.meter.bytes_sent,
        )

    tensor, gathered, before, after, size, sent = launch(program, 1)[0]
    assert torch.equal(tensor, torch.arange(4.0))
    assert len(gathered) == 1
    assert torch.equal(gathered[0], tensor)
    assert torch.equal(before, tensor)
    assert torch.equal(after, tensor + 0.5)
    assert size == 1
    assert sent == 3 * 16  # the shared tensor's blend, there and back, and its read


def test_backends_agree_bit_for_bit(local):
    def program(comm):
        own = torch.randn(50_001, generator=torch.Generator().manual_seed(comm.rank))
        return [
            comm.all_reduce(own.to(dtype), op="mean") for dtype in (torch.float32, torch.bfloat16)
        ]

    simulated = fs.launch(program, 5)[0]
    for result in fs.launch(program, 5, local):
        assert all(torch.equal(a, b) for a, b in zip(result, simulated, strict=True))


def test_a_tensor_that_requires_a_gradient_can_be_exchanged(launch):
    def program(comm):
        weight = torch.nn.Parameter(torch.full((3,), float(comm.rank)))
        comm.all_reduce(weight, op="mean")
        return weight.detach().clone()

    assert all(torch.equal(result, torch.full((3,), 0.5)) for result in launch(program, 2))


def test_what_is_done_in_the_background_is_done(launch):
    def program(comm):
        tensor = torch.full((3,), float(comm.rank))
        with comm.in_background() as wait:
            comm.all_reduce(tensor)
            if comm.rank == 0:
                comm.send(tensor, 1)
        wait()
        if comm.rank == 1:
            tensor = comm.recv(torch.zeros(3), 0)
        return tensor.tolist(), comm.meter.exchanges

    assert launch(program, 3) == [([3.0] * 3, 2), ([3.0] * 3, 1), ([3.0] * 3, 1)]
