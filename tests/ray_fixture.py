"""Ray, kept for the whole session with workers that are ready, and which processes are its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil

import flockstep as fs
from flockstep.backends.ray import Ray

READY_WORKERS = 4  # as many as most tests use; more are started for those that want more


@contextmanager
def kept_ray() -> Iterator[Ray]:
    with Ray() as backend:
        fs.launch(lambda comm: comm.barrier(), READY_WORKERS, backend)  # starting them is no test's business
        yield backend


def is_of_ray(process: psutil.Process) -> bool:
    """Whether a child of this process was started by Ray, which replaces workers that are killed when it likes."""
    try:
        return any("raylet" in parent.name() for parent in [process, *process.parents()])
    except psutil.NoSuchProcess:
        return True
