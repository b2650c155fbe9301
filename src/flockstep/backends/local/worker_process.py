"""What a worker process does from its birth to its end."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

import torch

from flockstep.backends.base import Stopped, usable_cores
from flockstep.backends.heartbeat import Heartbeat
from flockstep.backends.local import payload
from flockstep.backends.local.arena import Arena
from flockstep.backends.local.comm import LocalComm, LocalGroup
from flockstep.backends.local.process_slot import (
    BEATS,
    BEGAN,
    ENDED,
    OUTCOME,
    PROCESS,
    RUNNING,
    STATE,
    ProcessSlot,
    StatusTable,
    WakeupPipes,
)
from flockstep.backends.local.survivors import SurvivingComm
from flockstep.backends.outcome import outcome_of, packed
from flockstep.comm import Clock
from flockstep.randomness import seed_torch

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Orders:
    """Where things lie in the arena, and what the run is."""

    workers: int
    first_rank: int  # of these workers, where they are part of a larger world
    seed: int
    on_failure: str
    patience: float | None
    status_table: int
    group: int
    program: int


def work(arena: Arena, pipes: WakeupPipes, orders: Orders, rank: int) -> None:
    """Run the program as worker `rank` and leave its outcome in the arena."""
    # Ctrl-C reaches the launcher, which stops its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    _die_with_parent()
    _print_whole_lines()
    table = StatusTable(arena, orders.status_table, orders.workers)
    slot = ProcessSlot(arena, table, pipes, rank)
    slot.status[STATE] = RUNNING
    slot.status[PROCESS] = os.getpid()

    def beat() -> None:
        slot.status[BEATS] += 1

    try:
        with Heartbeat(orders.patience, beat):
            slot.status[OUTCOME] = packed(
                outcome_of(lambda: _run(slot, orders)),
                orders.first_rank + rank,
                functools.partial(payload.store, arena),
                functools.partial(payload.load_copy, arena),
            )
    except Stopped:
        return
    slot.status[STATE] = ENDED


def _run(slot: ProcessSlot, orders: Orders) -> Any:
    torch.set_num_threads(max(1, usable_cores() // orders.workers))
    seed_torch(orders.seed, orders.first_rank + slot.rank)
    program = payload.load_private(slot.arena, orders.program)
    group = LocalGroup(slot, orders.group, tuple(range(orders.workers)))
    kind = SurvivingComm if orders.on_failure == "continue" else LocalComm
    comm = kind(slot, group, orders.seed, slot.meter, Clock())
    with comm.unmetered():
        comm.barrier()  # the clock starts when all are there
    comm.clock.start()
    slot.meter.clock = comm.now
    slot.status[BEGAN] = time.monotonic_ns()
    return program(comm)


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise Stopped


def _print_whole_lines() -> None:
    """Write a line of output at once, so that workers' lines do not mix, also under
    PYTHONUNBUFFERED.
    """
    sys.stdout, sys.stderr = map(_line_buffered, (sys.stdout, sys.stderr))


def _line_buffered(stream: TextIO) -> TextIO:
    return os.fdopen(
        stream.fileno(),
        "w",
        buffering=1,
        encoding=stream.encoding,
        errors=stream.errors,
        closefd=False,
    )


def _die_with_parent() -> None:
    """Have the kernel end this process if the server that forked it dies first."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
