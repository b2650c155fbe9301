"""The connection to Ray: to a cluster that is there, or to one that is started for the purpose
and stopped again.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType

LOOPBACK = "127.0.0.1"
LONGEST_FOLDER = 20
# One machine takes as many workers as are asked for, as local processes do: Ray is not to count its
# cores.
ROOM = 10_000


@functools.cache
def _secret() -> str:
    """What a process must know to join the clusters that this process starts. Ray reads it once."""
    return secrets.token_hex(32)


def _settings() -> dict[str, str]:
    """Ray's environment while it starts a cluster here. What the caller has set about
    authentication stays.
    """
    settings = {
        # The name misleads: with "0", on any system, Ray lets a node have the loopback address and
        # then listens there alone. Otherwise it turns 127.0.0.1 into the address of a network card.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        # Ray asks for a token by itself. Without one in its environment it would write one into the
        # user's home.
        settings["RAY_AUTH_TOKEN"] = _secret()
    return settings


class Session:
    """A connection to Ray for the length of a `with`. What was not started here is not stopped
    here.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.is_own = False  # whether the cluster was started here
        self.address = LOOPBACK  # of this process, for workers to reach it by
        # For workers to find room: nothing can be added to a cluster of one machine.
        self.room_seconds = 5.0

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            stack.enter_context(_restored_environment())
            address = os.environ.get("RAY_ADDRESS")
            if address is None and not _is_connected():
                self._start(stack)
                self.is_own = True
            else:
                self._join(stack, address)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        # The paths of Ray's sockets must be short, so a long TMPDIR is no place for them.
        is_short = len(tempfile.gettempdir()) <= LONGEST_FOLDER
        folder = tempfile.mkdtemp(prefix="flockstep-ray-", dir=None if is_short else "/tmp")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        os.environ.update(_settings())
        import ray
        from ray._private import ray_constants

        # Ray reads its settings when it is first imported, which the caller may have done long
        # before.
        _set(stack, ray_constants, "ENABLE_RAY_CLUSTER", False)
        with _quiet(stack):
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=ROOM,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                _node_ip_address=LOOPBACK,
                _temp_dir=folder,
                _system_config={
                    # Objects that nobody holds any more are freed at once, and their memory, whose
                    # pages are there, is used again: fresh pages cost many times the copy into
                    # them.
                    "free_objects_period_milliseconds": 0,
                    "prestart_worker_first_driver": False,
                    # Ray lets its workers give way to everybody else (nice 15): beside a few busy
                    # processes they hardly run at all, and take minutes to start.
                    "worker_niceness": 0,
                },
            )

    def _join(self, stack: ExitStack, address: str | None) -> None:
        import ray

        if not ray.is_initialized():
            with _quiet(stack):
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        self.address = ray.util.get_node_ip_address()
        self.room_seconds = 60.0  # a cluster may have to start machines first


def _is_connected() -> bool:
    import ray

    return ray.is_initialized()


@contextmanager
def _restored_environment() -> Iterator[None]:
    """Undo what Ray does to the environment of this process, when it is left."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in {
            name for name in {*os.environ, *before} if name.startswith(("RAY_", "PYTHONBREAKPOINT"))
        }:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def _set(stack: ExitStack, module: ModuleType, name: str, value: object) -> None:
    """Set what Ray has no public setting for, until the stack is closed."""
    stack.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


@contextmanager
def _quiet(stack: ExitStack) -> Iterator[None]:
    """Connect to Ray inside, without its effects on the caller's process; disconnect when the
    stack is closed.
    """
    from ray._private import worker

    # Ray prints on the caller's standard output that a worker died; here an error or a result says
    # so.
    _set(stack, worker, "_worker_logs_enabled", False)
    before = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        stack.callback(signal.signal, signal.SIGTERM, before)
    stack.callback(worker.shutdown)
    yield
    # Ray has taken SIGTERM over. Where it would have killed, it now ends the launch in good order.
    if is_main:
        signal.signal(signal.SIGTERM, _exit if before is signal.SIG_DFL else before)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
