"""Fixtures: every backend under one name, and a check that no test leaves anything behind."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import sklearn.datasets  # noqa: F401  these two set environment variables when they are first imported
import tests.strategies.harness
import torch
import torch._dynamo
from tests.support.core_only import CoreOnly
from tests.support.ray_fixture import kept_ray
from tests.support.torchrun_session import RANKS, TorchrunSession

import flockstep as fs
from flockstep.cli import main

Launch = Callable[..., list[Any]]

KEPT = [
    "local",
    "torchrun",
    "ray",
]  # backends whose processes are kept for the whole session, to be fast


@pytest.fixture(scope="session")
def local() -> Iterator[fs.LocalProcesses]:
    """Local processes with a server that is kept for the whole session, to be fast."""
    with fs.LocalProcesses() as backend:
        yield backend


@pytest.fixture(scope="session")
def torchrun() -> Iterator[TorchrunSession]:
    """A torchrun of eight processes, kept for the whole session."""
    session = TorchrunSession()
    # All that its processes load and start for a first run is there afterwards.
    session.run(fs.Launch(lambda comm: None, RANKS))
    yield session
    session.close()


@pytest.fixture(scope="session")
def ray() -> Iterator[fs.Ray]:
    """Ray on this machine, with workers that are kept for the whole session."""
    with kept_ray() as backend:
        yield backend


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def flockstep(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The command in this process, which has torch loaded."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr("sys.argv", ["flockstep", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def refused(flockstep: Callable[..., Done]) -> Callable[[list[str], str], None]:
    """Bad input is one line on stderr that begins like this, and nothing on stdout."""

    def check(arguments: list[str], message: str) -> None:
        done = flockstep(*arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith(f"flockstep: {message}")
        assert len(done.stderr.splitlines()) == 1

    return check


@pytest.fixture(autouse=True, scope="module")
def programs_travel_by_value(request: pytest.FixtureRequest) -> None:
    """Workers need not import a test module, and pytest with it, to run a function of it."""
    for module in (request.module, tests.strategies.harness):
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)


def _launcher(request: pytest.FixtureRequest, name: str) -> Launch:
    backend: Any = {
        "sim": fs.Simulator,
        "sim-2-lanes": lambda: fs.Simulator(lanes=2),
        "core-only": CoreOnly,
        **{kept: lambda kept=kept: request.getfixturevalue(kept) for kept in KEPT},
    }[name]()
    return lambda program, workers, **options: fs.launch(program, workers, backend, **options)


@pytest.fixture(params=["sim", "sim-2-lanes", "core-only", *KEPT])
def launch(request: pytest.FixtureRequest) -> Launch:
    """`fs.launch` on each backend in turn, and on one that supplies only the required core."""
    return _launcher(request, request.param)


@pytest.fixture(params=["sim", *KEPT])
def backend(request: pytest.FixtureRequest) -> fs.Backend:
    return fs.Simulator() if request.param == "sim" else request.getfixturevalue(request.param)


def _descendants(ancestor: int) -> set[int]:
    """All processes below `ancestor` but those of Ray, which replaces workers that are killed when
    it likes.

    One look at every process of the machine: psutil takes one for each, a third of a second a test
    beside Ray."""
    children: dict[int, list[int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with (
            suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/{pid}/stat", "rb") as stat,
        ):
            name, _, rest = stat.read().rpartition(b")")
            if b"raylet" not in name:
                children.setdefault(int(rest.split(None, 2)[1]), []).append(int(pid))
    found: set[int] = set()
    ask = [ancestor]
    while ask:
        new = children.get(ask.pop(), [])
        found.update(new)
        ask += new
    return found


def _belongings() -> dict[str, Any]:
    """What a test could leave behind: threads, processes, shared memory, open files and sockets,
    temporary files.
    """
    return {
        "threads": set(threading.enumerate()),
        "processes": _descendants(os.getpid()),
        # Semaphores of the multiprocessing module, which this library does not use, come and go
        # with other programs.
        "shared memory": {
            path.name for path in Path("/dev/shm").glob("*") if not path.name.startswith("sem.mp-")
        },
        "descriptors": psutil.Process().num_fds(),
        "temporary files": {path.name for path in Path(tempfile.gettempdir()).glob("*flockstep*")},
        "environment": dict(os.environ, PYTEST_CURRENT_TEST=""),
        "intra-op threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    parameters = getattr(request.node, "callspec", None)
    used = {*request.fixturenames, *map(str, parameters.params.values() if parameters else ())}
    for kept in KEPT:
        if kept in used:
            request.getfixturevalue(kept)  # its processes belong to the session, not to the test
    before = _belongings()
    if "ray" in used:
        del before[
            "descriptors"
        ]  # Ray opens connections to its workers when it likes, and keeps them
    yield
    deadline = time.monotonic() + 2
    while (
        any((after := _belongings())[what] != was for what, was in before.items())
        and time.monotonic() < deadline
    ):
        time.sleep(
            0.001
        )  # a simulated worker's thread needs no more, and there are thousands of tests
    for what, was in before.items():
        now = after[what]
        if isinstance(was, set):
            assert not now - was, f"the test left {what} behind: {now - was}"
        else:
            assert now == was, f"the test changed {what}"
