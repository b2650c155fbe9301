"""One launch: workers told of each other, watched, and their outcomes collected."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayActorError
from torch._C._distributed_c10d import TCPStore

from flockstep.backends.base import Launch
from flockstep.backends.cluster import RUN_BYTES, TOKEN_BYTES, Coordinator, Membership, Service
from flockstep.backends.heartbeat import Heartbeat, Watchdog
from flockstep.backends.outcome import result_of
from flockstep.backends.ray.actor_pool import ActorPool
from flockstep.backends.ray.parcel import pack, unpack
from flockstep.backends.ray.worker import Ended
from flockstep.errors import FlockstepError

LOOK_SECONDS = 0.05
# For workers that are asked to stop, before they are killed: others take long to start.
UNWIND_SECONDS = 1.0


class Run:
    """A run of a program by the first workers of a pool."""

    def __init__(self, pool: ActorPool, launch: Launch, patience: float | None = None) -> None:
        self._pool = pool
        self._launch = launch
        self._patience = patience
        self._watchdog = Watchdog(patience)
        self._coordinator = Coordinator(launch.workers, launch.on_failure)
        self._results: list[Any] = [None] * launch.workers
        # Of the workers that have not ended, by the reference to their outcome.
        self._ranks: dict[Any, int] = {}
        self._outputs: dict[Any, int] = {}  # what they print, and who
        self._actors: dict[int, Any] = {}  # by rank, and the homes behind them
        self._beats: dict[int, tuple[int, Any]] = {}  # how many were answered, and the next
        self._spent: list[int] = []  # ranks whose processes serve no other run
        self._stack = ExitStack()

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            self._begin(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _begin(self, stack: ExitStack) -> None:
        parcel = ray.put(pack(self._launch.program, "program"))
        run, token = secrets.token_bytes(RUN_BYTES), secrets.token_bytes(TOKEN_BYTES)
        workers = self._pool.workers(self._launch.workers)
        stack.callback(self._pool.forget, run.hex())
        service = self._service = stack.enter_context(
            Service(self._pool.address, run, token, {"worker": self._coordinator.serve})
        )
        stack.enter_context(Heartbeat(self._patience, self._coordinator.beat))
        store = _store(self._pool.address)
        stack.callback(lambda: store)  # lives as long as the run
        stack.callback(self._replace_spent)
        stack.callback(self._stop_workers)
        neighbours = Counter(place.node for _, place in workers)
        for rank, (actor, place) in enumerate(workers):
            membership = Membership(
                rank=rank,
                workers=self._launch.workers,
                seed=self._launch.seed,
                on_failure=self._launch.on_failure,
                address=service.address,
                store=(self._pool.address, store.port),
                run=run,
                token=token,
                host=place.address,
                patience=self._patience,
            )
            self._actors[rank] = actor
            self._ranks[
                actor.run.remote(membership, parcel, self._pool.homes, neighbours[place.node])
            ] = rank
            self._outputs[actor.output.options(num_returns="streaming").remote()] = rank
        self._actors |= dict(enumerate(self._pool.homes, start=len(workers)))

    def wait(self) -> list[Any]:
        """Watch until all workers have ended; raise the first failure."""
        watch = self._launch.watch
        while self._ranks or not self._coordinator.is_over:
            self._listen(LOOK_SECONDS)
            self._look_for_frozen()
            self._coordinator.tick()
            if self._coordinator.failure is not None:
                raise self._coordinator.failure
            self._coordinator.hand_on(self._launch.hear)
            if watch is not None:
                watch(self._coordinator.steps)
        self._print_the_rest()
        self._coordinator.hand_on(self._launch.hear)
        return [
            self._coordinator.lost.get(rank, result) for rank, result in enumerate(self._results)
        ]

    def _listen(self, seconds: float) -> None:
        """Take in what workers print and what they come to; wait a moment for it."""
        pending = [*self._ranks, *self._outputs]
        ready, _ = ray.wait(pending, num_returns=1, timeout=seconds)
        # All that is there now, without waiting for more.
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0) if ready else (ready, [])
        for reference in ready:
            if reference in self._ranks:
                self._collect(reference)
            else:
                self._print(reference)

    def _look_for_frozen(self) -> None:
        """Give those up that do not move any more. Ray kills them, also if they come back to life
        before it does.
        """
        for rank, seconds in self._watchdog.look(self._signs_of_life).items():
            actor = self._actors.pop(rank)
            if rank >= self._launch.workers:
                ray.kill(actor)  # a home: whoever needs it hears so
                continue
            self._pool.lose(rank)
            # Where its host is frozen, too, Ray would not tell for long that it has ended.
            for awaited in (self._ranks, self._outputs):
                for reference in [each for each, whose in awaited.items() if whose == rank]:
                    del awaited[reference]
            self._coordinator.declare_lost(rank, frozen_seconds=seconds)
            self._service.drop(rank)

    def _signs_of_life(self) -> dict[int, int]:
        """How often those who have not ended, and the homes, have answered; who has is asked
        again.
        """
        ended = set(range(self._launch.workers)) - set(self._ranks.values())
        asked = {reference: rank for rank, (_, reference) in self._beats.items()}
        answered = ray.wait([*asked], num_returns=len(asked), timeout=0)[0] if asked else []
        due = {asked[reference] for reference in answered} | (self._actors.keys() - self._beats)
        for rank in due & self._actors.keys():
            count, _ = self._beats.get(rank, (0, None))
            self._beats[rank] = count + 1, self._actors[rank].beat.remote()
        return {rank: self._beats[rank][0] for rank in self._actors.keys() - ended}

    def _collect(self, reference: Any) -> None:
        """Take over what a worker has come to."""
        rank = self._ranks.pop(reference)
        try:
            ended: Ended = ray.get(reference)
        except RayActorError:
            self._pool.lose(rank)
            self._coordinator.declare_gone(rank)
            return
        if not ended.is_idle:
            self._spent.append(rank)
        if ended.outcome is None:
            return
        try:
            self._results[rank] = result_of(rank, ended.outcome, unpack)
        except FlockstepError as error:
            self._coordinator.fail(error)

    def _print(self, output: Any) -> None:
        try:
            name, text = ray.get(next(output))
        except (StopIteration, RayActorError):
            del self._outputs[output]
            return
        stream = getattr(sys, name)
        if stream is None:
            return
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody takes it any more, which is no reason to fail the run

    def _print_the_rest(self) -> None:
        while self._outputs:
            for output in ray.wait([*self._outputs], num_returns=1)[0]:
                self._print(output)

    def _stop_workers(self) -> None:
        """Ask those who still run to stop, then make them."""
        if not self._ranks:
            return
        self._coordinator.fail(FlockstepError("the run has been stopped"))
        deadline = time.monotonic() + UNWIND_SECONDS
        while self._ranks and time.monotonic() < deadline:
            self._listen(LOOK_SECONDS)
        for rank in self._ranks.values():
            self._pool.lose(rank)

    def _replace_spent(self) -> None:
        for rank in self._spent:
            self._pool.lose(rank)


def _store(address: str) -> TCPStore:
    """What process groups are made at. It listens on that address alone, where torch would
    listen on all.
    """
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=False,
        )
