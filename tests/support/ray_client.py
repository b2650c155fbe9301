"""What the tests of a joined cluster run in a process of its own; prints what it found as JSON."""

from __future__ import annotations

import json
import sys
import time

import torch

import flockstep as fs
from flockstep.backends.ray import Ray
from flockstep.backends.ray.shared import RemoteShard
from flockstep.backends.ray.worker import node_id

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]


def values(comm: fs.Comm) -> list[bool]:
    """Every operation of shared tensors that lie half here and half on the other host."""
    right = []
    for dtype in DTYPES:
        shared = comm.shared(str(dtype), torch.zeros(7).to(dtype))
        kinds = {type(shard) is RemoteShard for shard in shared._shards}
        if comm.rank == 0:
            shared.write(torch.arange(7).to(dtype))
            shared.add(torch.ones(7).to(dtype), scale=2)
        comm.barrier()
        right.append(
            kinds == {True, False} and torch.equal(shared.read(), torch.arange(2, 9).to(dtype))
        )
    shared = comm.shared("blended", torch.full((100_000,), 2.0))
    if comm.rank == 1:
        before = shared.blend(torch.full((100_000,), 6.0), 0.25)
        right.append(bool((before == 2).all()))
    comm.barrier()
    right.append(bool((shared.read() == 3).all()))
    return right


def without_home(comm: fs.Comm) -> str:
    import ray

    shared = comm.shared("x", torch.zeros(4))
    comm.barrier()
    if comm.rank == 0:
        ray.kill(next(shard._actor for shard in shared._shards if isinstance(shard, RemoteShard)))
        try:
            for _ in range(100):  # it dies when Ray comes to it
                shared.read()
                time.sleep(0.05)
        except fs.WorkerLost as error:
            return str(error)
    return ""


def main() -> None:
    found: dict[str, object] = {}
    with Ray("spread", household=2) as kept:
        found["households"] = fs.launch(lambda comm: node_id(), 4, kept)
        found["right"] = fs.launch(values, 4, kept)
        found["without a home"] = fs.launch(without_home, 4, kept)[0]
        found["right again"] = fs.launch(values, 4, kept)
        found["sum"] = fs.launch(
            lambda comm: int(comm.all_reduce(torch.tensor(comm.rank + 1))), 4, kept
        )
    found["packed"] = fs.launch(lambda comm: node_id(), 2, Ray("pack", homes=1))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
