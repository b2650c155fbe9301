"""The fork server: a process that has torch loaded, has no threads, and forks workers from itself.

It speaks with the launcher over one socket, one JSON object per line. The launcher sends
{"orders": …} with the arena's descriptors, or {"signal": n, "ranks": [r, …]} for those of these
workers that still live. The server says {"rank": r, "status": s} of each worker that ends. When the
launcher goes away, in whatever way, the socket ends, and the server ends its workers and itself."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

# Torch loads this with the first optimizer that is made. It takes over a second: better once than
# in each worker.
import torch._dynamo  # noqa: F401

from flockstep.backends.local.arena import Arena
from flockstep.backends.local.process_slot import WakeupPipes
from flockstep.backends.local.worker_process import Orders, work


def main(descriptor: int) -> None:
    """Serve until the launcher closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child_ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup)
    gc.enable()
    # The collector need not touch, and so copy, the pages that workers share with this process.
    gc.freeze()
    ForkServer(socket.socket(fileno=descriptor), child_ended).serve()


class ForkServer:
    """Forks workers when asked and tells how they ended."""

    def __init__(self, launcher: socket.socket, child_ended: int) -> None:
        self._launcher = launcher
        self._child_ended = child_ended  # readable when a worker has ended
        self._ranks: dict[int, int] = {}  # by process

    def serve(self) -> None:
        try:
            while True:
                ready, _, _ = select.select([self._launcher.fileno(), self._child_ended], [], [])
                if self._child_ended in ready:
                    os.read(self._child_ended, 4096)
                    self._reap()
                if self._launcher.fileno() in ready and not self._obey():
                    return
        finally:
            self._signal(signal.SIGKILL, list(self._ranks.values()))
            while self._ranks:
                process, _ = os.wait()
                del self._ranks[process]

    def _obey(self) -> bool:
        """Do what the launcher says next; False when it has gone."""
        try:
            line, descriptors, _, _ = socket.recv_fds(self._launcher, 1 << 16, 2)
        except ConnectionResetError:
            return False  # it was killed before it had read all that it was told
        while line and not line.endswith(b"\n"):
            line += self._launcher.recv(1 << 16)
        for message in map(json.loads, line.splitlines()):
            if "orders" in message:
                self._fork(descriptors, Orders(**message["orders"]))
            else:
                self._signal(message["signal"], message["ranks"])
        return bool(line)

    def _fork(self, descriptors: list[int], orders: Orders) -> None:
        pipes = WakeupPipes.create(orders.workers)
        for rank in range(orders.workers):
            process = os.fork()
            if process == 0:
                self._become_worker(descriptors, pipes, orders, rank)
            self._ranks[process] = rank
        pipes.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def _become_worker(
        self, descriptors: list[int], pipes: WakeupPipes, orders: Orders, rank: int
    ) -> None:
        """In the new process: run the program and never return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._launcher.close()
            os.close(self._child_ended)
            work(Arena(*descriptors), pipes, orders, rank)
            code = 0
        except BaseException:  # noqa: BLE001
            # Nothing may climb up into the server's loop, of which this is a copy.
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)  # also where nobody takes the output any more

    def _reap(self) -> None:
        while self._ranks:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            self._tell(
                {"rank": self._ranks.pop(process), "status": os.waitstatus_to_exitcode(status)}
            )

    def _signal(self, number: int, ranks: list[int]) -> None:
        for process, rank in self._ranks.items():
            if rank in ranks:
                os.kill(process, number)

    def _tell(self, message: dict[str, Any]) -> None:
        self._launcher.sendall(json.dumps(message).encode() + b"\n")
