"""How many threads the system gives."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from flockstep.errors import InvalidField

MAPS_PER_THREAD = 3  # pieces of memory: its stack, a guard page, and what it allocates


def require_room(workers: int) -> None:
    """Complain of more workers than the system has threads for, before any is started."""
    for limit, threads in _limits():
        if workers > threads:
            raise InvalidField(
                f"'workers' must be at most {threads} in the simulator, where each is a thread: "
                f"{limit} allows no more (got {workers})"
            )


def start_all(threads: list[threading.Thread]) -> None:
    """Start them. If the system gives no more, say how many it gave; those are the caller's."""
    for count, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:
            raise InvalidField(
                f"'workers' must be at most {count} in the simulator, where each is a thread: "
                f"the system gives no more (got {len(threads)})"
            ) from error


def _limits() -> Iterator[tuple[str, int]]:
    """Limits that this system tells, by name, in threads. What it does not tell is left out."""
    for path, per_thread in (
        ("/proc/sys/kernel/threads-max", 1),
        ("/proc/sys/kernel/pid_max", 1),
        ("/proc/sys/vm/max_map_count", MAPS_PER_THREAD),
        ("/sys/fs/cgroup/pids.max", 1),
    ):
        with suppress(OSError, ValueError):  # another system, or "max"
            yield path, int(Path(path).read_text()) // per_thread
    if os.name == "posix" and os.getuid() != 0:
        import resource

        processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if processes != resource.RLIM_INFINITY:
            yield "'ulimit -u'", processes
