"""What is counted is what the contract says is moved, on every backend."""

from __future__ import annotations

import pytest
import torch

import flockstep as fs
from flockstep.network import costs


def test_bytes_follow_the_formulas(launch):
    elements, w = 1003, 4

    def program(comm):
        meter, seen = comm.meter, {}
        tensor = torch.zeros(elements)
        shared = comm.shared("s", tensor)

        def measure(name, call):
            bytes_before, exchanges_before = meter.bytes_sent, meter.exchanges
            call()
            seen[name] = (meter.bytes_sent - bytes_before, meter.exchanges - exchanges_before)

        peer = comm.rank ^ 1
        measure("start", lambda: None)
        measure("all_reduce", lambda: comm.all_reduce(tensor))
        measure("all_gather", lambda: comm.all_gather(tensor))
        measure("broadcast", lambda: comm.broadcast(tensor, root=1))
        measure("barrier", lambda: comm.barrier())
        measure("exchange", lambda: comm.exchange(tensor, peer))
        measure("send", lambda: comm.send(tensor, 1) if comm.rank == 0 else None)
        measure("recv", lambda: comm.recv(tensor, 0) if comm.rank == 1 else None)
        measure("read", lambda: shared.read())
        measure("write", lambda: shared.write(tensor))
        measure("add", lambda: shared.add(tensor))
        measure("blend", lambda: shared.blend(tensor, 0.5))
        with comm.unmetered():
            measure("unmetered", lambda: comm.all_reduce(tensor))
        measure("in a part", lambda: comm.split(comm.rank // 2).all_reduce(tensor))
        return seen

    n = 4 * elements
    results = launch(program, w)
    totals = {name: sum(result[name][0] for result in results) for name in results[0]}
    assert totals == {
        "start": 0,
        "all_reduce": 2 * (w - 1) * n,
        "all_gather": w * (w - 1) * n,
        "broadcast": (w - 1) * n,
        "barrier": 0,
        "exchange": w * n,
        "send": n,
        "recv": 0,
        "read": w * n,
        "write": w * n,
        "add": w * n,
        "blend": 2 * w * n,
        "unmetered": 0,
        "in a part": 2 * 2 * n,
    }
    assert [result["send"] for result in results] == [(n, 1), (0, 0), (0, 0), (0, 0)]
    assert all(result["all_reduce"][1] == result["blend"][1] == 1 for result in results)
    assert all(result["barrier"][1] == result["unmetered"][1] == 0 for result in results)


@pytest.mark.parametrize("workers", range(2, 40))
@pytest.mark.parametrize("elements", [0, 1, 5, 64, 1001])
def test_ring_and_tree_move_every_byte_once(workers, elements):
    ring = [costs.all_reduce_bytes(workers, rank, elements, 4) for rank in range(workers)]
    assert sum(ring) == 2 * (workers - 1) * elements * 4
    assert max(ring) - min(ring) <= 2 * 4
    tree = [costs.broadcast_bytes(workers, distance, 4 * elements) for distance in range(workers)]
    assert sum(tree) == (workers - 1) * 4 * elements
    assert tree[0] == 4 * elements * (workers - 1).bit_length()


def _expected(strategy: fs.Strategy, w: int, n: int, steps: int) -> tuple[int, int]:
    """(bytes of all workers, exchanges of one) for a model of n bytes, by the formulas in the
    docstrings.
    """
    all_reduce, read, blend, broadcast = 2 * (w - 1) * n, w * n, 2 * w * n, (w - 1) * n
    match strategy:
        case fs.SyncSGD():
            return steps * all_reduce, steps
        case fs.LocalSGD(period=None):
            return all_reduce, 1
        # SGD's momentum is as large as the model.
        case fs.LocalSGD(period=period, momentum="average"):
            averages = steps // period
            return (2 * averages + (steps % period > 0)) * all_reduce, 2 * averages + (
                steps % period > 0
            )
        case fs.EASGD(period=period):
            return steps // period * blend + read, steps // period + 1
        case fs.EAWild(period=period, groups=groups):
            inside = groups * 2 * (w // groups - 1) * n
            pulls = steps // period * (groups * 2 * n + groups * (w // groups - 1) * n)
            return steps * inside + pulls + read, steps + 3 * (steps // period) + 1
        case fs.Independent():
            return w * (w - 1) * 8 + broadcast, 2
    raise AssertionError(strategy)


@pytest.mark.parametrize(
    "strategy",
    [
        fs.SyncSGD(),
        fs.LocalSGD(period=None),
        fs.LocalSGD(period=4, momentum="average"),
        fs.EASGD(period=3),
        fs.EAWild(period=3, groups=2),
        fs.Independent(),
    ],
    ids=repr,
)
def test_metrics_of_a_run_follow_the_strategies_formulas(backend, strategy):
    """On every backend, some strategies; all of them in the simulator:
    tests/strategies/table.py.
    """
    result = fs.run("digits-mlp", strategy, workers=4, backend=backend, epochs=1, batch_size=40)
    steps, parameters = result.metrics["steps"], 64 * 128 + 128 + 128 * 10 + 10
    assert steps == 9
    nbytes, exchanges = _expected(strategy, 4, 4 * parameters, steps)
    assert result.metrics["bytes_sent"] == nbytes
    assert result.metrics["exchanges"] == exchanges
    assert result.metrics["samples"] == 1437
    assert result.history[-1]["bytes_sent"] <= nbytes
