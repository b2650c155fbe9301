"""Whatever goes wrong ends the run fast, with a typed error that names rank and cause, and leaves
nothing behind.

That nothing is left behind (processes, threads, shared memory, descriptors) is checked around every
test, by the fixture in conftest. Local runs here start a server of their own where the whole life
of a launch matters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import flockstep as fs

# What does not end soon would not end at all, so the bound allows for a machine that stands still
# for seconds. How soon it is in truth, `make bench` measures.
SOON = 30.0


class Clock:
    """Measures from the moment of the failure, which workers write down, to now."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def strike(self) -> None:
        # Whole at once: one worker may strike while another's failure is being measured.
        written = self.path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        written.write_text(repr(time.monotonic()))
        written.replace(self.path)

    def since(self) -> float:
        return time.monotonic() - float(self.path.read_text())


@pytest.fixture
def failure(tmp_path):
    return Clock(tmp_path / "failure")


def test_an_exception_stops_all_and_is_raised_with_its_rank(launch, failure):
    def program(comm):
        comm.barrier()
        if comm.rank == 2:
            failure.strike()
            raise ZeroDivisionError("two is wrong")
        comm.barrier()

    with pytest.raises(
        ZeroDivisionError, match="rank 2 raised ZeroDivisionError: two is wrong"
    ) as raised:
        launch(program, 4)
    assert failure.since() < SOON
    assert isinstance(raised.value, fs.WorkerError)
    assert raised.value.rank == 2
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_the_workers_traceback_comes_along(local):
    def program(comm):
        raise LookupError("here")

    with pytest.raises(LookupError) as raised:
        fs.launch(program, 1, local)
    assert "in program" in "".join(raised.value.__cause__.__notes__)


class TwoThings(ValueError):
    """Goes into a pickle and does not come out: it needs two things and keeps one text."""

    def __init__(self, one, two):
        super().__init__(f"{one.upper()} and {two.upper()}")
        self.two = two

    def __str__(self):
        return f"{self.args[0]}, {self.two}"


def test_an_exception_with_a_constructor_of_its_own_keeps_rank_and_text(launch):
    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            raise TwoThings("this", "that")

    with pytest.raises(fs.WorkerError) as raised:
        launch(program, 2)
    assert str(raised.value) == "rank 1 raised TwoThings: THIS and THAT, that"
    assert raised.value.rank == 1


class SlowToSend(ValueError):
    def __reduce__(self):
        time.sleep(2)
        return SlowToSend, self.args


def test_who_takes_long_to_say_what_it_raised_is_not_taken_for_lost(launch):
    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            raise SlowToSend("too bad")
        comm.barrier()

    with pytest.raises(fs.WorkerError, match="rank 1 raised SlowToSend: too bad"):
        launch(program, 2)


def test_an_exception_in_the_simulator_keeps_type_and_attributes():
    def program(comm):
        raise TwoThings("this", "that")

    with pytest.raises(TwoThings, match="rank 0 raised TwoThings") as raised:
        fs.launch(program, 1)
    assert raised.value.two == "that"


