"""Programs nobody thought of: random sequences of calls give the same on every backend and in
every lane.
"""

from __future__ import annotations

import random

import pytest
import torch

import flockstep as fs

WORKERS = 4
CALLS = [
    "reduce",
    "gather",
    "broadcast",
    "barrier",
    "split",
    "exchange",
    "ring",
    "shared",
    "turns",
    "elapse",
]


def random_program(seed: int):
    """A program of 40 calls on the world and on parts of it, whose results do not depend on who
    is faster.
    """

    def program(comm):
        script = random.Random(seed)  # the same on every worker
        comms = [comm]
        log: list[float] = []

        def value(size: int) -> torch.Tensor:
            dtype = script.choice([torch.float32, torch.float64, torch.int64])
            base = torch.arange(size) % script.randint(2, 50)
            return (base * (comm.rank + 1)).to(dtype)

        for _ in range(40):
            here = comms[script.randrange(len(comms))]
            size = script.choice([0, 1, 3, 64, 5000, 200_000])
            call = script.choice(CALLS)
            tensor = value(size)
            if call == "reduce":
                here.all_reduce(tensor, op=script.choice(["sum", "max", "min"]))
            elif call == "gather":
                tensor = torch.cat(here.all_gather(tensor[: size // (here.rank + 1)]))
            elif call == "broadcast":
                here.broadcast(tensor, root=script.randrange(WORKERS) % here.size)
            elif call == "barrier":
                here.barrier()
            elif call == "split" and len(comms) < 5:
                comms.append(comm.split(comm.rank * script.choice([1, 2]) // script.choice([2, 4])))
            elif call == "exchange" and here is comm:
                tensor = here.exchange(tensor, here.rank ^ 1)
            elif call == "ring" and here.size > 1:
                here.send(tensor, (here.rank + 1) % here.size)
                tensor = here.recv(torch.empty_like(tensor), (here.rank - 1) % here.size)
            elif call == "shared":
                shared = here.shared(f"s{script.random()}", tensor)
                with shared.lock():
                    shared.add(tensor)
                here.barrier()
                tensor = shared.read()
            elif call == "turns":
                shared = here.shared(f"t{script.random()}", torch.zeros(size, dtype=torch.float64))
                with shared.lock(in_turn=True):
                    shared.write(shared.read() * 3 + here.rank)
                here.barrier()
                tensor = shared.read()
            elif call == "elapse":
                here.elapse(script.random() * (comm.rank + 1))
            log.append(float(tensor.double().sum()))
        return log, comm.meter.bytes_sent, comm.meter.exchanges

    return program


@pytest.mark.parametrize("seed", range(8))
def test_local_processes_agree_with_the_simulator(local, seed):
    program = random_program(seed)
    expected = fs.launch(program, WORKERS, fs.Simulator(lanes=1))
    assert fs.launch(program, WORKERS, fs.Simulator(lanes=2)) == expected
    assert fs.launch(program, WORKERS, local) == expected


@pytest.mark.cluster
@pytest.mark.parametrize("seed", range(8))
def test_torchrun_and_ray_agree_with_the_simulator(torchrun, ray, seed):
    program = random_program(seed)
    expected = fs.launch(program, WORKERS, fs.Simulator(lanes=1))
    for real in (torchrun, ray):
        assert fs.launch(program, WORKERS, real) == expected


@pytest.mark.parametrize("seed", range(6))
def test_virtual_time_does_not_depend_on_lanes(seed):
    """Workers race for shared tensors and locks at speeds of their own, and send to the next, who
    may be slow to take it; times and bits are the same all the same.
    """

    def program(comm):
        is_first, is_last = comm.rank == 0, comm.rank == comm.size - 1
        choose = random.Random(seed * 1000 + comm.rank)  # different on every worker
        shared = comm.shared("x", torch.zeros(300))
        is_told_more = not is_first
        comm.elapse()  # lets the lanes open
        for _ in range(60):
            call = choose.choice(["add", "blend", "read", "lock", "step", "send", "recv"])
            if call == "add":
                shared.add(torch.full((300,), choose.random()))
            elif call == "blend":
                shared.blend(torch.full((300,), choose.random()), choose.random())
            elif call == "read":
                comm.elapse(0.01 * float(shared.read()[0].abs().clamp(max=1)))
            elif call == "lock":
                with shared.lock():
                    shared.write(shared.read() * 0.5)
                    comm.elapse(0.003 * choose.random())
            elif call == "step":
                comm.elapse()
            elif call == "send" and not is_last:
                comm.send(torch.ones(50), comm.rank + 1)
            elif call == "recv" and is_told_more:
                is_told_more = bool(comm.recv(torch.empty(50), comm.rank - 1).all())
        if not is_last:
            comm.send(torch.zeros(50), comm.rank + 1)  # the last
        while is_told_more:
            is_told_more = bool(comm.recv(torch.empty(50), comm.rank - 1).all())
        comm.barrier()
        return comm.now(), shared.read().tolist()

    compute = fs.Compute(0.01, jitter=0.7)
    expected = fs.launch(program, 6, fs.Simulator(compute=compute, lanes=1))
    for lanes in (2, 3, 6):
        assert fs.launch(program, 6, fs.Simulator(compute=compute, lanes=lanes)) == expected
