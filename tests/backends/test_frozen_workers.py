"""Processes that live and do not move: workers, and the launchers that others count on.

They are stopped as Ctrl-Z would, and some of them brought back to life when it is too late."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
import torch
from tests.support.cluster_service import Serving

import flockstep as fs
from flockstep.backends.cluster.control_channel import ControlChannel
from flockstep.backends.heartbeat import Heartbeat, Watchdog

PATIENCE = 2.0

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["local", "torchrun", "ray"])
def impatient(request, monkeypatch):
    backend = request.getfixturevalue(request.param)
    monkeypatch.setattr(backend, "patience", PATIENCE)
    return backend


@pytest.fixture
def impatient_torchrun(torchrun, monkeypatch):
    monkeypatch.setattr(torchrun, "patience", PATIENCE)
    return torchrun


def stop(process):
    os.kill(process, signal.SIGSTOP)
    time.sleep(0.05)  # signals to oneself may take a moment to arrive


def processes_of_all(comm):
    """By rank: the process of the worker, and that of its launcher, behind the fork server."""
    own = torch.tensor([os.getpid(), psutil.Process().parents()[1].pid])
    return [each.tolist() for each in comm.all_gather(own)]


def assert_frozen(loss, rank):
    assert isinstance(loss, fs.WorkerLost)
    assert loss.rank == rank
    assert loss.frozen_seconds >= PATIENCE
    assert f"rank {rank} has not moved for {loss.frozen_seconds:.1f} s after step" in str(loss)


def wait_for_the_end_of(process):
    deadline = time.monotonic() + 30
    while psutil.pid_exists(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(process)


# --- workers --------------------------------------------------------------------------------------


def test_a_worker_that_goes_on_in_time_is_unharmed(impatient):
    def program(comm):
        processes = processes_of_all(comm)
        if comm.rank == 1:
            stop(os.getpid())
        if comm.rank == 0:
            time.sleep(PATIENCE / 3)
            os.kill(processes[1][0], signal.SIGCONT)
        time.sleep(PATIENCE)
        return comm.all_reduce(torch.tensor(1.0)).item()

    assert fs.launch(program, 3, impatient, on_failure="continue") == [3.0] * 3


def test_the_others_go_on_without_a_frozen_worker_and_with_slow_ones(impatient, tmp_path):
    def program(comm):
        comm.elapse()
        slow_until = time.monotonic() + 1.5 * PATIENCE
        if comm.rank == 0:
            matrix = torch.eye(300)
            while time.monotonic() < slow_until:
                matrix = matrix @ matrix
        if comm.rank == 1:
            (tmp_path / "process").write_text(str(os.getpid()))
            stop(os.getpid())
        if comm.rank == 2:
            time.sleep(slow_until - time.monotonic())
        return comm.all_reduce(torch.tensor(comm.rank + 1.0)).item(), comm.members

    first, loss, last = fs.launch(program, 3, impatient, on_failure="continue")
    assert first == last == (4.0, (0, 2))
    assert_frozen(loss, 1)
    assert loss.step == 1
    wait_for_the_end_of(int((tmp_path / "process").read_text()))


@pytest.mark.parametrize("impatient", ["local", "torchrun"], indirect=True)
def test_a_frozen_worker_ends_a_run_that_must_stop(impatient, tmp_path):
    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            (tmp_path / "process").write_text(str(os.getpid()))
            stop(os.getpid())
        comm.barrier()

    with pytest.raises(fs.WorkerLost) as raised:
        fs.launch(program, 3, impatient)
    assert_frozen(raised.value, 1)
    wait_for_the_end_of(int((tmp_path / "process").read_text()))


def test_a_worker_is_not_frozen_while_a_call_keeps_its_heartbeat_waiting(local, monkeypatch):
    """Such a call holds Python's lock, as a large power does; the system sees that it computes."""
    monkeypatch.setattr(local, "patience", 1.0)

    def program(comm):
        exponent, seconds = 500_000, 0.0
        while seconds < 1.5:
            exponent *= 2
            began = time.monotonic()
            _ = 3**exponent
            seconds = time.monotonic() - began
        return True

    assert fs.launch(program, 1, local) == [True]


# --- launchers ------------------------------------------------------------------------------------