class Odd(Exception):
    """Cannot be made from one message, nor sent to another process."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.lock = threading.Lock()


def test_exceptions_of_any_kind_arrive(launch):
    def program(comm):
        raise Odd("this", "that")

    with pytest.raises(fs.WorkerError) as raised:
        launch(program, 1)
    assert str(raised.value) == "rank 0 raised Odd: this and that"


def test_sys_exit_in_a_worker_does_not_end_the_caller(launch):
    with pytest.raises(fs.WorkerError, match="rank 1 raised SystemExit"):
        launch(lambda comm: sys.exit(3) if comm.rank == 1 else comm.barrier(), 2)


def test_deadlock_names_each_rank_its_call_and_its_line(backend, failure):
    def program(comm):
        failure.strike()
        if comm.rank == 0:
            comm.recv(torch.zeros(1), 1)
        elif comm.rank == 1:
            comm.recv(torch.zeros(1), 2)
        elif comm.rank == 2:
            comm.barrier()

    with pytest.raises(fs.DeadlockError) as raised:
        fs.launch(program, 4, backend)
    assert failure.since() < SOON
    lines = str(raised.value).splitlines()
    here = Path(__file__).name
    assert f"rank 0 waits in recv from rank 1 at {__file__}" in lines[1]
    assert "rank 1 waits in recv from rank 2" in lines[2]
    assert "rank 2 waits in" in lines[3]
    assert all(here in line for line in lines[1:4])
    assert lines[4].strip() == "rank 3 has ended its program"


def test_a_worker_that_stops_stepping_is_a_deadlock_not_a_hang(backend):
    def program(comm):
        model = torch.nn.Linear(1, 1)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.SyncSGD())
        for _ in range(3 if comm.rank else 5):
            loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            worker.step(loss)

    with pytest.raises(fs.DeadlockError, match=r"rank 0 waits in all_reduce.*\n.*rank 1 has ended"):
        fs.launch(program, 2, backend)


def test_a_lock_that_is_never_given_back_is_a_deadlock(launch):
    def program(comm):
        shared = comm.shared("x", torch.zeros(1))
        if comm.rank == 0:
            with shared.lock():
                comm.send(torch.zeros(1), 1)
                comm.barrier()
        else:
            comm.recv(torch.zeros(1), 0)
            with shared.lock():
                comm.barrier()

    with pytest.raises(fs.DeadlockError, match="lock of shared 'x'"):
        launch(program, 2)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            lambda comm: comm.all_reduce(torch.zeros(2)),
            lambda comm: comm.all_reduce(torch.zeros(3)),
            r"rank \d called all_reduce\(sum\) of . × torch.float32, rank \d called "
            r"all_reduce\(sum\) of . × ",
        ),
        (
            lambda comm: comm.all_reduce(torch.zeros(2)),
            lambda comm: comm.all_reduce(torch.zeros(2), op="max"),
            r"rank \d called all_reduce",
        ),
        (lambda comm: comm.all_reduce(torch.zeros(2)), lambda comm: comm.barrier(), r"barrier"),
        (
            lambda comm: comm.broadcast(torch.zeros(2), 0),
            lambda comm: comm.broadcast(torch.zeros(2), 1),
            r"broadcast from \d",
        ),
        (
            lambda comm: comm.broadcast(torch.zeros(2), 0),
            lambda comm: comm.broadcast(torch.zeros(2, dtype=torch.int64), 0),
            r"torch.int64",
        ),
        (
            lambda comm: comm.all_gather(torch.zeros(2)),
            lambda comm: comm.all_gather(torch.zeros(2).double()),
            r"torch.float64",
        ),
    ],
)
def test_mismatched_collectives_are_an_error(backend, first, second, message, failure):
    def program(comm):
        failure.strike()
        (first if comm.rank != 1 else second)(comm)

    with pytest.raises(fs.MismatchError, match=message):
        fs.launch(program, 3, backend)
    assert failure.since() < SOON


@pytest.mark.cluster
@pytest.mark.parametrize("where", ["computing", "all_reduce", "lock"])
def test_a_killed_worker_is_lost_soon(where, failure):
    """With a server of its own, so that the whole life of the launch is seen to leave nothing."""

    def program(comm):
        model = torch.nn.Linear(1, 1)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.LocalSGD(period=1)
        )
        shared = comm.shared("x", torch.zeros(1))
        for _ in range(7):
            loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            worker.step(loss)
        if comm.rank != 1:
            if where == "lock":
                time.sleep(0.2)
                with shared.lock():
                    comm.barrier()
            elif where == "all_reduce":
                comm.all_reduce(torch.zeros(10))
            else:
                time.sleep(30)
        if where == "lock":
            shared.lock().__enter__()
        failure.strike()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(fs.WorkerLost, match="rank 1 was killed by SIGKILL after step 7") as raised:
        fs.launch(program, 3, "local")
    assert failure.since() < SOON
    assert (raised.value.rank, raised.value.exit_code, raised.value.step) == (1, -signal.SIGKILL, 7)


def test_a_worker_that_leaves_by_the_back_door_is_lost(local):
    with pytest.raises(fs.WorkerLost, match="rank 1 exited with 5 after step 0"):
        fs.launch(lambda comm: os._exit(5) if comm.rank == 1 else comm.barrier(), 2, local)


def test_a_kept_server_serves_on_after_failures(local):
    for _ in range(3):
        with pytest.raises(fs.WorkerLost):
            fs.launch(lambda comm: os._exit(1), 3, local)
        assert fs.launch(lambda comm: int(comm.all_reduce(torch.tensor(1))), 3, local) == [3, 3, 3]


class Unreadable:
    """Can be sent, and not be read."""

    def __reduce__(self):
        return int, ("not a number",)


def test_a_result_that_cannot_be_read_is_said(local):
    with pytest.raises(
        fs.FlockstepError, match="what rank 0 returned cannot be read here: invalid literal"
    ):
        fs.launch(lambda comm: Unreadable(), 1, local)


@pytest.mark.cluster
def test_a_kept_server_that_was_killed_is_replaced():
    with fs.LocalProcesses() as kept:
        server = fs.launch(lambda comm: os.getppid(), 1, kept)[0]
        with pytest.raises(fs.WorkerLost, match="server process"):
            fs.launch(lambda comm: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(30)), 2, kept)
        assert fs.launch(lambda comm: os.getppid(), 1, kept)[0] != server


def test_finally_blocks_run_when_others_fail(launch, tmp_path):
    def program(comm):
        if comm.rank == 0:
            for peer in (1, 2):
                comm.recv(torch.zeros(1), peer)
            raise ValueError
        try:
            comm.send(torch.zeros(1), 0)
            comm.barrier()
        finally:
            (tmp_path / str(comm.rank)).touch()

    with pytest.raises(ValueError, match="rank 0"):
        launch(program, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("name", ["sim", pytest.param("local", marks=pytest.mark.cluster)])
@pytest.mark.parametrize("what", ["waiting", "stepping", "computing"])
def test_ctrl_c_ends_the_run(name, what, failure):
    failure.strike()

    def program(comm):
        comm.elapse(0.0)
        failure.path.with_name(f"up-{comm.rank}").touch()
        while what == "stepping":
            comm.elapse()
        while what == "computing":
            sum(range(1000))
        if comm.rank == 1:
            time.sleep(1.2)  # busy, so that the other's waiting is not a deadlock
        comm.barrier()

    def interrupt():
        while not any(failure.path.parent.glob("up-*")):
            time.sleep(0.01)
        failure.strike()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fs.launch(program, 2, name)
    assert failure.since() < SOON
    thread.join()


@pytest.mark.parametrize("name", ["sim", pytest.param("local", marks=pytest.mark.cluster)])
def test_ctrl_c_again_and_again_is_one_ctrl_c(name, tmp_path):
    """While workers end, others are ignored; afterwards it works as before."""
    busy = 1 if name == "sim" else 2  # before their first step, simulated workers run one by one

    def program(comm):
        (tmp_path / f"up-{comm.rank}").touch()
        try:
            while True:
                time.sleep(0.001)
        finally:
            time.sleep(0.3)
            (tmp_path / f"down-{comm.rank}").touch()

    def interrupt():
        while len(list(tmp_path.glob("up-*"))) < busy:
            time.sleep(0.01)
        for _ in range(4):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fs.launch(program, 2, name)
    thread.join()
    if name == "local":  # the simulator interrupts what takes too long on its way out, too
        assert len(list(tmp_path.glob("down-*"))) == busy
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_again_and_again_is_one_line_of_the_command(flockstep):
    """The command interrupts once, and then has Python end in peace."""
    threads = threading.active_count()

    def interrupt():
        while threading.active_count() < threads + 3:  # this one, and two simulated workers
            time.sleep(0.01)
        for _ in range(4):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.005)

    thread = threading.Thread(target=interrupt)
    thread.start()
    done = flockstep("run", "digits-mlp", "sync_sgd", "--workers", "2", "--epochs", "10000")
    thread.join()
    assert done.returncode == 130
    assert done.stderr.strip() == "flockstep: interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_comm_is_of_no_use_after_its_launch():
    def program(comm):
        return comm, comm.shared("x", torch.zeros(1))

    comm, shared = fs.launch(program, 2)[0]
    for call in (comm.barrier, comm.elapse, shared.read, lambda: comm.split(0)):
        with pytest.raises(fs.FlockstepError, match="the launch of this comm has ended"):
            call()


def test_more_simulated_workers_than_threads_are_refused(monkeypatch):
    with pytest.raises(fs.InvalidField, match=r"'workers' must be at most \d+ .*100000000"):
        fs.launch(lambda comm: None, 100_000_000)

    started, start = [], threading.Thread.start

    def start_some(thread):
        if len(started) == 30:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(fs.InvalidField, match="'workers' must be at most 30 .* gives no more"):
        fs.launch(lambda comm: pytest.fail("a program was started"), 100)
    monkeypatch.undo()
    assert fs.launch(lambda comm: comm.rank, 40) == list(range(40))


SCRIPT = """
import sys, time
import flockstep as fs
from pathlib import Path

