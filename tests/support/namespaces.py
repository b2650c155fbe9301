"""Hosts on one machine: network namespaces, each with an address and a link of its own to a common
switch.

Nothing passes between two of them but what goes over their links, whose bandwidth is limited both
ways."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

BYTES_PER_SECOND = 25e6
# What a link lets pass at once; no packet that the kernel makes may be larger.
BURST_BYTES = 256 * 1024
PREFIX = "flockstep"


def why_not() -> str | None:
    """Why there can be no such hosts here; None: there can."""
    for tool in ("ip", "tc", "ss", "taskset"):
        if shutil.which(tool) is None:
            return f"'{tool}' is not installed"
    name = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def names() -> list[str]:
    """All namespaces of this machine that have a name."""
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines()]


def _pids(name: str) -> set[int]:
    return {int(pid) for pid in run("ip", "netns", "pids", name).split()}


def _kill_all(name: str) -> None:
    while pids := _pids(name):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it went with its parent


@dataclass
class Started:
    """A process on a host. It writes into files, so that nobody must read for it to go on."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def lines(self) -> list[str]:
        """What it has printed so far, in whole lines."""
        return self.out.read_text().rpartition("\n")[0].splitlines()


@dataclass
class Host:
    """One namespace with one core; its link is `eth0` inside and a port of the switch outside."""

    name: str
    address: str
    switch: str
    port: str
    core: int
    started: list[Started] = field(default_factory=list)

    def start(self, folder: Path, *command: str, **environment: str) -> Started:
        """Start a command as if at this host's prompt."""
        stem = f"{self.port}-{len(self.started)}"
        out, err = folder / f"{stem}.out", folder / f"{stem}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self.name,
                    "taskset",
                    "--cpu-list",
                    str(self.core),
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **environment},
            )
        self.started.append(Started(process, out, err))
        return self.started[-1]

    def pids(self) -> set[int]:
        """All processes on this host, whoever started them."""
        return _pids(self.name)

    def kill(self) -> None:
        """As if the power had failed: every process at once, with no chance to say anything."""
        for started in self.started:
            started.process.kill()
        _kill_all(self.name)
        for started in self.started:
            started.process.wait()

    def cut_off(self) -> None:
        """Unplug the cable: the others never hear a word that this host is gone."""
        run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def listeners(self) -> list[tuple[str, int]]:
        """The addresses on which processes of this host listen, and their process ids."""
        found = []
        for line in run("ip", "netns", "exec", self.name, "ss", "-Hltnp").splitlines():
            address = line.split()[3].rpartition(":")[0]
            found += [(address, int(pid)) for pid in re.findall(r"pid=(\d+)", line)]
        return found

    def sent_bytes(self) -> int:
        """What has left this host by its link."""
        statistics = json.loads(
            run("ip", "-n", self.name, "-json", "-statistics", "link", "show", "eth0")
        )
        return int(statistics[0]["stats64"]["tx"]["bytes"])


class Hosts:
    """Some hosts at one switch. Everything is gone when the `with` ends, however it ends."""

    def __init__(self, count: int) -> None:
        prefix = f"{PREFIX}-{os.getpid()}"
        self._switch = f"{prefix}-switch"
        cores = sorted(os.sched_getaffinity(0))
        self.hosts = [
            Host(f"{prefix}-h{k}", f"10.83.0.{k + 1}", self._switch, f"h{k}", cores[k % len(cores)])
            for k in range(count)
        ]

    def __enter__(self) -> list[Host]:
        _remove_forgotten()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self.hosts

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def _make(self) -> None:
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "bridge", "up", "type", "bridge")
        for host in self.hosts:
            run("ip", "netns", "add", host.name)
            ends = ("name", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            run("ip", "-n", host.switch, "link", "add", *ends)
            run("ip", "-n", host.switch, "link", "set", host.port, "master", "bridge", "up")
            run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", host.name, "link", "set", device, "up")
            limit = (
                "tbf",
                "rate",
                f"{BYTES_PER_SECOND:.0f}bps",
                "burst",
                f"{BURST_BYTES}",
                "latency",
                "50ms",
            )
            run("tc", "-n", host.name, "qdisc", "add", "dev", "eth0", "root", *limit)
            run("tc", "-n", host.switch, "qdisc", "add", "dev", host.port, "root", *limit)

    def _remove(self) -> None:
        there = names()
        for host in self.hosts:
            if host.name in there:
                host.kill()
                run("ip", "netns", "del", host.name)
        if self._switch in there:
            run("ip", "netns", "del", self._switch)


def _remove_forgotten() -> None:
    """Namespaces, and what runs there, outlive a test run that is killed: the next one removes
    them.
    """
    for name in names():
        pid = re.match(rf"{PREFIX}-(\d+)-", name)
        if pid and not Path("/proc", pid[1]).exists():
            _kill_all(name)
            run("ip", "netns", "del", name)
