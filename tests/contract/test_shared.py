"""Shared tensors: what every backend promises, alone and under contention."""

from __future__ import annotations

import time

import pytest
import torch

import flockstep as fs


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str
)
def test_the_first_value_is_that_of_rank_0(launch, dtype):
    def program(comm):
        shared = comm.shared("x", torch.full((2, 3), comm.rank + 5).to(dtype))
        return shared.read()

    for value in launch(program, 3):
        assert value.dtype is dtype
        assert torch.equal(value, torch.full((2, 3), 5).to(dtype))


def test_read_write_add_and_blend(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(4))
        if comm.rank == 0:
            shared.write(torch.full((4,), 2.0))
            shared.add(torch.ones(4), scale=-0.5)
            before = shared.blend(torch.full((4,), 3.5), 0.25)
            assert before.tolist() == [1.5] * 4
        comm.barrier()
        out = torch.zeros(2, 4)
        assert shared.read(out=out[1]).data_ptr() == out[1].data_ptr()
        return out[1].tolist()

    assert launch(program, 3) == [[2.0] * 4] * 3


def test_no_update_is_lost_under_the_lock(launch):
    rounds, elements = 40, 1000

    def program(comm):
        shared = comm.shared("count", torch.zeros(elements, dtype=torch.float64))
        for _ in range(rounds):
            with shared.lock():
                value = shared.read()
                value += comm.rank + 1
                shared.write(value)
        comm.barrier()
        return shared.read()

    for value in launch(program, 4):
        assert torch.equal(value, torch.full((elements,), rounds * 10.0, dtype=torch.float64))


def test_without_the_lock_values_stay_finite_and_nothing_breaks(launch):
    def program(comm):
        shared = comm.shared("wild", torch.zeros(10_000))
        for k in range(50):
            shared.add(torch.ones(10_000), scale=0.5)
            shared.blend(torch.full((10_000,), float(comm.rank)), 0.1)
            if k % 7 == 0:
                shared.write(torch.full((10_000,), 1.0))
        comm.barrier()
        return shared.read()

    for value in launch(program, 4):
        assert value.isfinite().all()
        assert value.abs().max() < 200


def test_turns_go_round_in_rank_order(launch):
    def program(comm):
        log = comm.shared("log", torch.full((13,), -1.0))
        for _ in range(4):
            if comm.rank == 0:
                time.sleep(0.01)
            with log.lock(in_turn=True):
                line = log.read()
                position = int(line[-1]) + 1
                line[position] = comm.rank
                line[-1] = position
                log.write(line)
        comm.barrier()
        return log.read()[:-1].tolist()

    assert launch(program, 3)[0] == [0.0, 1, 2] * 4


def test_who_retires_is_not_waited_for(launch):
    def program(comm):
        count = comm.shared("count", torch.zeros(()))
        for _ in range(3 if comm.rank == 1 else 6):
            with count.lock(in_turn=True):
                count.add(torch.ones(()))
        count.retire()
        comm.barrier()
        return float(count.read())

    assert launch(program, 3) == [15.0] * 3


def test_turns_and_the_plain_lock_exclude_each_other(launch):
    def program(comm):
        value = comm.shared("x", torch.zeros(()))
        if comm.rank >= 2:
            value.retire()
        comm.barrier()
        for _ in range(20):
            with value.lock(in_turn=comm.rank < 2):
                value.write(value.read() + 1)
        comm.barrier()
        return float(value.read())

    assert launch(program, 4) == [80.0] * 4


def test_the_lock_is_free_again_after_an_exception(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(1))
        for _ in range(3):
            try:
                with shared.lock():
                    shared.write(shared.read() + 1)
                    raise KeyError
            except KeyError:
                pass
        comm.barrier()
        return float(shared.read())

    assert launch(program, 3) == [9.0] * 3


def test_zero_length_and_scalar_shared_tensors(launch):
    def program(comm):
        empty = comm.shared("empty", torch.zeros(0))
        empty.add(torch.zeros(0))
        empty.blend(torch.zeros(0), 0.5)
        scalar = comm.shared("scalar", torch.tensor(3.0))
        return tuple(empty.read().shape), float(scalar.read())

    assert launch(program, 2) == [((0,), 3.0)] * 2


def test_the_same_name_is_the_same_tensor(launch):
    def program(comm):
        first = comm.shared("x", torch.zeros(2))
        other = comm.shared("y", torch.zeros(2))
        again = comm.shared("x", torch.ones(2))
        if comm.rank == 1:
            first.add(torch.full((2,), 4.0))
        comm.barrier()
        return again.read().tolist(), other.read().tolist()

    assert launch(program, 2) == [([4.0, 4.0], [0.0, 0.0])] * 2


def test_strided_tensors_work_with_shared_ones(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(3, 2).t())
        if comm.rank == 0:
            shared.add(torch.arange(6.0).view(3, 2).t())
        comm.barrier()
        out = torch.zeros(3, 2)
        shared.read(out=out.t())
        return out

    assert all(torch.equal(out, torch.arange(6.0).view(3, 2)) for out in launch(program, 2))


def test_a_tensor_of_another_shape_or_dtype_is_refused(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(3))
        shared.add(torch.zeros(3, dtype=torch.float64))

    with pytest.raises(
        fs.MismatchError, match=r"shared tensor 'x' is torch.float32 of shape \(3,\)"
    ):
        launch(program, 2)


