"""Ray, kept for the whole session with workers that are ready."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import flockstep as fs
from flockstep.backends.ray import Ray

READY_WORKERS = 4  # as many as most tests use; more are started for those that want more


@contextmanager
def kept_ray() -> Iterator[Ray]:
    with Ray() as backend:
        # Starting them is no test's business.
        fs.launch(lambda comm: comm.barrier(), READY_WORKERS, backend)
        yield backend
