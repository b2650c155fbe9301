"""The launchers of one run, one process per rank: they find each other, start their workers and
end together.

A launcher's worker runs in a process of its own. So a worker that dies takes nothing with it: its
launcher says how it ended, goes on serving its shards of the shared tensors, and hears how the run
ends. Rank 0's launcher coordinates."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import threading
import time
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from flockstep.backends.base import Launch, Program
from flockstep.backends.cluster.comm import ClusterComm
from flockstep.backends.cluster.completion import LauncherChannel, ResultCollector
from flockstep.backends.cluster.coordinator import Coordinator
from flockstep.backends.cluster.homes import Homes
from flockstep.backends.cluster.service import Service
from flockstep.backends.cluster.shared import Directory, Peers, ShardedTensor
from flockstep.backends.cluster.wire import RUN_BYTES, TOKEN_BYTES, connect
from flockstep.backends.cluster.work import Membership, work
from flockstep.backends.heartbeat import Heartbeat
from flockstep.backends.local import LocalProcesses
from flockstep.comm import Comm
from flockstep.errors import FlockstepError, WorkerLost

LOOK_SECONDS = 0.05
GATHER_SECONDS = 300.0  # for all launchers to come
LEAVE_SECONDS = 3.0  # for all launchers to hear how the run ended


class RunFailed(BaseException):
    """Carries the failure of the run through the watch over this rank's own worker."""

    def __init__(self, error: FlockstepError) -> None:
        self.error = error


