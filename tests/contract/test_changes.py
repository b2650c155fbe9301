"""Reading only what has changed, changes that land whole, and one change for many."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flockstep as fs
from flockstep.comm import apply_changes, read_changes_nbytes, written_changes

N = 1000


def expected_nbytes(changed, elements, element_bytes):
    """The formula, written again."""
    where = min(4 * changed, (elements + 7) // 8)
    return min(8 + where + changed * element_bytes, elements * element_bytes)


# --- messages -------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]


@given(st.sampled_from(DTYPES), st.integers(0, 300), st.floats(0, 1), st.integers(0, 1 << 30))
def test_who_has_applied_the_changes_has_the_value_to_the_bit(dtype, elements, share, seed):
    draw = torch.Generator().manual_seed(seed)
    size = elements * dtype.itemsize
    value, known = (
        torch.randint(256, (size,), dtype=torch.uint8, generator=draw).view(dtype) for _ in range(2)
    )
    known = torch.where(torch.rand(elements, generator=draw) < share, known, value)
    changed = sum(
        one != other
        for one, other in zip(
            value.view(torch.uint8).view(elements, dtype.itemsize).tolist(),
            known.view(torch.uint8).view(elements, dtype.itemsize).tolist(),
            strict=True,
        )
    )
    message = written_changes(value, known)
    nbytes = value.nbytes if message is None else len(message)
    assert nbytes == read_changes_nbytes(value, known)
    assert nbytes == expected_nbytes(changed, elements, dtype.itemsize)
    if message is not None:
        apply_changes(message, known)
        assert torch.equal(known.view(torch.uint8), value.view(torch.uint8))


@given(st.binary(max_size=60), st.integers(0, 40))
def test_what_is_no_message_is_refused_or_changes_elements_that_are_there(data, elements):
    known = torch.zeros(elements)
    message = torch.tensor(list(data), dtype=torch.uint8)
    try:
        apply_changes(message, known)
    except ValueError as error:
        assert "change" in str(error)
        assert not known.any()


@pytest.mark.parametrize(
    ("count", "rest"),
    [
        (-1, b""),
        (1, b""),
        (7, bytes(56)),
        (1, (6).to_bytes(4, "little") + bytes(4)),
        (1 << 62, b""),
    ],
    ids=["less than none", "no place", "more than there are", "out of range", "very many"],
)
def test_places_that_are_not_there_are_refused(count, rest):
    message = count.to_bytes(8, "little", signed=True) + rest
    known = torch.zeros(6)
    with pytest.raises(ValueError, match="change"):
        apply_changes(torch.tensor(list(message), dtype=torch.uint8), known)
    assert not known.any()


# --- on every backend -----------------------------------------------------------------------------


def test_only_what_has_changed_since_is_read(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(N), home=0)
        known, seen = torch.zeros(N), []

        def read(changes=(), into=known):
            comm.barrier()
            if comm.rank == 0:
                for where, value in changes:
                    changed = torch.zeros(N)
                    changed[where] = value
                    shared.add(changed)
            comm.barrier()
            before = comm.meter.bytes_sent
            shared.read_changes(into)
            seen.append(comm.meter.bytes_sent - before)
            comm.barrier()
            torch.testing.assert_close(into, shared.peek(), rtol=0, atol=0, equal_nan=True)

        read([(slice(2), 1.0)])
        read()
        read([(3, 1.0)])
        read([(slice(10, 20), 1.0), (slice(15, 30), 2.0)])
        read([(slice(500), 1.0)])
        read([(slice(None), 1.0)])
        read([(3, 1.0), (3, -1.0)])
        read([(4, float("nan"))])
        read()
        known[7] = 5.0  # what a worker does to the outcome is its own affair
        read()
        read(into=torch.zeros(N))
        read([(5, 1.0)], into=torch.zeros(2, N)[1])
        return seen

    whole = 4 * N
    one, twenty, half = (expected_nbytes(changed, N, 4) for changed in (1, 20, 500))
    expected = [whole, 8, one, twenty, half, whole, 8, one, 8, 8, 8, one]
    first, *others = launch(program, 3)
    assert first == [0] * len(expected)  # it lives there
    assert others == [expected] * 2


def test_what_is_read_is_right_whatever_is_done_to_the_outcome(launch):
    """Tensors that lie where another has lain, changes that torch does not count, and handles that
    know nothing of each other.
    """

    def program(comm):
        for elements in (1000, 100_000):
            shared = comm.shared(f"x{elements}", torch.ones(elements))
            comm.barrier()
            for _ in range(4):
                assert shared.read_changes(torch.zeros(elements)).sum() == elements

            out = torch.zeros(elements)
            shared.read_changes(out).numpy()[:] = 7
            assert shared.read_changes(out).sum() == elements
            out.data.fill_(5)
            assert shared.read_changes(out).sum() == elements
            with torch.inference_mode():
                assert shared.read_changes().sum() == elements

            other = comm.shared(f"x{elements}", torch.ones(elements))
            for value in (2.0, 3.0):
                comm.barrier()
                if comm.rank == 0:
                    shared.write(torch.full((elements,), value))
                comm.barrier()
                assert other.read_changes().sum() == value * elements
                assert shared.read_changes().sum() == value * elements
            comm.barrier()
        return True

    assert launch(program, 2) == [True] * 2


def test_looks_from_outside_teach_a_reader_nothing(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(N))
        for _ in range(2):
            with comm.off_the_clock():
                shared.read_changes()
        before = comm.meter.bytes_sent
        shared.read_changes()
        comm.barrier()
        return comm.meter.bytes_sent - before

    assert launch(program, 2) == [4 * N] * 2


def test_a_value_that_lives_in_several_places_is_read_as_well(launch):
    """Of any dtype and shape; each place says what has changed there."""

    def program(comm):
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            shared = comm.shared(str(dtype), torch.zeros(40, 25, dtype=dtype))
            for step in range(4):
                change = torch.zeros(40, 25, dtype=dtype)
                change[step, comm.rank] = comm.rank + 1
                with shared.lock():
                    shared.add(change)
                comm.barrier()
                before = comm.meter.bytes_sent
                known = shared.read_changes()
                nbytes = comm.meter.bytes_sent - before
                assert nbytes == 1000 * dtype.itemsize if step == 0 else 0 < nbytes < 200
                assert torch.equal(known, shared.peek())
                comm.barrier()
        return True

    assert launch(program, 3) == [True] * 3


def test_changes_land_whole_among_others(launch):
    rounds, elements = 40, 1000

    def program(comm):
        shared = comm.shared("count", torch.zeros(elements, dtype=torch.float64))
        for _ in range(rounds):
            with shared.changing():
                shared.add(torch.full((elements,), comm.rank + 1.0, dtype=torch.float64))
        comm.barrier()
        return shared.read()

    for value in launch(program, 4):
        assert torch.equal(value, torch.full((elements,), rounds * 10.0, dtype=torch.float64))


@pytest.mark.parametrize("codec", [None, fs.TopK(0.1), fs.QSGD(4)], ids=str)
def test_one_change_for_each(launch, codec):
    def program(comm):
        boxes = [comm.shared(f"box {rank}", torch.zeros(N), home=rank) for rank in range(comm.size)]
        others = [box for rank, box in enumerate(boxes) if rank != comm.rank]
        draw = torch.Generator().manual_seed(comm.rank)
        tensor = torch.randn(N, generator=draw)
        memory = codec.memory(tensor, rank=comm.rank) if codec else None
        before = comm.meter.bytes_sent
        sent = comm.add_to_each(others, tensor, 2, codec=codec, memory=memory)
        nbytes = comm.meter.bytes_sent - before
        assert torch.equal(comm.add_to_each([], tensor), tensor)
        comm.barrier()
        return sent, boxes[comm.rank].read(), nbytes

    results = launch(program, 3)
    for rank, (sent, arrived, nbytes) in enumerate(results):
        others = [other for each, (other, *_) in enumerate(results) if each != rank]
        torch.testing.assert_close(arrived, 2 * sum(others))
        message = 4 * N if codec is None else codec.encode(sent).nbytes
        assert nbytes == 2 * message


def test_what_cannot_be_added_to_each_is_refused_and_forgets_nothing(launch):
    codec, ones = fs.TopK(0.5), torch.ones(4)

    def program(comm):
        box = comm.shared("box", torch.zeros(4), home=0)
        free = comm.shared("free", torch.zeros(4))
        memory = codec.memory(ones)
        memory.error.copy_(torch.tensor([3.0, 2.0, 1.0, 0.0]))
        for line, arguments in [
            ("'tensors' must be shared tensors .*got None", (None, ones)),
            ("'tensors' must be shared tensors .*got tensor", ([box, ones], ones)),
            ("'tensors' must .* each has a 'home' .*got 'free'", ([box, free], ones)),
            ("'tensor' must be", ([box], None)),
            (r"is torch.float32 of shape \(4,\)", ([box], torch.ones(3))),
            ("'scale' must be", ([box], ones, "a")),
        ]:
            with pytest.raises((ValueError, fs.FlockstepError), match=line) as error:
                comm.add_to_each(*arguments, codec=codec, memory=memory)
            assert "\n" not in str(error.value)
            assert memory.error.tolist() == [3, 2, 1, 0]
        comm.barrier()
        return box.read().tolist()

    assert launch(program, 2) == [[0] * 4] * 2


def test_each_may_be_told_by_a_generator_and_whole_numbers_stay_whole(launch):
    def program(comm):
        boxes = [comm.shared(f"box {rank}", torch.zeros(3, dtype=torch.int64), home=rank)
                 for rank in range(comm.size)]  # fmt: skip
        comm.add_to_each((box for box in boxes), torch.tensor([1, 2, 3]), 2)
        with pytest.raises(ValueError, match="'scale' must be a whole number"):
            comm.add_to_each(boxes, torch.tensor([1, 2, 3]), 0.5)
        comm.barrier()
        return boxes[comm.rank].read().tolist()

    assert launch(program, 2) == [[4, 8, 12]] * 2


# --- in virtual time ------------------------------------------------------------------------------

LINK = fs.Network(latency_seconds=0.05, bytes_per_second=1e5)
WORK = 4 * N / 1e5


def timed(program, workers=4, network=LINK):
    def run(comm):
        began = comm.now()
        program(comm)
        return comm.now() - began

    return fs.launch(run, workers, network=network)


def test_messages_to_many_follow_each_other_and_share_one_latency():
    def program(comm):
        boxes = [comm.shared(f"box {rank}", torch.zeros(N), home=rank) for rank in range(comm.size)]
        if comm.rank == 0:
            comm.add_to_each(boxes[1:], torch.ones(N))

    assert timed(program) == pytest.approx([3 * WORK + 0.05, 0, 0, 0])


def test_on_links_that_all_share_they_divide_the_uplink():
    """All three arrive when a third of the uplink has carried each of them."""
    network = fs.Network(0.05, math.inf, uplink=1e5, downlink=1e7)

    def program(comm):
        boxes = [comm.shared(f"box {rank}", torch.zeros(N), home=rank) for rank in range(comm.size)]
        if comm.rank == 0:
            comm.add_to_each(boxes[1:], torch.ones(N))

    assert timed(program, network=network) == pytest.approx([3 * WORK + 0.05, 0, 0, 0])


def test_nobody_waits_while_anothers_change_is_under_way():
    """Both latencies pass at the same time; under the lock one would begin when the other ends."""

    def program(comm, is_locked):
        shared = comm.shared("x", torch.zeros(1))
        with shared.lock() if is_locked else shared.changing():
            shared.add(torch.ones(1))
            shared.read()

    free = timed(functools.partial(program, is_locked=False), 2)
    locked = timed(functools.partial(program, is_locked=True), 2)
    assert max(free) == pytest.approx(0.1, rel=0.01)
    assert max(locked) == pytest.approx(0.2, rel=0.01)


def test_a_read_of_changes_takes_the_time_of_its_bytes():
    def program(comm):
        shared = comm.shared("x", torch.zeros(N))
        shared.read_changes()
        shared.read_changes()

    assert timed(program, 1) == pytest.approx([0.05 + WORK + 0.05 + 8 / 1e5])
