"""The contract of a backend, and what all backends do alike."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from flockstep.comm import Comm
from flockstep.errors import InvalidField, WorkerLost
from flockstep.fields import require, require_choice, require_integer
from flockstep.randomness import require_seed

ON_FAILURE = ("stop", "continue")

Program = Callable[[Comm], Any]
Watcher = Callable[[Sequence[int]], None]
"""Called now and then while workers run, with the steps that each of them has done."""
Hearer = Callable[[str], None]
"""Called with what workers tell the launcher, soon after they do."""

PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Launch:
    """What a backend is asked to run. Its fields are checked when it is made: no backend has to.

    Fields: program: plain blocking code of one worker, called with its comm. workers: how many.
        seed: decides everything random. on_failure: what happens when a worker's process dies:
        "stop" or "continue". watch: called now and then with the steps that each worker has done.
        hear: called with each text that a worker gives to `comm.tell`. What these two raise ends
        the run.

    Example:
        fs.Simulator().run(fs.Launch(lambda comm: comm.rank, workers=8))
    """

    program: Program
    workers: int
    seed: int = 0
    on_failure: str = "stop"
    watch: Watcher | None = None
    hear: Hearer | None = None

    def __post_init__(self) -> None:
        require(callable(self.program), "program", "be callable", self.program)
        require_integer("workers", self.workers, 1)
        require_seed(self.seed)
        require_choice("on_failure", self.on_failure, ON_FAILURE)
        require(self.watch is None or callable(self.watch), "watch", "be callable", self.watch)
        require(self.hear is None or callable(self.hear), "hear", "be callable", self.hear)


class Stopped(BaseException):
    """The launcher asked this worker to stop; unwinds the program so that its `finally` blocks
    run.
    """


class Backend(ABC):
    """Starts workers, gives each its `Comm`, and brings back what they return."""

    is_virtual: ClassVar[bool] = False
    """Whether time passes only as workers say, and all of them share this process."""

    @property
    def is_lead(self) -> bool:
        """Whether this process speaks for the run. Where several processes launch together, one
        of them does.
        """
        return True

    @property
    def is_restart(self) -> bool:
        """Whether a launch that failed before is tried again, as torchrun does."""
        return False

    def size(self, workers: int | None) -> int:
        """How many workers a run has for which `workers` were asked."""
        if workers is None:
            raise InvalidField("'workers' must be given")
        require_integer("workers", workers, 1)
        return workers

    @abstractmethod
    def run(self, launch: Launch) -> list[Any]:
        """Run `launch.program(comm)` once per worker; return the results in rank order.

        With `on_failure="continue"` the place of a lost worker holds its `WorkerLost`; raise it
        when nobody is left."""


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Ctrl-C interrupts what is done inside once. Until it has been cleaned up after, others are
    ignored, as they would leave workers behind. Whoever sets another handler inside keeps it.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before):  # others cannot be interrupted, or not by Python
        yield
        return
    count = itertools.count()

    def interrupt(number: int, frame: FrameType | None) -> Any:
        if next(count) == 0:
            return before(number, frame)
        return None

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def require_linux(backend: str) -> None:
    """Raise unless this is Linux, whose pipes, locks, shared memory and process control the
    backends of real processes are built on. The simulator runs wherever torch does.
    """
    if sys.platform != "linux":
        raise InvalidField(
            f"backend {backend!r} needs Linux (this is {sys.platform}): use backend='sim'"
        )


def usable_cores() -> int:
    """How many cores this process may use: those that SLURM or taskset leave to it, where the
    system can say so.
    """
    return len(usable_core_numbers()) or os.cpu_count() or 1


def usable_core_numbers() -> list[int]:
    """Their numbers; none where the system cannot say so."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def source_line(frame: FrameType | None) -> str:
    """Where a worker is: its innermost line outside this library, or the outermost inside it."""
    line = "unknown line"
    while frame is not None and frame.f_globals.get("__name__") != "threading":
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not frame.f_code.co_filename.startswith(PACKAGE):
            break
        frame = frame.f_back
    return line


def lost_worker(
    rank: int,
    exit_code: int | None,
    step: int,
    seconds: float | None,
    frozen_seconds: float | None = None,
) -> WorkerLost:
    """The error for a worker whose process has ended; a negative exit code is the signal that
    killed it. One that was frozen was killed because of that.
    """
    if frozen_seconds is not None:
        how = f"has not moved for {frozen_seconds:.1f} s"
    elif exit_code is None:
        how = "went away"
    elif exit_code < 0:
        # Most real-time signals have no name.
        names = {number.value: number.name for number in signal.Signals}
        how = f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"
    else:
        how = f"exited with {exit_code}"
    message = f"rank {rank} {how} after step {step}"
    return WorkerLost(message, rank, exit_code, step, seconds, frozen_seconds)


def describe_deadlock(
    waits: Sequence[str | None], first_rank: int = 0, lost: Collection[int] = ()
) -> str:
    """What each worker waits in and where; None: its program has ended, or it is among the
    `lost`.
    """
    lines = []
    for index, wait in enumerate(waits):
        doing = (
            f"waits in {wait}" if wait else "was lost" if index in lost else "has ended its program"
        )
        lines.append(f"  rank {first_rank + index} {doing}")
    return "\n".join(["no worker can go on:", *lines])
