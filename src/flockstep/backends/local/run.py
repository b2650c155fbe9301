"""One launch of local workers: orders given, workers watched, outcomes collected, and nothing
left behind.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from flockstep.backends.base import Launch, describe_deadlock
from flockstep.backends.heartbeat import Watchdog
from flockstep.backends.local import payload
from flockstep.backends.local.arena import Arena
from flockstep.backends.local.comm import LocalGroup
from flockstep.backends.local.process_slot import (
    BEATS,
    FROZEN,
    LOOKS,
    OUTCOME,
    PROCESS,
    STATE,
    STEPS,
    TOLD,
    WAITING,
    WAITS,
    StatusTable,
)
from flockstep.backends.local.worker_process import Orders
from flockstep.backends.outcome import result_of
from flockstep.errors import (
    DeadlockError,
    WorkerLost,
)

LOOK_SECONDS = 0.05
UNWIND_SECONDS = 0.5  # for workers that are asked to stop, before they are killed
KILL_SECONDS = 10.0  # for a worker that is killed to be gone; else the server is frozen, too
START_SECONDS = 300.0  # for workers to begin: the server may have to load torch over a network

# No garbage is made while importing: looking for it would only take time.
_SERVE = """
import gc
gc.disable()
import json, sys
descriptor, path, arguments = json.loads(sys.argv[1])
sys.path[:], sys.argv[:] = path, arguments
from flockstep.backends.local.fork_server import main
main(descriptor)
"""


class ForkServerProcess:
    """The launcher's end of a fork server."""

    def __init__(self) -> None:
        self.socket, theirs = _socket_pair()
        with theirs:
            # Workers import what the launcher can import and see its arguments. A session of their
            # own: Ctrl-C in a terminal must reach the launcher alone.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, json.dumps([theirs.fileno(), sys.path, sys.argv])],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_inherited(sys.__stdout__),
                stderr=_inherited(sys.__stderr__),
                start_new_session=True,
            )

    def send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        socket.send_fds(self.socket, [json.dumps(message).encode() + b"\n"], descriptors)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the server and all that it forked. Closing the socket is enough; killing is for a
        server that hangs.
        """
        self.socket.close()
        try:
            self._process.wait(UNWIND_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection. A launcher without standard streams would get their numbers,
    which a child loses.
    """
    ours, low = socket.socketpair()
    with low:
        return ours, socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3))


def _inherited(stream: TextIO | None) -> int | None:
    """What a child gets as a standard stream: the launcher's, or nowhere if the launcher has
    none.
    """
    return subprocess.DEVNULL if stream is None or stream.closed else None


