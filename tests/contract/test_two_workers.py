"""Messages between two workers."""

from __future__ import annotations

import pytest
import torch

import flockstep as fs


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str
)
def test_a_message_arrives_as_it_was_sent(launch, dtype):
    def program(comm):
        if comm.rank == 0:
            message = torch.arange(10).to(dtype)
            comm.send(message, 1)
            message.zero_()  # what was sent is out of the sender's hands
            return None
        return comm.recv(torch.empty(10, dtype=dtype), 0)

    assert torch.equal(launch(program, 2)[1], torch.arange(10).to(dtype))


def test_messages_arrive_in_order_and_by_sender(launch):
    def program(comm):
        if comm.rank < 2:
            for k in range(20):
                comm.send(torch.tensor([comm.rank * 100.0 + k]), 2)
            return None
        from_one = [float(comm.recv(torch.empty(1), 1)) for _ in range(20)]
        from_zero = [float(comm.recv(torch.empty(1), 0)) for _ in range(20)]
        return from_zero, from_one

    from_zero, from_one = launch(program, 3)[2]
    assert from_zero == [float(k) for k in range(20)]
    assert from_one == [100.0 + k for k in range(20)]


def test_messages_of_any_size_follow_each_other(launch):
    sizes = [0, 5, 100_000, 1, 300_000, 0]

    def program(comm):
        if comm.rank == 0:
            for size in sizes:
                comm.send(torch.full((size,), float(size)), 1)
            return None
        return [bool((comm.recv(torch.zeros(size), 0) == size).all()) for size in sizes]

    assert launch(program, 2)[1] == [True] * len(sizes)


def test_one_message_each_way_may_be_sent_before_either_is_received(launch):
    def program(comm):
        peer = 1 - comm.rank
        seen = []
        for k in range(5):
            comm.send(torch.tensor([10.0 * k + comm.rank]), peer)
            seen.append(float(comm.recv(torch.empty(1), peer)))
        return seen

    assert launch(program, 2) == [[10.0 * k + 1 for k in range(5)], [10.0 * k for k in range(5)]]


def test_two_messages_each_way_before_either_is_received_are_a_deadlock(backend):
    """The second waits until the first is taken, on every backend."""

    def program(comm):
        peer = 1 - comm.rank
        comm.send(torch.zeros(3), peer)
        comm.send(torch.ones(3), peer)
        comm.recv(torch.empty(3), peer)
        comm.recv(torch.empty(3), peer)

    with pytest.raises(fs.DeadlockError) as raised:
        fs.launch(program, 2, backend)
    line = program.__code__.co_firstlineno + 3
    assert str(raised.value).splitlines() == [
        "no worker can go on:",
        f"  rank 0 waits in send to rank 1 at {__file__}:{line}",
        f"  rank 1 waits in send to rank 0 at {__file__}:{line}",
    ]


def test_messages_to_two_workers_do_not_wait_for_each_other(launch):
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.tensor([1.0]), 1)
            comm.send(torch.tensor([2.0]), 2)
            return None
        if comm.rank == 1:  # takes its own only after the other has
            comm.recv(torch.empty(1), 2)
        value = comm.recv(torch.empty(1), 0)
        if comm.rank == 2:
            comm.send(value, 1)
        return float(value)

    assert launch(program, 3) == [None, 1.0, 2.0]


def test_exchange_swaps(launch):
    def program(comm):
        peer = comm.rank ^ 1
        received = [
            comm.exchange(torch.full((3,), float(10 * k + comm.rank)), peer) for k in range(10)
        ]
        return [part.tolist() for part in received]

    results = launch(program, 4)
    for rank, received in enumerate(results):
        assert received == [[10.0 * k + (rank ^ 1)] * 3 for k in range(10)]


def test_subgroups_have_channels_of_their_own(launch):
    def program(comm):
        part = comm.split(comm.rank // 2)
        if part.rank == 0:
            part.send(torch.tensor([float(comm.rank)]), 1)
            return None
        return float(part.recv(torch.empty(1), 0))

    assert launch(program, 4) == [None, 0.0, None, 2.0]


def test_strided_receive(launch):
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.arange(6.0).view(2, 3).t(), 1)
            return None
        table = torch.zeros(3, 4)
        comm.recv(table[:, 1:3], 0)
        return table

    assert launch(program, 2)[1].tolist() == [[0, 0, 3, 0], [0, 1, 4, 0], [0, 2, 5, 0]]


def test_a_message_of_another_size_is_an_error(launch):
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.zeros(3), 1)
        else:
            comm.recv(torch.zeros(4), 0)

    with pytest.raises(
        fs.MismatchError, match=r"rank 0 sent 3 × torch.float32, rank 1 expected 4 × torch.float32"
    ):
        launch(program, 2)


@pytest.mark.parametrize(
    ("peer", "rule"),
    [(1, "be another worker than the caller"), (2, "be a rank from 0 to 1"), (-1, "be a rank")],
)
def test_a_peer_must_be_another_member(launch, peer, rule):
    def program(comm):
        if comm.rank == 1:
            comm.send(torch.zeros(1), peer)

    with pytest.raises(fs.InvalidField, match=rule):
        launch(program, 2)
