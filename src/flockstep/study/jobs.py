"""Jobs on this machine: processes that carry out runs side by side, one thread each.

A job is started once and takes run after run. One that dies takes its run with it, which is
recorded as failed, and another takes its place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import cloudpickle

from flockstep.backends import usable_core_numbers
from flockstep.errors import FlockstepError
from flockstep.study.one_run import Order, lost_record
from flockstep.study.records import Record

LOOK_SECONDS = 0.25
END_SECONDS = 5.0
LONGEST_TAIL = 2_000  # characters of what a job that died had said

# A job imports what the study can import, whatever that was started as.
_SERVE = """
import json, sys
connection, lifeline, core, path = json.loads(sys.argv[1])
sys.path[:] = path
from flockstep.study.job_process import main
main(connection, lifeline, core)
"""

Tick = Callable[[], None]


class Job:
    """One process, and the run that it is at. Simulated runs stay on `core`, if one is given."""

    def __init__(self, core: int | None = None) -> None:
        self.core = core
        self.connection, theirs = Pipe()
        heard, self._lifeline = os.pipe()
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  it is open while the job lives
        arguments = json.dumps([theirs.fileno(), heard, core, sys.path])
        # A session of its own: Ctrl-C in a terminal must reach the study alone.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, arguments],
            pass_fds=[theirs.fileno(), heard],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            start_new_session=True,
        )
        theirs.close()
        os.close(heard)
        self.order: Order | None = None
        self.is_new = True

    def take(self, order: Order) -> None:
        self.order = order
        self.connection.send_bytes(cloudpickle.dumps(order))

    def record(self) -> Record:
        """The record of the run that it was at. Raises EOFError where it has died."""
        made: Record = cloudpickle.loads(self.connection.recv_bytes())
        self.order = None
        self.is_new = False
        return made

    def why_it_died(self) -> str:
        """In words, when it has."""
        code = self._ended()
        how = f"exit code {code}" if code >= 0 else f"{signal.Signals(-code).name}"
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-LONGEST_TAIL:]
        return f"the process of the run ended with {how}" + (f": {said}" if said else "")

    def end(self) -> None:
        """End the process, in the middle of a run if need be."""
        self.connection.close()
        if self.order is None:
            self._ended()  # of itself, as there are no more orders
        os.close(self._lifeline)
        self._ended()
        self._said.close()

    def _ended(self) -> int:
        """The exit code of a process that is about to end, and is ended if it does not."""
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def least_taken(cores: Sequence[int]) -> list[int]:
    """Those first on which the fewest programs stay, as a job of another study may. Where the
    system does not tell, they are as they were.
    """
    taken = Counter[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            is_program = (process / "cmdline").read_bytes() != b""  # and not the kernel's own
            allowed = os.sched_getaffinity(int(process.name))
            if is_program and len(allowed) == 1:
                taken.update(allowed)
    return sorted(cores, key=lambda core: taken[core])


class Jobs:
    """So many jobs, for the length of a `with`."""

    def __init__(self, count: int) -> None:
        if os.name != "posix":
            raise FlockstepError("the jobs of a study need Linux or another POSIX system")
        self._count = count
        self._jobs: list[Job] = []
        cores = least_taken(usable_core_numbers())
        self._cores = cores if count <= len(cores) else []  # else the system divides them better

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *exception: object) -> None:
        for job in self._jobs:
            job.end()
        self._jobs = []

    def run(
        self, together: Sequence[Order], alone: Sequence[Order], tick: Tick
    ) -> Iterator[Record]:
        """Carry out orders, first those that may run side by side, and give their records as they
        come. `tick` is called now and then.
        """
        waiting, single = deque(together), deque(alone)
        self._give(waiting, single)
        # While the jobs load torch, this process loads what verdicts need.
        import_module("flockstep.study.comparisons")
        while waiting or single or self._busy:
            self._give(waiting, single)
            ready: list[Any] = wait([job.connection for job in self._busy], LOOK_SECONDS)
            for job in [job for job in self._busy if job.connection in ready]:
                yield self._record_of(job)
            tick()

    @property
    def _busy(self) -> list[Job]:
        return [job for job in self._jobs if job.order is not None]

    def _give(self, waiting: deque[Order], single: deque[Order]) -> None:
        while waiting and len(self._busy) < self._count:
            self._hand_over(waiting.popleft())
        if single and not self._busy:  # what is measured by the wall has all cores
            self._hand_over(single.popleft())

    def _hand_over(self, order: Order) -> None:
        job = self._free()
        while True:
            try:
                job.take(order)
                return
            except OSError:
                if job.is_new:  # how it has died will be told as the end of its run
                    return
                self._jobs.remove(job)  # it died with nothing to do
                job.end()
                job = self._free()

    def _free(self) -> Job:
        for job in self._jobs:
            if job.order is None:
                return job
        taken = {job.core for job in self._jobs}
        self._jobs.append(Job(next((core for core in self._cores if core not in taken), None)))
        return self._jobs[-1]

    def _record_of(self, job: Job) -> Record:
        order = job.order
        assert order is not None
        try:
            return job.record()
        except (EOFError, OSError):
            reason = job.why_it_died()
            self._jobs.remove(job)
            job.end()
            return lost_record(order, reason)