def test_integers_are_added_whole_and_not_blended(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(3, dtype=torch.int64))
        for _ in range(2):
            with shared.lock():
                shared.add(torch.arange(3), scale=2.0)
        comm.barrier()
        refused = []
        for call in (
            lambda: shared.add(torch.arange(3), scale=0.5),
            lambda: shared.blend(torch.arange(3), 0.5),
        ):
            try:
                call()
            except fs.FlockstepError as error:
                refused.append(type(error).__name__)
        return shared.read().tolist(), refused

    assert launch(program, 2) == [([0, 8, 16], ["InvalidField", "InvalidField"])] * 2


@pytest.mark.parametrize(
    "ask",
    [
        lambda comm, k: comm.shared(f"x{k}", torch.zeros(6)),
        lambda comm, k: comm.shared("x", torch.zeros(6 + k)),
        lambda comm, k: comm.shared("x", torch.zeros((6, 1) if k else (2, 3))),
        lambda comm, k: comm.shared("x", torch.zeros(6, dtype=torch.int32 if k else None)),
        lambda comm, k: comm.shared("x", torch.zeros(6), home=k),
        lambda comm, k: comm.shared("x", torch.zeros(6), home=0 if k else None),
    ],
    ids=["name", "size", "shape", "dtype", "home", "no home"],
)
def test_workers_must_agree_about_a_shared_tensor(launch, ask):
    with pytest.raises(fs.MismatchError, match="called shared"):
        launch(lambda comm: ask(comm, comm.rank), 2)


AGAIN = {
    "size": lambda comm: comm.shared("x", torch.zeros(1000)),
    "shape": lambda comm: comm.shared("x", torch.zeros(3, 2)),
    "dtype": lambda comm: comm.shared("x", torch.zeros(6, dtype=torch.float64)),
    "home": lambda comm: comm.shared("x", torch.zeros(6), home=1),
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_shared_tensor_stays_what_it_is(launch, name):
    """Asked for again it is the same one; as anything else it is refused, with nothing touched."""

    def program(comm):
        first, other = (comm.shared(each, torch.zeros(6)) for each in "xy")
        if comm.rank == 0:
            first.write(torch.ones(6))
        comm.barrier()
        again = comm.shared("x", torch.full((6,), 7.0)).read()
        with pytest.raises(fs.MismatchError) as refused:
            AGAIN[name](comm)
        comm.barrier()
        return again.tolist(), other.read().tolist(), str(refused.value)

    for again, other, message in launch(program, 2):
        assert (again, other) == ([1.0] * 6, [0.0] * 6)
        assert message.startswith(
            "shared tensor 'x' is torch.float32 of shape (6,) at nobody (got torch."
        )


def test_who_waits_sees_the_first_value_that_it_waits_for(launch):
    def program(comm):
        clocks = comm.shared("clocks", torch.zeros(comm.size, dtype=torch.int64), home=0)
        tick = torch.zeros(comm.size, dtype=torch.int64)
        tick[comm.rank] = 1
        seen = []
        for step in range(1, 6):
            with clocks.lock():  # adding nothing to the others' clocks must not undo what they add
                clocks.add(tick)
            seen.append(
                int(clocks.wait_until(lambda value, step=step: bool(value.min() >= step)).min())
            )
        return seen

    for seen in launch(program, 3):
        assert all(least in (step, step + 1) for step, least in enumerate(seen, 1))


def test_waiting_for_what_nobody_does_is_a_deadlock(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(2))
        if comm.rank:
            shared.wait_until(lambda value: bool(value.sum() > 0))
        comm.barrier()

    with pytest.raises(
        fs.DeadlockError, match=r"rank 1.*wait_until of shared 'x' at .*test_shared.py"
    ):
        launch(program, 2)


def test_a_waiter_is_no_deadlock_while_others_move_on(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(1))
        if comm.rank == 0:
            return shared.wait_until(lambda value: bool(value >= 3)).item()
        part = comm.split(0) if comm.size == 1 else comm
        for _ in range(3):
            time.sleep(0.25)
            shared.add(torch.ones(1))
        return part.size

    assert launch(program, 2) == [3.0, 2]


def test_a_tensor_costs_nothing_to_the_worker_at_which_it_lives(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(1000), home=1)
        before = comm.meter.bytes_sent
        with shared.lock():
            shared.add(torch.ones(1000))
        comm.barrier()
        value = shared.blend(torch.ones(1000), 0.0)
        return comm.meter.bytes_sent - before, value.mean().item()

    assert launch(program, 3) == [(12_000, 3.0), (0, 3.0), (12_000, 3.0)]


def test_the_home_must_be_a_member(launch):
    with pytest.raises(fs.InvalidField, match="'home' must be a rank from 0 to 1 .got 2."):
        launch(lambda comm: comm.shared("x", torch.zeros(1), home=2), 2)


def test_pages_are_the_value_itself_where_there_are_any(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(3), home=0)
        pages = shared.pages()
        if pages is None:
            return True
        if comm.rank == 0:
            pages.add_(2)
        comm.barrier()
        return shared.read().tolist() == pages.tolist() == [2.0] * 3

    assert launch(program, 2) == [True] * 2