def program(comm):
    Path(sys.argv[1], f"up-{comm.rank}").touch()
    if comm.rank:
        comm.barrier()
    while True:
        time.sleep(0.01)

if __name__ == "__main__":
    fs.launch(program, 3, backend="local")
"""


@pytest.mark.cluster
def test_a_script_that_is_killed_takes_its_workers_with_it(tmp_path):
    """By Ctrl-C, SIGTERM and SIGKILL: three at a time, since loading torch takes a while."""
    script, started = tmp_path / "script.py", []
    script.write_text(SCRIPT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = subprocess.Popen(
            [sys.executable, str(script), str(folder)], stderr=subprocess.PIPE, text=True
        )
        started.append((process, number, folder))
    for process, number, folder in started:
        while len(list(folder.glob("up-*"))) < 3 and process.poll() is None:
            time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 4  # the server and three workers
        process.send_signal(number)
        _, alive = psutil.wait_procs(family, timeout=SOON)
        _, errors = process.communicate(timeout=SOON)
        # An orphan that has ended is a zombie until the system's first process collects it.
        assert not [
            one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
        ]
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in errors


def test_what_cannot_be_sent_back_is_said(local):
    with pytest.raises(fs.FlockstepError, match="rank 0 cannot send what its program returned"):
        fs.launch(lambda comm: threading.Lock(), 1, local)


def test_what_cannot_be_sent_out_is_an_error_at_once(local):
    lock = threading.Lock()
    with pytest.raises(
        fs.InvalidField, match=r"'program\.lock' must be picklable, .* \(got <unlocked"
    ):
        fs.launch(lambda comm: lock, 1, local)


def test_a_thousand_workers_fail_together_quickly():
    def program(comm):
        comm.barrier()
        if comm.rank == 500:
            program.at = time.monotonic()
            raise ValueError("one of a thousand")
        comm.barrier()

    with pytest.raises(ValueError, match="rank 500"):
        fs.launch(program, 1000)
    assert time.monotonic() - program.at < SOON


@pytest.mark.cluster
def test_workers_interrupted_on_their_way_out_leave_quietly(monkeypatch):
    # An exception that escapes from a thread is a warning, and warnings are errors here.
    monkeypatch.setattr("flockstep.backends.sim.backend.LOOK_SECONDS", 1e-4)

    def program(comm):
        comm.barrier()
        if comm.rank == 50:
            raise ValueError("one of a hundred")
        comm.barrier()

    for _ in range(30):
        with pytest.raises(ValueError, match="rank 50"):
            fs.launch(program, 100)
