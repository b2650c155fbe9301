"""A job: a process that carries out runs, one after the other, until nobody wants more.

Orders come and records go over one descriptor; another one, the lifeline, ends when the study
does, in whatever way, and then so does the job.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection

import cloudpickle
import torch

from flockstep.backends import usable_core_numbers
from flockstep.study.one_run import Places, carried_out


def main(connection: int, lifeline: int, core: int | None = None) -> None:
    all_cores = usable_core_numbers()
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(1)
    orders = Connection(connection)
    with Places() as places:
        while True:
            try:
                order = cloudpickle.loads(orders.recv_bytes())
            except EOFError:
                return
            # The threads of a simulation run in turns: on one core a turn passes in a fifth of the
            # time that it takes from core to core. Workers that are processes need all cores.
            is_simulated = order.spec.backend == "sim"
            _stay_on([core] if core is not None and is_simulated else all_cores)
            orders.send_bytes(cloudpickle.dumps(carried_out(order, places)))


def _stay_on(cores: list[int]) -> None:
    """This thread, and those that it starts from here on."""
    if cores:
        os.sched_setaffinity(0, cores)


def _end_with(lifeline: int) -> None:
    """Wait for the end of the study, and end with it, in the middle of a run if need be."""
    os.read(lifeline, 1)
    os._exit(1)
