"""The contract of a backend, and what all backends do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from flockstep.comm import Comm

Program = Callable[[Comm], Any]
Watcher = Callable[[Sequence[int]], None]
"""Called now and then while workers run, with the steps that each of them has done."""

PACKAGE = str(Path(__file__).parents[1])


class Backend(ABC):
    """Starts workers, gives each its `Comm`, and brings back what they return."""

    @abstractmethod
    def run(
        self,
        program: Program,
        workers: int,
        *,
        seed: int = 0,
        on_failure: str = "stop",
        watch: Watcher | None = None,
    ) -> list[Any]:
        """Run `program(comm)` once per worker; return the results in rank order."""


def stream_seed(seed: int, rank: int) -> int:
    """The seed of a worker's own random stream: far from that of every other (seed, rank)."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0])


def source_line(frame: FrameType | None) -> str:
    """Where a worker is: its innermost line outside this library, or the outermost inside it."""
    line = "unknown line"
    while frame is not None and frame.f_globals.get("__name__") != "threading":
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not frame.f_code.co_filename.startswith(PACKAGE):
            break
        frame = frame.f_back
    return line


def describe_deadlock(waits: Sequence[str | None]) -> str:
    """What each rank waits in and where; None: its program has ended."""
    lines = [
        f"  rank {rank} waits in {wait}" if wait else f"  rank {rank} has ended its program"
        for rank, wait in enumerate(waits)
    ]
    return "\n".join(["no worker can go on:", *lines])