class Rendezvous:
    """One run, as the launcher of one rank sees it.

    `store` is where the launchers find each other, `host` the one address of this host to listen
    on. `secret` is what all ranks were given to know each other by; None: rank 0 makes one up and
    leaves it in the store."""

    def __init__(
        self,
        store: Store,
        host: str,
        rank: int,
        size: int,
        secret: str | None,
        on_failure: str,
        patience: float | None = None,
    ) -> None:
        self._store = store
        self._host = host
        self._rank = rank
        self._size = size
        self._secret = secret
        self._on_failure = on_failure
        self._patience = patience
        self._thread = threading.get_ident()
        self._parent = os.getppid()
        self._terminated_at: float | None = None
        self._stack = ExitStack()
        self._coordinator = Coordinator(size, on_failure) if rank == 0 else None
        self._collector = (
            None
            if self._coordinator is None
            else ResultCollector(self._coordinator, size, patience)
        )

    def __enter__(self) -> Rendezvous:
        with ExitStack() as stack:
            self.directory = self._meet(stack)
            if threading.current_thread() is threading.main_thread():
                before = signal.signal(signal.SIGTERM, self._note_termination)
                stack.callback(signal.signal, signal.SIGTERM, before)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def membership(self, seed: int, store: tuple[str, int]) -> Membership:
        """This rank's worker's. Process groups are made at the store of that address."""
        return Membership(
            rank=self._rank,
            workers=self._size,
            seed=seed,
            on_failure=self._on_failure,
            address=self.directory.addresses[0],
            store=store,
            run=self.directory.run,
            token=self.directory.token,
            host=self._host,
        )

    def launch(self, local: LocalProcesses, launch: Launch) -> list[Any]:
        """Run this rank's worker, say how it ended, and wait until all have ended."""
        watch = launch.watch

        def look(_: Any = None, seconds: float = 0.0) -> None:
            self._look(seconds)
            if self._coordinator is not None:
                self._coordinator.hand_on(launch.hear)
                if watch is not None:
                    watch(self._coordinator.steps)

        own: Any = None
        own_error: Exception | None = None
        try:
            try:
                worker = Launch(launch.program, 1, launch.seed, watch=look)
                (own,) = local.run_part(worker, first_rank=self._rank)
                self._channel.bring(own)
            except Exception as error:  # noqa: BLE001
                # Whatever it is: all ranks must hear of it.
                if isinstance(error, WorkerLost) and error.rank == self._rank:
                    self._channel.tell_lost(error)
                else:
                    own_error = error
                    self._channel.tell_raised(error)
            while not self._channel.is_over:
                look(seconds=LOOK_SECONDS)
        except RunFailed as failed:
            # Of a rank that was given up that is the news, not what its worker ran into then.
            is_given_up = isinstance(failed.error, WorkerLost) and failed.error.rank == self._rank
            failure = failed.error if is_given_up else own_error or failed.error
        else:
            if self._coordinator is not None:
                self._coordinator.hand_on(launch.hear)
            return self._results(own)
        raise failure  # out here, where it keeps its cause and gets no other

    def _results(self, own: Any) -> list[Any]:
        """All results on rank 0; elsewhere this rank's own. Everywhere, who was lost."""
        found = {} if self._collector is None else self._collector.results(own)
        found[self._rank] = own
        found |= {lost.rank: lost for lost in self._channel.lost if lost.rank is not None}
        return [found.get(rank) for rank in range(self._size)]

    def _look(self, seconds: float) -> None:
        """Listen for at most that long; raises what the run has failed of."""
        if self._collector is not None:
            self._collector.tick()
        error = self._channel.look(seconds)
        while self._channel.gone:
            self._service.drop(self._channel.gone.pop())
        if error is None and os.getppid() != self._parent:
            error = FlockstepError(f"what started the launcher of rank {self._rank} is gone")
        if error is not None:
            raise RunFailed(error)
        if (
            self._terminated_at is not None
            and time.monotonic() > self._terminated_at + LEAVE_SECONDS
        ):
            raise SystemExit(128 + signal.SIGTERM)

    def _look_while_telling(self) -> None:
        """Rank 0 does not take what it is told. What is heard meanwhile is for the thread that
        launches, not for the heartbeat's.
        """
        if threading.get_ident() == self._thread and not self._channel.is_hearing:
            self._look(0.0)

    def _beat(self) -> None:
        """Let the others know that this launcher lives."""
        self._channel.beat()
        if self._collector is not None:
            self._collector.beat()

    def _note_termination(self, number: int, frame: FrameType | None) -> None:
        """torchrun ends all processes of a host when one has failed: wait a moment to hear what
        it was.
        """
        self._terminated_at = time.monotonic()

    def _meet(self, stack: ExitStack) -> Directory:
        """Find the other launchers."""
        if self._rank == 0:
            self._store.set("run", secrets.token_hex(RUN_BYTES))
            if self._secret is None:
                self._store.set("token", secrets.token_hex(TOKEN_BYTES))
        run = bytes.fromhex(self._get("run", 0))
        if self._secret is None:
            token = bytes.fromhex(self._get("token", 0))
        else:
            token = hashlib.sha256(run + self._secret.encode()).digest()
        homes = Homes()
        roles: dict[str, Any] = {"tensors": lambda connection, _: homes.serve(connection)}
        if self._coordinator is not None and self._collector is not None:
            roles |= {"worker": self._coordinator.serve, "launcher": self._collector.serve}
        service = self._service = stack.enter_context(Service(self._host, run, token, roles))
        if self._rank == 0:
            self._store.set("address 0", " ".join(map(str, service.address)))
        connection = connect(self._address(0), run, token, "launcher", self._rank, GATHER_SECONDS)
        self._channel = LauncherChannel(connection, self._rank, self._patience)
        self._channel.be_patient(self._look_while_telling)
        stack.enter_context(Heartbeat(self._patience, self._beat))
        stack.callback(self._leave)
        # Only now do the others count on this rank: if it goes, rank 0 hears that its
        # connection has ended.
        self._store.set(f"address {self._rank}", " ".join(map(str, service.address)))
        return Directory(tuple(self._address(rank) for rank in range(self._size)), run, token)

    def _address(self, rank: int) -> tuple[str, int]:
        host, port = self._get(f"address {rank}", rank).split()
        return host, int(port)

    def _get(self, key: str, rank: int) -> str:
        try:
            return self._store.get(key).decode()
        except RuntimeError as error:  # torch raises kinds of its own, all of them RuntimeErrors
            raise WorkerLost(
                f"rank {rank} did not come within {GATHER_SECONDS:g} s: {error}", rank
            ) from error

    def _leave(self) -> None:
        """Rank 0 goes last, so that all hear how the run ended."""
        self._channel.close()
        if self._collector is None or self._coordinator is None:
            return
        if not self._channel.is_over:
            self._coordinator.fail(WorkerLost("the launcher of rank 0 has stopped", rank=0))
        self._collector.tick()
        deadline = time.monotonic() + LEAVE_SECONDS
        while not self._collector.is_empty and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 10)


def be_worker(
    comm: Comm, membership: Membership, directory: Directory, threads: int, program: Program
) -> Any:
    """In the worker's process. Of the comm of this process and its launcher only the count of
    steps is used.
    """
    torch.set_num_threads(threads)

    peers = Peers(directory, membership.rank)

    def make_shared(
        comm: ClusterComm, name: str, like: torch.Tensor, home: int | None, is_first: bool
    ) -> ShardedTensor:
        return ShardedTensor(comm, peers, name, like, home, is_first)

    return work(membership, program, make_shared, comm.elapse)