class Run:
    """A run of a program by workers that a server forks."""

    def __init__(
        self,
        server: ForkServerProcess,
        launch: Launch,
        first_rank: int,
        patience: float | None = None,
    ) -> None:
        self._server = server
        self._patience = patience
        self._watchdog = Watchdog(patience)
        self._launched_at = time.monotonic()
        self._launch = launch
        self._workers = launch.workers
        self._first_rank = first_rank
        self._alive: set[int] = set()
        self._results: list[Any] = [None] * launch.workers
        self._losses: dict[int, WorkerLost] = {}  # in the order in which they were noticed
        self._received = b""
        self._exits: deque[tuple[int, int]] = deque()  # (rank, exit code), not looked at yet
        self._suspicion: tuple[list[int], list[int]] | None = None
        self._heard = [0] * launch.workers  # the place of each worker's last text that was heard

    def __enter__(self) -> Run:
        self._arena = Arena.create()
        self._table_offset = self._arena.allocate(StatusTable.nbytes(self._workers))
        self._table = StatusTable(self._arena, self._table_offset, self._workers)
        return self

    def __exit__(self, *exception: object) -> None:
        del self._table
        self._arena.close()

    def _give_orders(self) -> None:
        arena, workers = self._arena, self._workers
        orders = Orders(
            workers=workers,
            first_rank=self._first_rank,
            seed=self._launch.seed,
            on_failure=self._launch.on_failure,
            patience=self._patience,
            status_table=self._table_offset,
            group=arena.allocate(LocalGroup.nbytes(workers)),
            program=payload.store(arena, self._launch.program, "program"),
        )
        self._alive = set(range(workers))
        self._server.send({"orders": asdict(orders)}, [arena.descriptor, arena.lock_descriptor])

    @property
    def has_workers(self) -> bool:
        return bool(self._alive)

    def wait(self) -> list[Any]:
        """Watch until all workers have ended; raise the first failure, with no worker left."""
        watch = self._launch.watch
        try:
            self._give_orders()
            while self._alive:
                self._listen()
                self._hear()
                while self._exits:
                    self._collect(*self._exits.popleft())
                if watch:
                    watch(self._table.rows[:, STEPS].tolist())
                self._look_for_frozen()
                self._look_for_deadlock()
        except BaseException:
            self._stop_workers()
            raise
        if len(self._losses) == self._workers:
            raise list(self._losses.values())[-1]
        return self._results

    def _listen(self) -> None:
        """Take in what the server says of workers that have ended; wait a moment for it."""
        ready, _, _ = select.select([self._server.socket], [], [], LOOK_SECONDS)
        if not ready:
            return
        received = self._server.socket.recv(1 << 16)
        if not received:
            raise WorkerLost("the server process of the local workers ended unexpectedly")
        *lines, self._received = (self._received + received).split(b"\n")
        for message in map(json.loads, lines):
            self._alive.discard(message["rank"])
            self._exits.append((message["rank"], message["status"]))

    def _hear(self) -> None:
        """Hand on what workers have told since the last time."""
        hear = self._launch.hear
        if hear is None:
            return
        for index, heard in enumerate(self._heard):
            place = newest = int(self._table.rows[index, TOLD])
            texts = []
            while place != heard:
                place, text = payload.load_copy(self._arena, place)
                texts.append(text)
            self._heard[index] = newest
            for text in reversed(texts):
                hear(text)

    def _collect(self, index: int, exit_code: int) -> None:
        """Take over what a worker that has ended left behind."""
        rank = self._first_rank + index
        place = int(self._table.rows[index, OUTCOME])
        if not place:
            self._table.lose(index, exit_code)
            loss = self._table.loss(index, self._first_rank)
            if self._launch.on_failure == "stop":
                raise loss
            self._results[index] = self._losses[index] = loss
            return
        self._results[index] = result_of(
            rank, place, functools.partial(payload.load_copy, self._arena)
        )

    def _look_for_frozen(self) -> None:
        """Kill those who do not move any more: then they are lost as any other."""
        for index, seconds in self._watchdog.look(self._signs_of_life).items():
            row = self._table.rows[index]
            if not row[FROZEN]:
                row[FROZEN] = int(seconds * 1e9)
                self._server.send({"signal": signal.SIGKILL, "ranks": [index]}, [])
            elif seconds > row[FROZEN] / 1e9 + KILL_SECONDS:
                rank = self._first_rank + index
                raise WorkerLost(
                    f"rank {rank} has not moved for {seconds:.1f} s and cannot be killed",
                    rank,
                    step=int(row[STEPS]),
                    frozen_seconds=seconds,
                )

    def _signs_of_life(self) -> dict[int, tuple[int, str]]:
        """Of all workers that have begun: how often they have beaten, and how long they have
        computed. One that beats no more but computes is in a call that keeps all Python waiting.
        """
        had_time = time.monotonic() > self._launched_at + START_SECONDS
        rows = {index: self._table.rows[index] for index in self._alive}
        return {
            index: (int(row[BEATS]), _computed(int(row[PROCESS])))
            for index, row in rows.items()
            if row[BEATS] or had_time
        }

    def _look_for_deadlock(self) -> None:
        """All wait, and each has looked twice since all wait: nobody can change anything any
        more.
        """
        rows = self._table.rows[sorted(self._alive)].tolist()  # a copy, as of this moment
        if not rows or any(row[STATE] != WAITING for row in rows):
            self._suspicion = None
            return
        waits, looks = [row[WAITS] for row in rows], [row[LOOKS] for row in rows]
        if self._suspicion is None or self._suspicion[0] != waits:
            self._suspicion = waits, looks
        elif all(now >= before + 2 for now, before in zip(looks, self._suspicion[1], strict=True)):
            raise DeadlockError(self._describe())

    def _describe(self) -> str:
        waiting = {rank: self._table.said(rank) for rank in self._alive}
        return describe_deadlock(
            [waiting.get(rank) for rank in range(self._workers)],
            self._first_rank,
            lost=self._losses,
        )

    def _stop_workers(self) -> None:
        """Ask all workers to stop, then make them. Where the server itself does not move, they are
        left to what stops the server.
        """
        began = time.monotonic()
        deadline = began + UNWIND_SECONDS
        try:
            self._server.send({"signal": signal.SIGTERM, "ranks": [*self._alive]}, [])
            while self._alive and time.monotonic() < began + KILL_SECONDS:
                if time.monotonic() > deadline:
                    self._server.send({"signal": signal.SIGKILL, "ranks": [*self._alive]}, [])
                    deadline += UNWIND_SECONDS
                self._listen()
        except (OSError, WorkerLost):
            pass  # the server has gone, and its workers with it: they die with their parent


def _computed(process: int) -> str:
    """How long all threads of a process have computed, as the system counts it."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""  # it is gone, of which the server tells
    user, system = status.rpartition(")")[2].split()[11:13]
    return f"{user} {system}"
