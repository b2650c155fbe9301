"""The listening end: lets in who knows the run and its token, and gives each connection a thread
of its own.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address

from flockstep.backends.cluster.wire import (
    HELLO,
    REFUSED,
    TOKEN_BYTES,
    WELCOME,
    Connection,
    Header,
    WireError,
)
from flockstep.fields import require

HELLO_SECONDS = 5.0
# Connections that have not said hello yet; more of them wait in the system's queue.
MOST_STRANGERS = 64
RETRY_SECONDS = 0.1  # where the system has no descriptor for one more connection

log = logging.getLogger("flockstep")

Serve = Callable[[Connection, int], None]


class Service:
    """Listens on one address, never on all, and hands each connection to what serves its role.

    `roles` maps a role to a function that takes (connection, rank) and returns when the connection
    has ended."""

    def __init__(self, host: str, run: bytes, token: bytes, roles: Mapping[str, Serve]) -> None:
        require(
            not ip_address(host).is_unspecified,
            "host",
            "be one address of this host, not all of them",
            host,
        )
        self._run = run
        self._token = token
        self._roles = roles
        self._strangers = threading.Semaphore(MOST_STRANGERS)
        self._open: dict[Connection, int | None] = {}  # and whose; None before it has said so
        self._dropped: set[int] = set()
        self._threads: set[threading.Thread] = set()
        self._guard = threading.Lock()
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="flockstep service", daemon=True)

    def __enter__(self) -> Service:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._guard:
            self._closing = True
            connections, threads = list(self._open), list(self._threads)
        # Waking the thread that accepts: closing its socket under it would not.
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()
        self._thread.join()
        self._listener.close()
        for thread in threads:
            thread.join()

    def drop(self, rank: int) -> None:
        """Have nothing more to do with `rank`, which was given up: what it still asks for does not
        count. Should it come back to life, it finds its connections closed.
        """
        with self._guard:
            self._dropped.add(rank)
            connections = [each for each, whose in self._open.items() if whose == rank]
        for connection in connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                plain, peer = self._listener.accept()
            except OSError as error:
                self._strangers.release()
                if self._closing:
                    return
                log.warning("could not take a connection: %s", error)
                time.sleep(RETRY_SECONDS)
                continue
            connection = Connection(plain, self._run)
            where = f"{peer[0]}:{peer[1]}"
            thread = threading.Thread(
                target=self._attend, args=(connection, where), name="flockstep peer", daemon=True
            )
            with self._guard:
                if self._closing:
                    connection.close()
                    return
                self._open[connection] = None
                self._threads.add(thread)
            thread.start()

    def _attend(self, connection: Connection, peer: str) -> None:
        try:
            try:
                role, rank = self._greet(connection)
            finally:
                self._strangers.release()
            with self._guard:
                if rank in self._dropped:
                    raise WireError(f"rank {rank} was given up")
                self._open[connection] = rank
            self._roles[role](connection, rank)
        except WireError as error:
            if not self._closing:
                log.warning("refused a connection from %s: %s", peer, error)
                self._refuse(connection, str(error))
        except OSError:
            pass  # the peer has gone; whoever counts on it hears so from the coordinator
        finally:
            connection.close()
            with self._guard:
                self._open.pop(connection, None)
                self._threads.discard(threading.current_thread())

    def _greet(self, connection: Connection) -> tuple[str, int]:
        """Who comes, and as what. Run and token are compared in constant time."""
        connection.deadline = time.monotonic() + HELLO_SECONDS
        try:
            header = connection.header()
            if header is None or header.kind != HELLO or header.length != TOKEN_BYTES:
                raise WireError("it did not say hello")
            token = connection.payload(header)
        except TimeoutError:
            raise WireError(f"it did not say hello within {HELLO_SECONDS:g} s") from None
        if not hmac.compare_digest(token, self._token):
            raise WireError("wrong token")
        if header.name not in self._roles or not (
            header.number.is_integer() and 0 <= header.number < 1 << 31
        ):
            raise WireError(f"unknown role {header.name!r} of rank {header.number}")
        connection.deadline = None
        connection.socket.settimeout(None)
        connection.send(Header(WELCOME, self._run))
        return header.name, int(header.number)

    def _refuse(self, connection: Connection, why: str) -> None:
        try:
            connection.socket.settimeout(HELLO_SECONDS)
            payload = why.encode()
            # With the run that the peer has named: it learns why, but no run that it did not know.
            connection.send(Header(REFUSED, connection.heard_run, length=len(payload)), payload)
        except OSError:
            pass  # who is refused need not listen
