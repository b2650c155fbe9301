"""A service with all its roles on loopback, as rank 0's launcher has it, and plain sockets to
talk to it.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flockstep.backends.cluster.completion import ResultCollector
from flockstep.backends.cluster.control_channel import ControlChannel
from flockstep.backends.cluster.coordinator import Coordinator
from flockstep.backends.cluster.homes import Homes
from flockstep.backends.cluster.service import Service
from flockstep.backends.cluster.wire import (
    HELLO,
    MESSAGE,
    REFUSED,
    WELCOME,
    Connection,
    connect,
)

# Written out here once more, so that a change of the format does not go unnoticed.
LAYOUT = struct.Struct("!2sHBBB16s64s8QQd")
SECONDS = 30.0  # in which a service must have answered or closed, however busy the machine


def frame(
    kind: int,
    run: bytes,
    payload: bytes = b"",
    *,
    magic: bytes = b"FS",
    version: int = 4,
    name: bytes = b"",
    dtype: int = 0,
    dimensions: int | None = None,
    shape: tuple[int, ...] = (),
    length: int | None = None,
    number: float = 0.0,
) -> bytes:
    """A frame, right or wrong."""
    counted = len(shape) if dimensions is None else dimensions
    sizes = (*shape, *(0,) * (8 - len(shape)))
    announced = len(payload) if length is None else length
    return (
        LAYOUT.pack(magic, version, kind, dtype, counted, run, name, *sizes, announced, number)
        + payload
    )


class Serving:
    """The service and who stands behind it; `renew` gives it a run that nobody has joined yet."""

    def __init__(self) -> None:
        self.run, self.token = secrets.token_bytes(16), secrets.token_bytes(32)
        self.homes = Homes()
        self.renew()
        roles: dict[str, Any] = {
            "tensors": lambda connection, _: self.homes.serve(connection),
            "worker": lambda connection, rank: self.coordinator.serve(connection, rank),
            "launcher": lambda connection, rank: self.collector.serve(connection, rank),
        }
        self.service = Service("127.0.0.1", self.run, self.token, roles)
        self.deaths: list[threading.ExceptHookArgs] = []  # of threads, with a traceback

    def renew(self, workers: int = 3, on_failure: str = "continue") -> None:
        self.coordinator = Coordinator(workers, on_failure)
        self.collector = ResultCollector(self.coordinator, workers)

    def hello(self, role: str, rank: int = 0) -> bytes:
        return frame(HELLO, self.run, self.token, name=role.encode(), number=rank)

    def message(self, said: Any) -> bytes:
        payload = said if isinstance(said, bytes) else json.dumps(said).encode()
        return frame(MESSAGE, self.run, payload)

    def join(self, role: str, rank: int = 0) -> Connection:
        return connect(self.service.address, self.run, self.token, role, rank, SECONDS)

    def control(self, rank: int) -> ControlChannel:
        return ControlChannel(self.join("worker", rank), rank)

    @contextmanager
    def stranger(self) -> Iterator[Stranger]:
        with socket.create_connection(self.service.address, SECONDS) as plain:
            yield Stranger(plain)


class Stranger:
    """A peer that sends what it likes."""

    def __init__(self, plain: socket.socket) -> None:
        self.socket = plain
        self.address = "{}:{}".format(*plain.getsockname())

    def send(self, data: bytes) -> None:
        """As much as the service takes: it may have closed the connection before the end."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def hang_up(self) -> None:
        """Send no more, but listen on."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the service was faster

    def answers(self) -> list[tuple[int, bytes, bytes]]:
        """(kind, run, payload) of all that comes until the service closes; a service that never
        does is an error.
        """
        data = b""
        while True:
            try:
                more = self.socket.recv(1 << 16)
            except ConnectionResetError:
                break
            if not more:
                break
            data += more
        frames = []
        while data:
            _, _, kind, _, _, run, _, *_, length, _ = LAYOUT.unpack(data[: LAYOUT.size])
            frames.append((kind, run, data[LAYOUT.size : LAYOUT.size + length]))
            data = data[LAYOUT.size + length :]
        return frames

    def refusal(self) -> str:
        """Why the service refused; it must have said so, and nothing else but welcome."""
        *before, (kind, _, payload) = self.answers()
        assert [kind for kind, _, _ in before] in ([], [WELCOME])
        assert kind == REFUSED
        return payload.decode()


@contextmanager
def serving() -> Iterator[Serving]:
    """A running service. No thread may die of an exception while it runs."""
    made = Serving()
    before, threading.excepthook = threading.excepthook, made.deaths.append
    try:
        with made.service:
            yield made
    finally:
        threading.excepthook = before
    assert not made.deaths, made.deaths[0]
