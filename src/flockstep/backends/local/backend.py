"""The backend of local processes. What it is made of works on Linux alone, and is imported when a
run begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flockstep.backends.base import Backend, Launch, one_interrupt, require_linux
from flockstep.backends.heartbeat import PATIENCE_SECONDS, require_patience

if TYPE_CHECKING:
    from flockstep.backends.local.run import ForkServerProcess


class LocalProcesses(Backend):
    """Worker processes on this machine.

    They are forked from a server that has torch loaded. It starts with each launch and ends with
    it. To launch often, keep it: `with fs.LocalProcesses() as local: fs.launch(program, 4,
    backend=local)`.

    Fields:
        patience: a worker whose process has not run at all for that many seconds is lost. One that
            sleeps or computes for long is not. None: wait for ever, say for a debugger.
    """

    def __init__(self, patience: float | None = PATIENCE_SECONDS) -> None:
        require_linux("local")
        require_patience(patience)
        self.patience = patience
        self._kept: ForkServerProcess | None = None

    def __enter__(self) -> LocalProcesses:
        self._kept = self._start_server()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._kept is not None:
            self._kept.stop()
            self._kept = None

    def __repr__(self) -> str:
        return f"LocalProcesses(patience={self.patience!r})"

    @one_interrupt()
    def run(self, launch: Launch) -> list[Any]:
        return self.run_part(launch, first_rank=0)

    def run_part(self, launch: Launch, first_rank: int) -> list[Any]:
        """Run workers that are part of a larger world, in which the first of them has `first_rank`:
        errors and random streams name them by their ranks there."""
        from flockstep.backends.local.run import Run

        if self._kept is not None and self._kept.has_ended:
            self._kept = self._start_server()
        server = self._kept or self._start_server()
        run = Run(server, launch, first_rank, self.patience)
        try:
            with run:
                return run.wait()
        finally:
            # A kept server serves on, unless this run was interrupted while workers of it were
            # still there.
            if server is not self._kept or run.has_workers:
                server.stop()

    def _start_server(self) -> ForkServerProcess:
        from flockstep.backends.local.run import ForkServerProcess

        return ForkServerProcess()
