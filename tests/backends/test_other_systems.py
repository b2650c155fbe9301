"""Where torch runs, the library can be imported and the simulator trains. What needs Linux says so.

Another system is made from this one: what it does not have is taken away before the library is
imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flockstep.data.files import LOCKED_BYTE

# What others bring is loaded first: their own ways on other systems would not work here.
HIDE = """
import os, select, signal, socket, sys
import sklearn.datasets, torch._dynamo

def take_away(module, *names):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

def forbid(*modules):
    for module in modules:
        sys.modules[module] = None

take_away(socket, "TCP_KEEPIDLE", "TCP_USER_TIMEOUT")
take_away(os, "memfd_create", "MFD_CLOEXEC", "eventfd", "sched_getaffinity", "sched_setaffinity")
take_away(os, "pidfd_open", "O_TMPFILE", "posix_fallocate")
take_away(select, "epoll")
sys.platform = "darwin"
"""

HIDE_MORE = """
forbid("fcntl", "resource", "termios", "pwd", "grp", "syslog")
# Torch need not be built with what workers on several hosts talk over.
forbid("torch._C._distributed_c10d")
take_away(socket, "TCP_KEEPINTVL", "TCP_KEEPCNT", "send_fds", "recv_fds", "AF_UNIX", "socketpair")
take_away(os, "fork", "getppid", "killpg", "wait", "waitpid", "set_blocking", "uname")
take_away(select, "poll")
take_away(signal, "SIGKILL", "SIGCHLD", "set_wakeup_fd")
sys.platform = "win32"
"""

SYSTEMS = {"darwin": HIDE, "win32": HIDE + HIDE_MORE}


def run(system: str, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SYSTEMS[system] + program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_simulator_trains_and_the_other_backends_say_what_they_need(system):
    said = run(
        system,
        """
import flockstep as fs

result = fs.run("digits-mlp", fs.EASGD(2), workers=2, steps=4)
print(result.metrics["steps"], len(fs.launch(lambda comm: comm.rank, 3)))

# A run for Linux can be described anywhere.
spec = fs.RunSpec("digits-mlp", fs.LocalSGD(8), workers=4, backend="local")
print(fs.RunSpec.from_toml(spec.to_toml()) == spec)

for backend in ("local", "torchrun", "ray"):
    try:
        fs.launch(print, 2, backend=backend)
    except fs.InvalidField as error:
        print(error)

for backend in (fs.LocalProcesses, fs.Torchrun, fs.Ray):
    try:
        backend()
    except fs.InvalidField as error:
        print(error)
""",
    ).splitlines()
    needs = [
        f"backend '{name}' needs Linux (this is {system}): use backend='sim'"
        for name in ("local", "torchrun", "ray")
    ]
    assert said == ["4 3", "True", *needs, *needs]


WINDOWS_FILES = """
import types

def locking(descriptor, mode, count):
    try:
        os.lockf(descriptor, os.F_TLOCK, count)
    except BlockingIOError as error:
        raise PermissionError(*error.args) from None

sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)

from pathlib import Path
from flockstep.data.files import Partial
from flockstep.errors import DataError

try:
    Partial(Path("busy.bin"))
except DataError as error:
    print(error)

with Partial(Path("whole.bin")) as part:
    part.write(b"abc")
    print(part.size, part.md5())
    part.settle()
with Partial(Path("unwanted.bin")) as part:
    part.write(b"abc")
    part.discard()
with Partial(Path("empty.bin")):
    pass
with Partial(Path("begun.bin")) as part:
    part.write(b"ab")
"""


def test_on_windows_a_file_on_its_way_has_one_writer(tmp_path, monkeypatch):
    """`msvcrt.locking` locks bytes from where the file stands. So does `lockf`, which stands in."""
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "busy.bin.part").open("wb") as busy:
        busy.seek(LOCKED_BYTE)
        os.lockf(busy.fileno(), os.F_TLOCK, 1)
        said = run("win32", WINDOWS_FILES).splitlines()
    assert said == [
        "busy.bin.part must be written by one program at a time (another does)",
        "3 900150983cd24fb0d6963f7d28e17f72",
    ]
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert content == {"busy.bin.part": b"", "whole.bin": b"abc", "begun.bin.part": b"ab"}
