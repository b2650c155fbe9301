"""Fixtures: every backend under one name, and a check that no test leaves anything behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest
import sklearn.datasets  # noqa: F401  sets environment variables when it is first imported
import tests.strategies.harness
import torch
import torch._dynamo  # so does this
from tests.support.core_only import CoreOnly
from tests.support.left_behind import (  # noqa: F401  taken as they are
    KEPT,
    nothing_is_left_behind,
    pytest_configure,
)
from tests.support.ray_fixture import kept_ray
from tests.support.torchrun_session import RANKS, TorchrunSession
from tests.support.wall_clock import tried_again

import flockstep as fs
from flockstep.cli import main

Launch = Callable[..., list[Any]]

# Some virtual machines offer AMX and then refuse it: torch would end in an illegal instruction as
# soon as it multiplies in half precision. It reads this before its first such operation.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

if "PYTEST_XDIST_WORKER" in os.environ:
    # There is one process of tests per core: with more threads they wait for each other.
    torch.set_num_threads(1)

# Files about workers on several hosts and what carries them, workers that are killed, clocks that
# go by themselves, and programs that are started as a user would.
CLUSTER_FILES = {
    "test_checkpoints_on_clusters.py",
    "test_cluster_parts.py",
    "test_examples.py",
    "test_frozen_workers.py",
    "test_jobs.py",
    "test_left_behind.py",
    "test_local.py",
    "test_lost_workers.py",
    "test_on_the_clock.py",
    "test_other_systems.py",
    "test_ray.py",
    "test_readme.py",
    "test_several_hosts.py",
    "test_wire.py",
}

# Those of them, and tests elsewhere, that need the machine for themselves: who is killed or stands
# still must be missed within seconds, and others' clocks must not wait for a core.
ALONE = {
    "test_failures.py",
    "test_frozen_workers.py",
    "test_jobs.py",
    "test_left_behind.py",
    "test_local.py",
    "test_lost_workers.py",
    "test_on_the_clock.py",
    "test_ray.py",
    "test_several_hosts.py",
    "test_wire.py",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as `cluster` what takes many processes and minutes: the files above, all on torchrun and
    Ray, and every test on local processes but those of the contract. Single tests elsewhere carry
    the mark themselves.

    `make test` runs the others, the contract in the simulator and on local processes among them;
    `make test-cluster` runs these, first those that can share the machine, then one after the other
    those that are marked as `alone`.

    Where xdist divides the tests among processes, one of them has all of torchrun's and Ray's: the
    others need not start the eight processes of the one and the dozen of the other."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        named = {*item.fixturenames, *(value for value in parameters if isinstance(value, str))}
        is_contract = item.path.parent.name == "contract"
        is_far = item.path.name in CLUSTER_FILES or named & {"torchrun", "ray"}
        if is_far or (named & set(KEPT) and not is_contract):
            item.add_marker(pytest.mark.cluster)
        if item.path.name in ALONE or item.get_closest_marker("wall_clock"):
            item.add_marker(pytest.mark.alone)
        if named & {"torchrun", "ray"}:
            item.add_marker(pytest.mark.xdist_group("torchrun and Ray"))
        if item.get_closest_marker("wall_clock"):
            item.obj = tried_again(item.obj)


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
) -> Iterator[Callable[..., Done]]:
    """The command in this process, which has torch loaded, and goes on after Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr("sys.argv", ["flockstep", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code, *capfd.readouterr())

    yield run
    signal.signal(signal.SIGINT, before)


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
