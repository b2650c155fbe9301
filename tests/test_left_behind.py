"""The check that no test leaves anything behind: it finds every kind of leak, and nothing that is
another program's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.support import left_behind

ROOT = Path(__file__).parents[1]
SECONDS = 100.0  # for a few programs to load torch, on a busy machine

LEAKS = """
import os, subprocess, sys, tempfile, threading, time
import numpy
import torch
from tests.support import left_behind

left_behind.PATIENCE_SECONDS = 0.2
kept = []

def shared_memory():
    path = left_behind.SHARED_MEMORY / f"flockstep-test-{os.getpid()}"
    path.write_bytes(bytes(4096))
    return path

def test_threads():
    threading.Thread(target=time.sleep, args=[1.0], daemon=True).start()

def test_processes():
    kept.append(subprocess.Popen(["sleep", "100"]))

def test_the_end_of_processes():
    process = kept.pop()
    process.kill()
    process.wait()

def test_processes_whose_parent_is_gone():
    code = "import subprocess; print(subprocess.Popen(['sleep', '100'], stdout=-3, stderr=-3).pid)"
    done = subprocess.run([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, check=True)
    kept.append(int(done.stdout))

def test_the_end_of_processes_whose_parent_is_gone():
    os.kill(kept.pop(), 9)

def test_temporary_files():
    tempfile.NamedTemporaryFile(prefix="of-any-name-", delete=False).close()

def test_temporary_files_of_a_child():
    code = "import tempfile; tempfile.mkdtemp()"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)

def test_environment():
    os.environ["LEFT_BEHIND"] = "1"

def test_descriptors():
    kept.append(open(os.devnull))

def test_intra_op_threads():
    torch.set_num_threads(torch.get_num_threads() + 1)

def test_shared_memory():
    kept.append(numpy.memmap(shared_memory()))

def test_the_end_of_shared_memory():
    shared_memory().unlink()

def test_nothing(tmp_path):
    (tmp_path / "file").touch()
    with tempfile.TemporaryDirectory():
        worker = threading.Thread(target=print)
        worker.start()
        worker.join()
"""

BESIDE = """
import time
from tests.support import left_behind

left_behind.PATIENCE_SECONDS = 0.2

def test_beside_others(request):
    folder = request.path.parent
    (folder / "begun").touch()
    while not (folder / "go on").exists():
        time.sleep(0.02)
"""

# Trains in the simulator and with local processes, and then has all that a program can have.
NEIGHBOUR = """
import mmap, os, tempfile
from pathlib import Path
import flockstep as fs

input()
fs.run("digits-mlp", fs.EAWild(4), workers=2, epochs=1, progress=False)
with fs.LocalProcesses() as backend, tempfile.TemporaryDirectory(prefix="flockstep-"):
    fs.run("digits-mlp", fs.EAWild(4), workers=2, backend=backend, epochs=1, progress=False)
    memory = Path("/dev/shm", f"flockstep-neighbour-{os.getpid()}")
    memory.write_bytes(bytes(4096))
    with memory.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), 0)
    print("there", flush=True)
    try:
        input()
    finally:
        memory.unlink()
"""


@contextmanager
def started(*command: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A program that does not outlive this, whatever happens."""
    program = [sys.executable, *command]
    with subprocess.Popen(program, text=True, stdout=subprocess.PIPE, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


def inner_run(folder: Path, tests: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """pytest with the check, on tests of its own."""
    path = folder / "test_inner.py"
    path.write_text(tests)
    plugins = ["-p", "tests.support.left_behind", "-p", "no:cacheprovider"]
    options = ["-q", "-rE", *plugins, "-c", os.devnull, "--rootdir", str(folder)]
    # Lines that are cut to the width of a terminal would lose what was left.
    environment = {**os.environ, "COLUMNS": "1000"}
    return started("-m", "pytest", *options, str(path), cwd=ROOT, env=environment)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_leak_is_found(tmp_path):
    with inner_run(tmp_path, LEAKS) as run:
        printed, _ = run.communicate(timeout=SECONDS)
    said = dict(re.findall(r"^ERROR .*::test_(\w+) - AssertionError: (.*)$", printed, re.MULTILINE))
    left = "the test left {} behind: "
    assert said.pop("threads").startswith(left.format("threads"))
    assert said.pop("processes").startswith(left.format("processes"))
    assert said.pop("processes_whose_parent_is_gone").startswith(left.format("processes"))
    assert said.pop("temporary_files").startswith(left.format("temporary files"))
    assert said.pop("temporary_files_of_a_child").startswith(left.format("temporary files"))
    assert said.pop("shared_memory").startswith(left.format("shared memory"))
    assert said.pop("environment") == "the test changed environment"
    assert said.pop("descriptors") == "the test changed descriptors"
    assert said.pop("intra_op_threads") == "the test changed intra-op threads"
    assert said == {}, printed
    assert "13 passed, 9 errors" in printed


def test_memory_that_nobody_holds_any_more_is_ours():
    memory = left_behind.SHARED_MEMORY / f"flockstep-test-{os.getpid()}"
    memory.touch()
    try:
        assert left_behind._is_ours(memory)
    finally:
        memory.unlink()


def test_another_flockstep_program_is_not_looked_at(tmp_path):
    # It is somebody else's, who knows nothing of this run's folder.
    environment = {**os.environ, "TMPDIR": os.environ["PYTEST_DEBUG_TEMPROOT"]}
    with (
        inner_run(tmp_path, BESIDE) as run,
        started("-c", NEIGHBOUR, env=environment, stdin=subprocess.PIPE) as neighbour,
    ):
        wait_for(tmp_path / "begun", run)
        neighbour.stdin.write("begin\n")
        neighbour.stdin.flush()
        assert neighbour.stdout.readline() == "there\n"
        (tmp_path / "go on").touch()
        printed, _ = run.communicate(timeout=SECONDS)
        neighbour.communicate("end\n", timeout=SECONDS)
    assert "1 passed" in printed
    assert (run.returncode, neighbour.returncode) == (0, 0), printed
