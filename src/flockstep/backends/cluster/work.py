"""What a worker of a cluster does, wherever its process was started."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flockstep.backends.base import Program
from flockstep.backends.cluster.comm import ClusterComm, MakeShared, WorkerContext
from flockstep.backends.cluster.control_channel import ControlChannel
from flockstep.backends.cluster.groups import Groups
from flockstep.backends.cluster.wire import connect
from flockstep.errors import WorkerLost

CONNECT_SECONDS = 60.0
TELL_SECONDS = 0.1
# Torch gives up after this time, whatever the reason. Long: who is lost or frozen is for launchers
# and the coordinator to say, and a worker that is late by hours is neither.
GROUP_SECONDS = 86_400.0


@dataclass(frozen=True)
class Membership:
    """One worker's membership of a run: who it is there, and how it reaches the others."""

    rank: int
    workers: int
    seed: int
    on_failure: str
    address: tuple[str, int]  # of the coordinator's service
    store: tuple[str, int]  # of the store at which process groups are made
    run: bytes
    token: bytes
    host: str  # the address of this worker's own host
    # With the coordinator; None where a launcher of its own watches over that one.
    patience: float | None = None

    def __repr__(self) -> str:
        # The token is nobody's business.
        return f"Membership(rank={self.rank}, workers={self.workers})"


def work(
    membership: Membership,
    program: Program,
    make_shared: MakeShared,
    count_step: Callable[[], None] | None = None,
) -> Any:
    """Take part in a run as one of its workers; return what the program returns.

    `make_shared` makes what `comm.shared` gives. The coordinator is told of every step;
    only now and then where `count_step` is told, too."""
    connection = connect(
        membership.address,
        membership.run,
        membership.token,
        "worker",
        membership.rank,
        CONNECT_SECONDS,
    )
    control = ControlChannel(connection, membership.rank, membership.patience)
    steps = 0
    told = 0.0

    def count() -> None:
        nonlocal steps, told
        steps += 1
        if count_step is not None:
            count_step()
            if time.monotonic() < told + TELL_SECONDS:
                return
        control.tell("steps", steps=steps)
        told = time.monotonic()

    try:
        groups = Groups(
            membership.store,
            membership.run.hex(),
            membership.host,
            membership.rank,
            GROUP_SECONDS,
        )
        continues = membership.on_failure == "continue"
        context = WorkerContext(
            control, groups, membership.seed, continues, make_shared, count, control.meter
        )
        comm = ClusterComm(context, "world", tuple(range(membership.workers)))
        comm._barrier()  # the clock starts when all are there
        context.clock.start()
        comm.meter.clock = comm.now
        control.tell("began")
        try:
            value = program(comm)
        except BaseException:
            with suppress(WorkerLost):  # there is nobody to tell any more
                control.tell("raise")
            raise
        control.ask("end", "the end")  # others may still want what this worker has sent
        return value
    finally:
        control.close()
