"""A check that no test leaves anything behind, which looks only at what is this run's own.

A pytest plugin: `tests/conftest.py` takes both parts of it, and so can any run with
`-p tests.support.left_behind`."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

# Backends whose processes are kept for the whole session, to be fast.
KEPT = ["local", "torchrun", "ray"]

# How long a test's threads, processes and files may take to go after its end.
PATIENCE_SECONDS = 20.0

SHARED_MEMORY = Path("/dev/shm")
PR_SET_CHILD_SUBREAPER = 36  # of Linux


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a temporary folder of its own, which all that it starts inherits.

    With xdist each of the run's processes has one, in the folder of the run. Names are short:
    the sockets of Ray lie deep in the folder, and their paths may have 107 bytes."""
    changes = pytest.MonkeyPatch()
    config.add_cleanup(changes.undo)
    if hasattr(config, "workerinput"):
        folder = Path(tempfile.gettempdir(), config.workerinput["workerid"].removeprefix("gw"))
        folder.mkdir()
    else:
        # pytest keeps `tmp_path` of the last runs, for whoever wants to look, so it lies outside.
        if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
            changes.setenv("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        folder = Path(tempfile.mkdtemp(prefix="fs"))
        config.add_cleanup(partial(shutil.rmtree, folder))
    changes.setenv("TMPDIR", str(folder))
    _adopt_orphans()
    changes.setattr(tempfile, "tempdir", str(folder))


def _adopt_orphans() -> None:
    """Make this process the parent of processes whose own parent is gone, so that they are found
    among its descendants.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _descendants(ancestor: int) -> set[int]:
    """All processes below `ancestor` but those of Ray, which replaces workers that are killed when
    it likes, and those that have ended: nobody waits for an orphan's end.

    One look at every process of the machine: psutil takes one for each, a third of a second per
    test beside Ray."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            name, _, rest = (process / "stat").read_bytes().rpartition(b")")
            state, parent = rest.split(None, 2)[:2]
            if b"raylet" not in name and state != b"Z":
                children.setdefault(int(parent), []).append(int(process.name))
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
        "shared memory": set(SHARED_MEMORY.iterdir()),
        "descriptors": _descriptors(),
        "temporary files": set(Path(tempfile.gettempdir()).iterdir()),
        "environment": dict(os.environ, PYTEST_CURRENT_TEST=""),
        "intra-op threads": torch.get_num_threads(),
    }


def _descriptors() -> int:
    """How many files, pipes and sockets are open; of a process that is connected to Ray without
    sockets: Ray opens and closes connections to its workers when it likes, also in a test that has
    nothing to do with it.
    """
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found.append(str(descriptor.readlink()))
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        found = [target for target in found if not target.startswith("socket:")]
    # Matplotlib keeps the fonts open that it has drawn with.
    return len([target for target in found if "/mpl-data/fonts/" not in target])


def _is_ours(memory: Path) -> bool:
    """Whether a piece of shared memory with a name is this run's.

    A file does not tell who made it. It is another's if it belongs to another user, or if a process
    that is not below this one has it mapped or open. What nobody holds any more is taken for ours:
    a process of ours that is gone can have left it, and that is the leak to be found."""
    try:
        if memory.stat().st_uid != os.getuid():
            return False
    except FileNotFoundError:
        return False
    ours = {os.getpid(), *_descendants(os.getpid())}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) in ours:
            continue
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if str(memory) in (process / "maps").read_text():
                return False
            if any(held.readlink() == memory for held in (process / "fd").iterdir()):
                return False
    return True


def _left(before: dict[str, Any]) -> str | None:
    """What is there now that was not there before, in words; None: nothing."""
    now = _belongings()
    for what, was in before.items():
        if not isinstance(was, set):
            if now[what] != was:
                return f"the test changed {what}"
            continue
        new = now[what] - was
        if what == "shared memory":
            new = {memory for memory in new if _is_ours(memory)}
        if new:
            return f"the test left {what} behind: {', '.join(sorted(map(str, new)))}"
    return None


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    parameters = getattr(request.node, "callspec", None)
    used = {*request.fixturenames, *map(str, parameters.params.values() if parameters else ())}
    for kept in KEPT:
        if kept in used:
            request.getfixturevalue(kept)  # its processes belong to the session, not to the test
    before = _belongings()
    yield
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (left := _left(before)) and time.monotonic() < deadline:
        # A simulated worker's thread needs no more, and there are thousands of tests.
        time.sleep(0.001)
    assert not left, left
