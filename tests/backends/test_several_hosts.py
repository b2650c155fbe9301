"""Workers on several hosts, started by torchrun as on real machines: each host is a network
namespace.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import namespaces
from tests.support.namespaces import Host, Hosts, Started

import flockstep as fs

WHY_NOT = namespaces.why_not()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.timeout(400),
]

SCRIPT = str(Path(namespaces.__file__).with_name("on_every_host.py"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
RUN = ("-m", "flockstep", "run", "digits-mlp", "--backend", "torchrun", "--epochs", "3", "--json")
START_SECONDS = 180.0  # for torch to be loaded by many processes on few cores
NOTICE_SECONDS = 20.0  # for all to hear that a host is gone


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    links = set(namespaces.run("ip", "-oneline", "link").splitlines())
    with Hosts(4) as hosts:
        yield hosts
    assert not {host.name for host in hosts} & set(namespaces.names())
    assert not set(namespaces.run("ip", "-oneline", "link").splitlines()) - links


def start(
    hosts: list[Host], folder: Path, *program: str, per_host: int = 1, **environment: str
) -> list[Started]:
    """The command that a user types on each of the hosts."""
    shape = ["--nnodes", str(len(hosts)), "--nproc-per-node", str(per_host)]
    master = ["--master-addr", hosts[0].address, "--master-port", "29500"]
    # torchrun leaves a folder for logs behind when it is killed.
    logs = folder / "temporary"
    logs.mkdir(exist_ok=True)
    environment = {"TMPDIR": str(logs), **environment}
    return [
        host.start(
            folder, TORCHRUN, *shape, "--node-rank", str(index), *master, *program, **environment
        )
        for index, host in enumerate(hosts)
    ]


def wait_for(holds: Callable[[], Any], seconds: float, what: str, started: list[Started]) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        said = "\n".join(each.err.read_text()[-2000:] for each in started)
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s\n{said}"
        time.sleep(0.02)
    return found


def end(hosts: list[Host], started: list[Started]) -> list[str]:
    """What each host printed, when all have ended well and left nothing running."""
    wait_for(
        lambda: all(each.process.poll() is not None for each in started),
        START_SECONDS,
        "the end",
        started,
    )
    for each in started:
        assert each.process.returncode == 0, each.err.read_text()
    assert not any(host.pids() for host in hosts)
    return [each.out.read_text() for each in started]


def outcome(started: list[Started], rank: int, scene: str, seconds: float) -> dict[str, Any]:
    """What the process of one rank, the only one of its host, says of a scene."""

    def find() -> Any:
        said = [json.loads(line) for line in started[rank].lines()]
        return next((line for line in said if line["scene"] == scene), None)

    found: dict[str, Any] = wait_for(
        find, seconds, f"rank {rank}'s outcome of {scene}", [started[rank]]
    )
    return found


def simulated(
    strategy: fs.Strategy[Any], workers: int, seed: int = 0, epochs: int = 3
) -> dict[str, float]:
    return fs.run("digits-mlp", strategy, workers=workers, epochs=epochs, seed=seed).metrics


def test_a_link_carries_no_more_than_it_should(hosts, tmp_path):
    """The hosts of these tests are what they are said to be."""
    nbytes = 10_000_000
    receive = (
        "import socket, sys\n"
        "connection, _ = socket.create_server((sys.argv[1], 5000)).accept()\n"
        "print('here', flush=True)\n"
        "while connection.recv(1 << 20): pass\n"
    )
    send = (
        "import socket, sys\n"
        "connection = socket.create_connection((sys.argv[1], 5000))\n"
        "connection.sendall(bytes(int(sys.argv[2])))\n"
    )
    receiver = hosts[1].start(tmp_path, sys.executable, "-c", receive, hosts[1].address)
    wait_for(hosts[1].listeners, 60, "a listener", [receiver])
    hosts[0].start(tmp_path, sys.executable, "-c", send, hosts[1].address, str(nbytes))
    wait_for(receiver.lines, 60, "a connection", [receiver])
    began = time.monotonic()
    receiver.process.wait(60)
    at_once = 2 * namespaces.BURST_BYTES  # through the two limits on the way
    assert time.monotonic() - began > 0.9 * (nbytes - at_once) / namespaces.BYTES_PER_SECOND
    assert hosts[0].sent_bytes() > nbytes


SAME = ("test_accuracy", "test_loss", "train_loss", "bytes_sent", "exchanges", "samples", "workers")


def test_three_hosts_train_as_the_simulator_does(hosts, tmp_path):
    hosts = hosts[:3]
    before = sum(host.sent_bytes() for host in hosts)
    started = start(hosts, tmp_path, *RUN, "sync_sgd", GLOO_SOCKET_IFNAME="eth0")
    listeners = watch_listeners(hosts, started)
    first, *others = end(hosts, started)
    assert others == ["", ""], "rank 0 prints, and nobody else"

    figures, expected = json.loads(first)["metrics"], simulated(fs.SyncSGD(), 3)
    assert {name: figures[name] for name in SAME} == pytest.approx(
        {name: expected[name] for name in SAME}, rel=1e-6
    )
    crossed = sum(host.sent_bytes() for host in hosts) - before
    assert crossed >= figures["bytes_sent"], "what is counted has really left the hosts"

    for host, torchrun, seen in zip(hosts, started, listeners, strict=True):
        # torchrun's own store listens on all interfaces: that is torch's, in the process that was
        # started here.
        assert_own_address_only(
            host, {(address, pid) for address, pid in seen if pid != torchrun.process.pid}
        )


def test_the_variables_alone_are_enough(hosts, tmp_path):
    hosts = hosts[:2]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
    # Long enough for its listeners to be seen on a busy machine.
    command = (sys.executable, *RUN, "local_sgd", "--set", "period=8", "--epochs", "20")
    started = [
        host.start(tmp_path, *command, **world, RANK=str(rank)) for rank, host in enumerate(hosts)
    ]
    listeners = watch_listeners(hosts, started)
    first, second = end(hosts, started)
    assert second == ""
    figures, expected = json.loads(first)["metrics"], simulated(fs.LocalSGD(period=8), 2, epochs=20)
    assert {name: figures[name] for name in SAME} == pytest.approx(
        {name: expected[name] for name in SAME}, rel=1e-6
    )
    for host, seen in zip(hosts, listeners, strict=True):
        assert_own_address_only(host, seen)


def assert_own_address_only(host: Host, listeners: set[tuple[str, int]]) -> None:
    assert {address for address, _ in listeners} <= {host.address, "127.0.0.1"}
    assert len({pid for address, pid in listeners if address == host.address}) == 2, (
        "a launcher, its worker's gloo"
    )


def watch_listeners(hosts: list[Host], started: list[Started]) -> list[set[tuple[str, int]]]:
    """All addresses that anybody listened on while the processes ran."""
    seen: list[set[tuple[str, int]]] = [set() for _ in hosts]

    def look() -> bool:
        time.sleep(0.25)
        for host, known in zip(hosts, seen, strict=True):
            known.update(host.listeners())
        return all(each.process.poll() is not None for each in started)

    wait_for(look, START_SECONDS, "the end", started)
    return seen


def test_two_processes_on_each_of_two_hosts_learn_as_well_as_in_the_simulator(hosts, tmp_path):
    started = start(hosts[:2], tmp_path, *RUN, "ea_wild", "--set", "period=4", per_host=2)
    first, second = end(hosts[:2], started)
    assert second == ""
    printed = json.loads(first)
    assert printed["workers"] == 4
    accuracies = [simulated(fs.EAWild(period=4), 4, seed)["test_accuracy"] for seed in range(8)]
    noise = max(4 * statistics.stdev(accuracies), 0.02)
    assert printed["metrics"]["test_accuracy"] == pytest.approx(
        statistics.fmean(accuracies), abs=noise
    )


@pytest.mark.parametrize("lose", [Host.kill, Host.cut_off], ids=["killed", "cut off"])
def test_hosts_are_lost(hosts, tmp_path, lose):
    """Host 3 while the others may go on, then host 2 while all must stop, then that of rank 0."""
    started = start(hosts, tmp_path, SCRIPT, str(tmp_path), "go_on", "stop-of-3", "stop-of-2")

    def lose_while_running(scene: str, rank: int, workers: int) -> float:
        running = [tmp_path / f"{scene} {each}" for each in range(workers)]
        wait_for(
            lambda: all(path.exists() for path in running), START_SECONDS, f"scene {scene}", started
        )
        began = time.time()
        lose(hosts[rank])
        return began

    lose_while_running("go_on", 3, 4)
    for rank in (0, 1, 2):
        said = outcome(started, rank, "go_on", 60)
        (lost,) = said["lost"]
        assert (lost["rank"], lost["step"] > 0, lost["seconds"] > 0) == (3, True, True), said
        assert (said["metrics"]["workers"], said["metrics"]["lost"]) == (4, 1)
        assert said["replicas"] == (3 if rank == 0 else 1)
        assert said["metrics"]["test_accuracy"] > 0.85

    assert (tmp_path / "go_on 0").read_text() == "1\n", (
        "a host has one core here, and its worker one thread"
    )

    for workers, lost, left in ((3, 2, (0, 1)), (2, 0, (1,))):
        lost_at = lose_while_running(f"stop {workers}", lost, workers)
        for rank in left:
            said = outcome(started, rank, f"stop-of-{workers}", 30)
            assert (said["error"], said["lost"]) == ("WorkerLost", lost), said
            assert said["at"] - lost_at < NOTICE_SECONDS
        if lose is Host.cut_off:  # it is alive, and hears from nobody
            said = outcome(started, lost, f"stop-of-{workers}", 30)
            assert (said["error"], said["at"] - lost_at < NOTICE_SECONDS) == ("WorkerLost", True), (
                said
            )

    # Nothing of ours is left on a host that is still there; what waits there for the lost ones is
    # torchrun itself.
    torchrun = started[1].process.pid
    wait_for(lambda: hosts[1].pids() <= {torchrun}, 60, "the end of all processes", [started[1]])
