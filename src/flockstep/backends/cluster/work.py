"""What a worker of a cluster does, wherever its process was started."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flockstep.backends.base import Program
from flockstep.backends.cluster.comm import ClusterComm, Station
from flockstep.backends.cluster.groups import Groups
from flockstep.backends.cluster.line import Line
from flockstep.backends.cluster.wire import connect
from flockstep.comm import SharedTensor

CONNECT_SECONDS = 60.0
TELL_SECONDS = 0.1
# Groups are made while all members are known to come. Where one may be lost just then, the others
# try again without.
GROUP_SECONDS = {"stop": 1800.0, "continue": 20.0}


@dataclass(frozen=True)
class Ticket:
    """All that a worker needs to take part in a run."""

    rank: int
    workers: int
    seed: int
    on_failure: str
    address: tuple[str, int]  # of the coordinator's service
    store: tuple[str, int]  # of the store at which process groups are made
    run: bytes
    token: bytes
    host: str  # the address of this worker's own host

    def __repr__(self) -> str:
        return f"Ticket(rank={self.rank}, workers={self.workers})"  # the token is nobody's business


MakeShared = Callable[[ClusterComm, str, Tensor, int | None, bool], SharedTensor]


def work(
    ticket: Ticket,
    program: Program,
    make_shared: Callable[[Line], MakeShared],
    count_step: Callable[[], None] | None = None,
) -> Any:
    """Take part in a run as one of its workers; return what the program returns.

    `make_shared(line)` gives what serves `comm.shared`. The coordinator is told of every step; only
    now and then where `count_step` is told, too."""
    connection = connect(
        ticket.address, ticket.run, ticket.token, "worker", ticket.rank, CONNECT_SECONDS
    )
    line = Line(connection, ticket.rank)
    steps = 0
    told = 0.0

    def count() -> None:
        nonlocal steps, told
        steps += 1
        if count_step is not None:
            count_step()
            if time.monotonic() < told + TELL_SECONDS:
                return
        line.tell("steps", steps=steps)
        told = time.monotonic()

    try:
        groups = Groups(
            ticket.store,
            ticket.run.hex(),
            ticket.host,
            ticket.rank,
            GROUP_SECONDS[ticket.on_failure],
        )
        continues = ticket.on_failure == "continue"
        shared = make_shared(line)
        station = Station(line, groups, ticket.seed, continues, shared, count, line.meter)
        comm = ClusterComm(station, "world", tuple(range(ticket.workers)))
        comm._barrier()  # the clock starts when all are there
        station.clock.start()
        comm.meter.clock = comm.now
        line.tell("began")
        value = program(comm)
        line.ask("end", "the end")  # others may still want what this worker has sent
        return value
    finally:
        line.close()
