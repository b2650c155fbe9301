"""What is particular to Ray: what is started and stopped, where workers and shared tensors are,
what is kept.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch

import flockstep as fs
from flockstep.backends.ray import Ray
from flockstep.backends.ray.parcel import pack, unpack
from flockstep.backends.ray.shared import MappedShard

ROOT = Path(__file__).parents[2]
SOON = 20.0  # to end Ray's many processes, on a busy machine


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement": "near"}, "'placement' must be one of 'pack', 'spread' (got 'near')"),
        ({"household": 0}, "'household' must be at least 1 (got 0)"),
        ({"homes": 0}, "'homes' must be at least 1 (got 0)"),
        ({"resources": {"GPU": -1}}, "\"resources['GPU']\" must be at least 0 (got -1)"),
    ],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(fs.InvalidField) as raised:
        Ray(**fields)
    assert str(raised.value) == message


def test_without_ray_the_error_says_what_to_install(tmp_path):
    """All that is installed here, but not Ray."""
    for packages in {Path(torch.__file__).parents[1]}:
        for path in packages.iterdir():
            if not path.name.startswith(("ray", "__editable__")):
                (tmp_path / path.name).symlink_to(path)
    code = (
        "import flockstep as fs\nfrom flockstep.backends.ray import Ray\nfs.launch(print, 2, Ray())"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stderr.endswith(
        "FlockstepError: the Ray backend needs Ray: pip install 'flockstep[ray]'\n"
    )


ALONE = """
import os, signal, sys, threading
import psutil
import flockstep as fs
from flockstep.backends.ray import Ray

def program(comm):
    print("line", comm.rank)
    print("line", comm.rank, file=sys.stderr)
    comm.barrier()

heard = set()
def watch(steps):
    for process in [me, *me.children(recursive=True)]:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                heard.add(connection.laddr.ip.removeprefix("::ffff:"))

me = psutil.Process()
before = dict(os.environ)
handler = signal.getsignal(signal.SIGTERM)
fs.launch(program, 2, Ray(), watch=watch)
assert heard == {"127.0.0.1"}, heard
assert not me.children(recursive=True), me.children(recursive=True)
assert threading.enumerate() == [threading.main_thread()]
left = {name: value for name, value in os.environ.items() if before.get(name) != value}
assert left in ({}, {"RAY_CLIENT_MODE": "0"}), left
assert signal.getsignal(signal.SIGTERM) is handler
"""


@contextmanager
def short_folder(name: str) -> Iterator[str]:
    """A temporary folder whose name is so short that Ray's sockets, deep in it, have short ones."""
    folder = Path(tempfile.gettempdir(), name)
    folder.mkdir()
    yield str(folder)
    shutil.rmtree(folder)


