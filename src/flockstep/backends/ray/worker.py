"""The actor that runs a worker's program, and how what the program prints gets to the caller."""

from __future__ import annotations

import io
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import ray

from flockstep.backends.base import Stopped, usable_cores
from flockstep.backends.cluster import Membership, abandoned, work
from flockstep.backends.outcome import outcome_of, packed
from flockstep.backends.ray.parcel import Parcel, pack, unpack
from flockstep.randomness import seed_torch

STDOUT, STDERR = "stdout", "stderr"
Printed = tuple[str, str]
"""The name of the stream, and whole lines."""


@dataclass(frozen=True)
class Place:
    """Where a worker is."""

    node: str
    address: str


@dataclass(frozen=True)
class Ended:
    """What a worker has come to: its outcome, None if it was stopped, and whether its process can
    serve another run. One in which torch still waits for others would wait again, and for ever.
    """

    outcome: Parcel | None
    is_idle: bool


def node_id() -> str:
    """Ray's name for the host of this process."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


class WorkerActor:
    """A process that runs one program after another. It has torch loaded before it says that it
    is ready.
    """

    def __init__(self) -> None:
        # Ctrl-C reaches the launcher, which stops its workers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._printed: queue.SimpleQueue[Printed | None] = queue.SimpleQueue()
        # Torch loads this when the first optimizer is made, which no program should have to wait
        # for.
        import torch._dynamo  # noqa: F401

    def place(self) -> Place:
        return Place(node_id(), ray.util.get_node_ip_address())

    def run(self, membership: Membership, program: Parcel, homes: Any, neighbours: int) -> Ended:
        """Be a worker of a run. `neighbours` share this host."""
        with _printing_to(self._printed):
            try:
                outcome = outcome_of(lambda: _run(membership, program, homes, neighbours))
                parcel = packed(outcome, membership.rank, pack, unpack)
            except Stopped:
                parcel = None
        return Ended(parcel, is_idle=not abandoned)

    @ray.method(concurrency_group="beat")
    def beat(self) -> None:
        """Answers whatever the program does meanwhile."""

    @ray.method(concurrency_group="output")
    def output(self) -> Iterator[Printed]:
        """What the program prints, until it ends."""
        while (printed := self._printed.get()) is not None:
            yield printed


def _run(membership: Membership, program: Parcel, homes: Any, neighbours: int) -> Any:
    import torch

    from flockstep.backends.ray.shared import maker_of_shared

    torch.set_num_threads(max(1, usable_cores() // neighbours))
    seed_torch(membership.seed, membership.rank)
    make_shared = maker_of_shared(homes, membership.run.hex())
    return work(membership, unpack(program), make_shared)


@contextmanager
def _printing_to(printed: queue.SimpleQueue[Printed | None]) -> Iterator[None]:
    out, err = _Lines(STDOUT, printed), _Lines(STDERR, printed)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        out.flush()
        err.flush()
        printed.put(None)


class _Lines(io.TextIOBase):
    """A stream that hands on whole lines, so that workers' lines do not mix."""

    encoding = "utf-8"

    def __init__(self, name: str, printed: queue.SimpleQueue[Printed | None]) -> None:
        self._name = name
        self._printed = printed
        self._line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        lines, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            self._printed.put((self._name, lines + newline))
        return len(text)

    def flush(self) -> None:
        """Hand on the beginning of a line too."""
        if self._line:
            self._printed.put((self._name, self._line))
            self._line = ""
