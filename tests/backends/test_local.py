"""What is particular to local processes: what travels, what is shared, what is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch

import flockstep as fs
from flockstep.backends.local import payload
from flockstep.backends.local.arena import Arena
from flockstep.randomness import Purpose, stream_seed


@pytest.fixture
def arena():
    made = Arena.create()
    yield made
    made.close()


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(7),
        torch.randn(3, 5).t(),
        torch.zeros(0, 3),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.randn(4, requires_grad=True),
        np.arange(12.0).reshape(3, 4),
        {"nested": [torch.ones(2), "text", None], 3: (4, 5)},
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("load", [payload.load_private, payload.load_copy])
def test_values_come_back_as_they_went(arena, value, load):
    loaded = load(arena, payload.store(arena, value))
    if isinstance(value, torch.Tensor):
        assert loaded.dtype is value.dtype
        assert loaded.requires_grad == value.requires_grad
        assert loaded.shape == value.shape
        assert torch.equal(loaded, value)
    else:
        assert repr(loaded) == repr(value)


def test_a_view_travels_without_what_it_is_a_view_of(arena):
    large = torch.zeros(10_000_000)
    before = arena.allocate(0)
    payload.store(arena, large[5:8])
    assert arena.allocate(0) - before < 10_000


def test_allocations_are_aligned_zeroed_and_apart(arena):
    first, second = arena.allocate(100), arena.allocate(1)
    assert first % 64 == second % 64 == 0
    assert second - first >= 100
    tensor = arena.tensor(first, 25, torch.float32)
    assert not tensor.any()
    assert arena.offset_of(tensor) == first
    assert arena.offset_of(torch.zeros(3)) is None


def test_limited_address_space_is_enough():
    """Where the system refuses to map so much, less is taken."""
    code = (
        "import resource, flockstep as fs, torch\n"
        "resource.setrlimit(resource.RLIMIT_AS, (40 << 30, 40 << 30))\n"
        "print(fs.launch(lambda comm: int(comm.all_reduce(torch.tensor(1))), 2, 'local'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=code, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[2, 2]"


def test_full_memory_is_an_error(arena):
    with pytest.raises(MemoryError, match="shared memory is full"):
        arena.allocate(1 << 60)


def test_workers_do_not_see_what_others_change_in_the_programs_data(local):
    data = torch.zeros(1000)

    def program(comm):
        comm.barrier()
        data.add_(comm.rank + 1)
        comm.barrier()
        return float(data[0])

    assert fs.launch(program, 3, local) == [1.0, 2.0, 3.0]
    assert float(data[0]) == 0.0


def test_a_programs_data_is_not_copied_for_each_worker(local):
    data = torch.ones(50_000_000)  # 200 MB

    def program(comm):
        before = psutil.Process().memory_info()
        total = float(data.sum())
        private = psutil.Process().memory_full_info().uss
        return total, private, before.rss

    for total, private, _ in fs.launch(program, 2, local):
        assert total == 50_000_000
        assert private < 150e6  # the data would be 200 MB on its own


def test_closures_local_classes_and_lambdas_are_programs(local):
    factor = 3

    class Net(torch.nn.Linear):
        pass

    def program(comm):
        return Net(1, factor), torch.backends.mkldnn.is_available()

    models = fs.launch(program, 2, local)
    assert [model.out_features for model, _ in models] == [3, 3]
    assert fs.launch(lambda comm: comm.rank * factor, 2, local) == [0, 3]


def test_a_program_typed_into_an_interpreter_works():
    """As in a notebook, there is no file to import it from."""
    code = (
        "import flockstep as fs, torch\n"
        "class Net(torch.nn.Linear): pass\n"
        "def program(comm):\n"
        "    features = Net(1, comm.rank + 1).out_features\n"
        "    return int(comm.all_reduce(torch.tensor(features)))\n\n"
        "print(fs.launch(program, 3, backend='local'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=code, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[6, 6, 6]"


def test_workers_see_the_callers_arguments_and_import_path():
    assert fs.launch(lambda comm: (sys.argv, sys.path), 1, "local")[0] == (sys.argv, sys.path)


def test_a_kept_server_is_used_again(local):
    first = set(fs.launch(lambda comm: os.getppid(), 8, local))
    again = set(fs.launch(lambda comm: os.getppid(), 2, local))
    assert first == again
    assert len(first) == 1


def test_workers_find_loaded_what_an_optimizer_needs(local):
    def program(comm):
        before = set(sys.modules)
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        return [name for name in set(sys.modules) - before if name.startswith(("torch", "sympy"))]

    assert fs.launch(program, 2, local) == [[], []]


def test_each_worker_is_a_process(local):
    pids = fs.launch(lambda comm: os.getpid(), 4, local)
    assert len({*pids, os.getpid()}) == 5


def test_flat_parameters_live_in_shared_memory_and_are_exchanged_where_they_lie(local):
    def program(comm):
        model = torch.nn.Linear(10, 10)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.SyncSGD())
        arena = comm._slot.arena
        return all(
            arena.offset_of(t) is not None for t in (worker.flat.state, worker.flat.gradients)
        )

    assert fs.launch(program, 2, local) == [True, True]


def test_the_clock_is_the_walls(local):
    def program(comm):
        before = comm.now()
        time.sleep(0.1)
        comm.elapse(100.0)
        return before, comm.now() - before

    for before, passed in fs.launch(program, 2, local):
        assert 0 <= before < 1
        assert 0.1 <= passed < 2


def test_a_lock_outlives_no_holder(local):
    """The kernel frees the lock of a process that ends, so one that forgets to is not in the
    way.
    """

    def program(comm):
        shared = comm.shared("x", torch.zeros(1))
        if comm.rank == 0:
            shared._acquire()
            comm.send(torch.zeros(1), 1)
            return True
        comm.recv(torch.zeros(1), 0)
        with shared.lock():
            return True

    assert fs.launch(program, 2, local) == [True, True]


def test_a_lock_survives_what_else_is_closed(local):
    """Record locks fall with any descriptor of their file; maps of the program's data have one,
    and are collected.
    """

    def program(comm):
        shared = comm.shared("x", torch.zeros(1))
        arena = comm._slot.arena
        if comm.rank == 0:
            with shared.lock():
                payload.load_private(arena, payload.store(arena, "a map that is dropped at once"))
                comm.barrier()
                comm.barrier()
            return None
        comm.barrier()
        taken = arena.try_lock(shared._offset)
        comm.barrier()
        return taken

    assert fs.launch(program, 2, local) == [None, False]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_that_workers_print_reach_the_callers_output_whole(capfd, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)

    def program(comm):
        comm.barrier()
        for line in range(200):
            print("line", line, "from", comm.rank)
            print("line", line, "from", comm.rank, file=sys.stderr)

    fs.launch(program, 2, "local")
    expected = sorted(f"line {line} from {rank}" for line in range(200) for rank in range(2))
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == expected
    assert sorted(captured.err.splitlines()) == expected


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_a_launcher_without_standard_streams_has_workers_that_print_nowhere(tmp_path, closed):
    script, answer = tmp_path / "script.py", tmp_path / "answer"
    script.write_text(
        "import sys, pathlib\nimport flockstep as fs\n"
        "def program(comm):\n"
        "    print('out'); print('err', file=sys.stderr)\n"
        "    return comm.rank\n"
        "pathlib.Path(sys.argv[1]).write_text(repr(fs.launch(program, 2, 'local')))\n"
    )
    subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, script, answer], check=True, timeout=60
    )
    assert answer.read_text() == "[0, 1]"


def test_output_that_nobody_takes_any_more_fails_no_worker_that_has_ended():
    script = (
        "import flockstep as fs\n"
        "assert fs.launch(lambda comm: print('x', end=''), 4, 'local') == [None] * 4\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_workers_may_be_part_of_a_larger_world(local):
    """Seeds, errors and losses name the rank there; the comm is that of the workers here."""

    def program(comm):
        return comm.rank, torch.initial_seed()

    launch = fs.Launch(program, 1, seed=3)
    assert local.run_part(launch, first_rank=5) == [(0, stream_seed(Purpose.WORKER, 3, 5))]
    with pytest.raises(fs.WorkerError, match="rank 5 raised ZeroDivisionError"):
        local.run_part(fs.Launch(lambda comm: 1 / 0, 1), first_rank=5)
    with pytest.raises(fs.WorkerLost, match="rank 5 exited with 3 after step 1") as raised:
        dies = fs.Launch(lambda comm: comm.elapse() or os._exit(3), 1)
        local.run_part(dies, first_rank=5)
    assert raised.value.rank == 5
    assert raised.value.seconds >= 0
