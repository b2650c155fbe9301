"""Starts simulated workers as threads of this process and sees that all of them end."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, ClassVar

import torch

from flockstep.backends.base import Backend, Launch, Program, one_interrupt, usable_cores
from flockstep.backends.sim.comm import SimComm
from flockstep.backends.sim.compute import Compute
from flockstep.backends.sim.fate import Fate
from flockstep.backends.sim.faults import Faults
from flockstep.backends.sim.group import SimGroup
from flockstep.backends.sim.losses import leave_groups
from flockstep.backends.sim.scheduler import Cancelled, Scheduler, Slot, loss_of
from flockstep.backends.sim.threads import require_room, start_all
from flockstep.backends.sim.torch_states import LeftAlone, TorchStates
from flockstep.backends.sim.transfers import Transfers
from flockstep.errors import worker_error
from flockstep.fields import require, require_integer
from flockstep.network import PRESETS, Network

LOOK_SECONDS = 0.1
# For workers to unwind, before they are left behind as daemon threads: all, and each.
UNWIND_SECONDS = 1.5
UNWIND_PER_WORKER = 0.01


@dataclass(frozen=True)
class Simulator(Backend):
    """Workers in virtual time. `lanes` of them compute side by side (None: one for each core).

    `network` may be the name of a preset, or a text such as "latency=20ms,bandwidth=100Mbit/s";
    `compute` the seconds of a step. `faults` says which workers die or pause, and when; None: none.
    """

    is_virtual: ClassVar[bool] = True

    network: Network = PRESETS["lan-1g"]
    compute: Compute = field(default_factory=Compute)
    lanes: int | None = None
    faults: Faults | None = None

    def __post_init__(self) -> None:
        if isinstance(self.network, str):
            object.__setattr__(self, "network", Network.read(self.network))
        rule = "be one such as fs.Network.preset('wan-100m')"
        require(isinstance(self.network, Network), "network", rule, self.network)
        object.__setattr__(self, "compute", Compute.read(self.compute))
        object.__setattr__(self, "faults", Faults.read(self.faults))
        if self.lanes is not None:
            require_integer("lanes", self.lanes, 1)

    def size(self, workers: int | None) -> int:
        size = super().size(workers)
        self.network.require_workers(size)
        self.compute.require_workers(size)
        if self.faults is not None:
            self.faults.require_workers(size)
        return size

    @one_interrupt()
    def run(self, launch: Launch) -> list[Any]:
        self.size(launch.workers)  # complains of workers that the settings do not fit
        require_room(launch.workers)
        simulation = _Simulation(self, launch, TorchStates(launch.seed, launch.workers))
        threads_before, random_before = torch.get_num_threads(), torch.get_rng_state()
        # One intra-op thread per worker: results must not depend on how many lanes there are.
        torch.set_num_threads(1)
        try:
            return simulation.run()
        finally:
            torch.set_num_threads(threads_before)
            torch.set_rng_state(random_before)


def run_aside(
    program: Program, workers: int, seed: int = 0, lost: Collection[int] = ()
) -> list[Any]:
    """Run `program` on simulated workers one after the other, beside whatever else goes on. Those
    that are `lost` die as soon as they compute; the others go on without them.

    Also from within a simulated worker: torch's random stream is left alone, so the program must
    not draw from it.
    """
    faults = Faults(deaths=dict.fromkeys(lost, "1 step")) if lost else None
    backend = Simulator(PRESETS["ideal"], lanes=1, faults=faults)
    return _Simulation(
        backend, Launch(program, workers, seed, on_failure="continue"), LeftAlone()
    ).run()


class _Simulation:
    """One run: its threads, their results, the first failure."""

    def __init__(
        self, backend: Simulator, launch: Launch, streams: TorchStates | LeftAlone
    ) -> None:
        workers, seed = launch.workers, launch.seed
        lanes = min(backend.lanes or usable_cores(), workers)
        self._scheduler = Scheduler(workers, lanes, streams)
        self._program = launch.program
        self._watch = launch.watch
        self._hear = launch.hear
        self._told: SimpleQueue[str] = SimpleQueue()
        self._results: list[Any] = [None] * workers
        self._failed_rank = 0
        ranks = tuple(range(workers))
        world = SimGroup(ranks, backend.network.between(ranks))
        groups = {world.name: world}
        transfers = Transfers(self._scheduler, backend.network, workers, seed)
        if backend.faults is not None:
            self._expect(backend.faults, launch, groups, transfers)
        self._comms = [
            SimComm(
                self._scheduler,
                groups,
                world,
                rank,
                seed,
                transfers,
                backend.compute.stopwatch(seed, rank),
                self._scheduler.slots[rank].meter,
                self._told.put,
            )
            for rank in ranks
        ]

    def _expect(
        self, faults: Faults, launch: Launch, groups: dict[str, SimGroup], transfers: Transfers
    ) -> None:
        """Faults will come, and groups go on without who is lost."""
        scheduler = self._scheduler
        scheduler.may_lose = faults.kill
        scheduler.goes_on = launch.on_failure == "continue"
        scheduler.after_death.append(lambda lost: leave_groups(lost, scheduler, groups, transfers))
        for slot in scheduler.slots:
            slot.fate = Fate(faults, launch.seed, slot.rank)
            slot.death = slot.fate.death

    def run(self) -> list[Any]:
        scheduler = self._scheduler
        for slot in scheduler.slots:
            slot.thread = threading.Thread(
                target=self._work, args=(slot,), name=f"flockstep-{slot.rank}", daemon=True
            )
        try:
            start_all([slot.thread for slot in scheduler.slots if slot.thread])
            scheduler.start()
            while not scheduler.finished.wait(LOOK_SECONDS) and scheduler.error is None:
                self._look()
        except BaseException as error:
            # Ctrl-C, or the watcher failed: the workers must not go on alone.
            scheduler.fail(error)
            raise
        finally:
            self._join()
            scheduler.close()
        self._look()
        if scheduler.error is not None:
            raise worker_error(self._failed_rank, scheduler.error)
        return self._outcomes()

    def _outcomes(self) -> list[Any]:
        """What each worker returned, or its loss. If nobody is left, the last loss is raised."""
        slots = self._scheduler.slots
        if len(self._scheduler.lost) == len(slots):
            raise loss_of(max(slots, key=lambda slot: (slot.death or 0, slot.rank)))
        return [
            result if slot.loss is None else slot.loss
            for slot, result in zip(slots, self._results, strict=True)
        ]

    def _look(self) -> None:
        """Tell those who watch and hear how far the workers are, and what they said."""
        while self._hear is not None and not self._told.empty():
            self._hear(self._told.get())
        if self._watch is not None:
            self._watch([slot.steps for slot in self._scheduler.slots])

    def _work(self, slot: Slot) -> None:
        """The body of a worker's thread. An interruption may arrive anywhere in it, on the way
        out too.
        """
        with suppress(Cancelled):
            self._run_program(slot)
        while slot.is_interruptible:
            with suppress(Cancelled), self._scheduler.mutex:
                slot.is_interruptible = False
                _interrupt(slot, None)  # takes back one that was sent and has not arrived

    def _run_program(self, slot: Slot) -> None:
        scheduler, comm = self._scheduler, self._comms[slot.rank]
        error: BaseException | None = None
        try:
            scheduler.begin(slot)
            comm.start_stopwatch()
            self._results[slot.rank] = self._program(comm)
        except BaseException as raised:  # noqa: BLE001
            # Whatever ended the program ends the run, which raises it.
            error = raised
            is_own = slot.loss is None and not isinstance(raised, Cancelled)
            if scheduler.error is None and is_own:
                self._failed_rank = slot.rank
        scheduler.end(slot, error)

    def _join(self) -> None:
        """See every thread off. One that was deep in its own computing is interrupted, then left
        behind.
        """
        workers = len(self._scheduler.slots)
        deadline = time.monotonic() + UNWIND_SECONDS + workers * UNWIND_PER_WORKER
        for slot in self._scheduler.slots:
            while (
                slot.thread is not None and slot.thread.is_alive() and time.monotonic() < deadline
            ):
                slot.thread.join(LOOK_SECONDS)
                with self._scheduler.mutex:  # so that nobody is interrupted while waking the others
                    if slot.is_interruptible:
                        _interrupt(slot, Cancelled)


def _interrupt(slot: Slot, error: type[BaseException] | None) -> None:
    """Have `error` raised in the worker's thread, wherever it is; None: no more."""
    assert slot.thread is not None and slot.thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(slot.thread.ident), ctypes.py_object(error) if error else None
    )