def test_a_host_that_comes_back_to_life_finds_itself_lost_and_changes_nothing(impatient_torchrun):
    def program(comm):
        value = comm.shared("value", torch.zeros(9))
        worker, launcher = processes_of_all(comm)[1]
        if comm.rank == 1:
            stop(launcher)
            stop(worker)
            while True:
                value.add(torch.ones(9))
        while 1 in comm.members:
            time.sleep(0.05)
            comm.elapse()
        comm.barrier()
        value.write(torch.full((9,), 5.0))
        if comm.rank == 0:
            time.sleep(0.5)
            for process in (worker, launcher):
                os.kill(process, signal.SIGCONT)
            time.sleep(0.5)
        comm.barrier()
        return value.read().tolist()

    results = fs.launch(program, 3, impatient_torchrun, on_failure="continue")
    assert results[0] == results[2] == [5.0] * 9
    assert_frozen(results[1], 1)
    went_well, revived, _ = impatient_torchrun.outcomes[1]
    assert not went_well
    assert_frozen(revived, 1)


def test_a_frozen_coordinator_is_lost_to_all_others(impatient_torchrun, tmp_path):
    def program(comm):
        launcher = processes_of_all(comm)[0][1]
        if comm.rank == 0:
            (tmp_path / "launcher").write_text(str(launcher))
            stop(launcher)
        time.sleep(60)

    def revive():
        while not (tmp_path / "launcher").exists():
            time.sleep(0.05)
        time.sleep(2.5 * PATIENCE)
        os.kill(int((tmp_path / "launcher").read_text()), signal.SIGCONT)

    thread = threading.Thread(target=revive)
    thread.start()
    with pytest.raises(fs.WorkerLost):
        fs.launch(program, 3, impatient_torchrun)
    thread.join()
    for went_well, error, _ in impatient_torchrun.outcomes[1:]:
        assert not went_well
        assert "the launcher of rank 0 has not moved for" in str(error)
        assert error.frozen_seconds >= PATIENCE


def test_a_worker_gives_a_coordinator_up_that_does_not_move():
    """Workers on Ray have no launcher of their own that would notice."""
    served = Serving()
    with served.service:
        control = ControlChannel(served.join("worker", 0), 0, patience=0.5)
        with Heartbeat(0.5, served.coordinator.beat):
            control.pause(1.0)
            assert control.await_loss((1,), 1.0) is None
        with pytest.raises(fs.WorkerLost, match="the launcher of the run has not moved for"):
            control.ask("receive", "recv from rank 1", peer=1, group="world")
        control.close()


# --- who watches ----------------------------------------------------------------------------------


def test_a_watchdog_that_was_asleep_itself_blames_nobody():
    watchdog = Watchdog(0.5)
    looks = []
    for pause in (0.1, 3.0, *[0.1] * 8):
        time.sleep(pause)
        looks.append(watchdog.look(lambda: {0: "the same", 1: time.monotonic()}))
    assert looks[1] == {}
    assert looks[-1].keys() == {0}
    assert looks[-1][0] < 3.0


def test_without_patience_nobody_is_watched():
    beats: list[int] = []
    with Heartbeat(None, lambda: beats.append(1)):
        assert Watchdog(None).look(lambda: pytest.fail("nobody is to be asked")) == {}
    assert beats == []


@pytest.mark.parametrize("backend", [fs.LocalProcesses, fs.Torchrun, fs.Ray])
@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (0, "be above 0 and finite"),
        (-1.5, "be above 0 and finite"),
        (float("inf"), "be above 0 and finite"),
        ("60", "be a number"),
        (True, "be a number"),
    ],
)
def test_patience_is_a_positive_number_or_none(backend, value, rule):
    with pytest.raises(fs.InvalidField, match=f"'patience' must {rule} "):
        backend(patience=value)
    assert backend(patience=None).patience is None
    assert "patience=300.0" in repr(backend())


def test_patience_is_set_where_it_belongs():
    for backend in ("sim", fs.Simulator(), fs.LocalProcesses()):
        with pytest.raises(fs.InvalidField, match="'patience' must be (left out|set on)"):
            fs.launch(lambda comm: None, 2, backend, patience=60)