def test_ray_is_started_on_loopback_and_leaves_nothing_behind(tmp_path):
    with short_folder("o") as temporary:
        environment = {**os.environ, "HOME": str(tmp_path), "TMPDIR": temporary}
        done = subprocess.run(
            [sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True
        )
        left = list(Path(temporary).iterdir())
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["line 0", "line 1"]
    assert sorted(done.stderr.splitlines()) == ["line 0", "line 1"]
    assert left == []
    assert not (tmp_path / ".ray").exists()


def test_a_launcher_that_is_stopped_stops_ray(tmp_path):
    """By Ctrl-C and by SIGTERM: two at a time, since starting Ray takes a while."""
    code = (
        "import sys, time, pathlib\n"
        "import flockstep as fs\n"
        "from flockstep.backends.ray import Ray\n"
        "def program(comm):\n"
        "    pathlib.Path(sys.argv[1]).touch()\n"
        "    time.sleep(100)\n"
        "fs.launch(program, 1, Ray(homes=1))\n"
    )
    with ExitStack() as stack:
        started = []
        for number in (signal.SIGINT, signal.SIGTERM):
            temporary = stack.enter_context(short_folder(str(int(number))))
            mark = tmp_path / str(number)
            command = [sys.executable, "-c", code.replace("sys.argv[1]", repr(str(mark)))]
            environment = {**os.environ, "TMPDIR": temporary}
            process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            started.append((process, number, temporary, mark))
        for process, number, temporary, mark in started:
            while not mark.exists():
                assert process.poll() is None
                time.sleep(0.05)
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            assert process.wait(SOON) != 0
            _, alive = psutil.wait_procs(family, timeout=SOON)
            assert not [
                one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
            ]
            assert not list(Path(temporary).iterdir())


@pytest.fixture(scope="module")
def two_hosts():
    """A cluster of two hosts that the user has started, and what a client found there."""
    folder = tempfile.mkdtemp(prefix="two")
    (Path(folder) / "ray").mkdir()
    environment = {
        **os.environ,
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    pipe = subprocess.PIPE
    hosts = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_hosts", "4"],
        env=environment,
        cwd=ROOT,
        stdin=pipe,
        stdout=pipe,
        text=True,
    )
    environment["RAY_ADDRESS"] = hosts.stdout.readline().strip()
    client = [sys.executable, "-m", "tests.support.ray_client"]
    done = subprocess.run(client, env=environment, cwd=ROOT, stdout=pipe, check=True, text=True)
    yield hosts, environment, json.loads(done.stdout)
    hosts.communicate("")
    shutil.rmtree(folder)


def test_a_cluster_that_is_joined_lives_on(two_hosts):
    hosts, environment, _ = two_hosts
    code = (
        "import ray; ray.init(logging_level='ERROR')\n"
        "print(len([node for node in ray.nodes() if node['Alive']]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (done.stdout.strip(), hosts.poll()) == ("2", None)


def test_households_share_a_host_and_spread_over_hosts(two_hosts):
    first, second, third, fourth = two_hosts[2]["households"]
    assert first == second != third == fourth
    assert two_hosts[2]["sum"] == [10] * 4


def test_packed_workers_share_a_host(two_hosts):
    assert len(set(two_hosts[2]["packed"])) == 1


def test_shared_tensors_are_right_from_another_host(two_hosts):
    assert all(all(right) and len(right) >= 6 for right in two_hosts[2]["right"])


def test_a_lost_home_is_an_error_and_the_next_run_has_another(two_hosts):
    assert two_hosts[2]["without a home"].startswith("a home of shared 'x' is lost")
    assert all(map(all, two_hosts[2]["right again"]))


def test_workers_are_kept(ray):
    first = fs.launch(lambda comm: os.getpid(), 4, ray)
    again = fs.launch(lambda comm: os.getpid(), 3, ray)
    assert again == first[:3]


def test_workers_have_the_priority_of_their_launcher(ray):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert fs.launch(lambda comm: os.getpriority(os.PRIO_PROCESS, 0), 2, ray) == [own] * 2


def test_a_worker_that_was_killed_is_replaced(ray):
    def program(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    before = fs.launch(lambda comm: os.getpid(), 2, ray)
    with pytest.raises(fs.WorkerLost, match="rank 1 went away after step 0"):
        fs.launch(program, 2, ray)
    after = fs.launch(lambda comm: os.getpid(), 2, ray)
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.timeout(60)
def test_a_sum_that_was_given_up_does_not_hold_up_the_next_run(ray):
    """Torch waits for the work of a group when the group is destroyed, whoever does that."""

    def fails(comm: fs.Comm) -> None:
        comm.itself = comm  # destroyed no sooner than a cycle is found
        for step in range(4):
            comm.all_reduce(torch.ones(10))
            if comm.rank == 2 and step == 2:
                time.sleep(0.5)  # the others are in the next one
                raise ValueError("no further")

    def collects(comm: fs.Comm) -> None:
        if comm.rank == 0:
            gc.collect()
        comm.barrier()

    with pytest.raises(fs.FlockstepError, match="no further"):
        fs.launch(fails, 3, ray)
    assert fs.launch(collects, 3, ray) == [None] * 3


def test_shared_tensors_lie_at_two_homes_whose_memory_workers_of_the_host_map(ray):
    def program(comm):
        shared = comm.shared("x", torch.zeros(1001))
        return [type(shard) is MappedShard for shard in shared._shards], [
            len(shard.value) for shard in shared._shards
        ]

    assert fs.launch(program, 2, ray) == [([True, True], [500, 501])] * 2


def test_shared_tensors_outlive_those_who_changed_them(ray):
    def program(comm):
        shared = comm.shared("x", torch.zeros(10))
        if comm.rank == 0:
            shared.add(torch.ones(10))
            os.kill(os.getpid(), signal.SIGKILL)
        while 0 in comm.members:
            time.sleep(0.01)
        return shared.read().tolist()

    lost, *values = fs.launch(program, 3, ray, on_failure="continue")
    assert isinstance(lost, fs.WorkerLost)
    assert values == [[1.0] * 10] * 2


def test_what_a_blend_returns_is_the_callers_alone(ray):
    """Memory is used again when nobody holds it any more, and only then."""

    def program(comm):
        shared = comm.shared("x", torch.zeros(1000))
        first = shared.blend(torch.ones(1000), 0.5)
        view = first[3:]
        second = shared.blend(torch.ones(1000), 0.5)
        second.fill_(7)
        apart = second.data_ptr() != first.data_ptr()
        del first
        third = shared.blend(torch.ones(1000), 0.5)
        return apart, view.tolist(), third.tolist(), shared.read()[0].item()

    for apart, view, third, last in fs.launch(program, 1, ray):
        assert apart
        assert view == [0.0] * 997
        assert third == [0.75] * 1000
        assert last == 0.875


def test_memory_of_shared_tensors_is_freed_after_the_run(ray):
    def program(comm):
        comm.shared("x", torch.zeros(1_000_000))

    def held():
        homes = [
            process
            for process in psutil.Process().children(recursive=True)
            if "HomeActor" in process.name()
        ]
        paths = [path for home in homes for path in Path(f"/proc/{home.pid}/fd").iterdir()]
        return [path for path in paths if "memfd:flockstep" in str(path.readlink())]

    fs.launch(program, 2, ray)
    assert held() == []


def test_lines_that_workers_print_arrive_whole(ray, capsys):
    def program(comm):
        comm.barrier()
        for line in range(50):
            print("line", line, "from", comm.rank)
            print("line", line, "from", comm.rank, file=sys.stderr)

    fs.launch(program, 2, ray)
    expected = sorted(f"line {line} from {rank}" for line in range(50) for rank in range(2))
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == expected
    assert sorted(captured.err.splitlines()) == expected


def test_a_lost_worker_makes_no_noise(ray, capfd):
    def program(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    fs.launch(program, 2, ray, on_failure="continue")
    time.sleep(1)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_programs_data_is_each_workers_own(ray):
    data = torch.zeros(100_000)

    def program(comm):
        comm.barrier()
        data.add_(comm.rank + 1)
        comm.barrier()
        return float(data[0])

    assert fs.launch(program, 3, ray) == [1.0, 2.0, 3.0]


def test_resources_that_no_host_has_are_an_error():
    code = (
        "import flockstep as fs\n"
        "from flockstep.backends.ray import Ray\n"
        "fs.launch(print, 2, Ray(resources={'x': 1}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "FlockstepError: Ray has no room for 2 workers with {'x': 1} each, 1 to a host, within 5 s"
        in done.stderr
    )


def test_a_view_travels_without_what_it_is_a_view_of():
    parcel = pack({"view": torch.arange(1_000_000)[5:8]})
    assert sum(shard.nbytes for shard in parcel) < 10_000
    assert unpack(parcel)["view"].tolist() == [5, 6, 7]
