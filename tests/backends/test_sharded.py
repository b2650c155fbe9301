"""Shared tensors whose homes are lost, one after the other, while a worker goes on."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flockstep as fs
from flockstep.backends.cluster.comm import ClusterComm, WorkerContext
from flockstep.backends.cluster.homes import Homes
from flockstep.backends.cluster.service import Service
from flockstep.backends.cluster.shared import Directory, Peers, ShardedTensor

RANKS = (0, 1, 2, 3)
RUN, TOKEN = secrets.token_bytes(16), secrets.token_bytes(32)


def service() -> Service:
    """What a launcher has for the parts that live with it."""
    homes = Homes()
    return Service(
        "127.0.0.1", RUN, TOKEN, {"tensors": lambda connection, _: homes.serve(connection)}
    )


@pytest.fixture
def homes() -> Iterator[list[ExitStack]]:
    """The services of four launchers; closing one is the loss of its host."""
    with ExitStack() as stack:
        services = [service() for _ in RANKS]
        closers = [stack.enter_context(ExitStack()) for _ in RANKS]
        for closer, each in zip(closers, services, strict=True):
            closer.enter_context(each)
            closer.address = each.address  # type: ignore[attr-defined]
        yield closers


def shared_by(
    homes: list[Any], stack: ExitStack, continues: bool, like: torch.Tensor
) -> ShardedTensor:
    """The shared tensor as the worker of rank 0 sees it. It has no control channel: nobody
    takes a lock here.
    """
    control: Any = SimpleNamespace(rank=0, lost_launchers=set())
    peers = Peers(Directory(tuple(home.address for home in homes), RUN, TOKEN), 0)
    stack.callback(lambda: [connection.close() for connection in peers._connections.values()])
    context: Any = WorkerContext(control, None, 0, continues, None, None)  # type: ignore[arg-type]
    return ShardedTensor(
        ClusterComm(context, "world", RANKS), peers, "centre", like, None, is_first=True
    )


@pytest.mark.parametrize("losses", [(3, 2), (2, 3), (1, 0), (0, 1, 2), (3, 2, 1)], ids=str)
def test_each_part_keeps_its_value_when_its_home_is_lost(homes, losses):
    """Parts that have moved share a home: each must get its own answer there."""
    like = torch.arange(10.0)  # parts of two and three elements
    with ExitStack() as stack:
        centre = shared_by(homes, stack, True, like)
        expected = like.clone()
        for home in losses:
            homes[home].close()
            assert torch.equal(centre.blend(torch.zeros(10), 0.5), expected)
            expected *= 0.5
            centre.add(torch.ones(10))
            expected += 1
            assert torch.equal(centre.read(), expected)


def test_the_loss_of_a_home_ends_a_run_that_must_stop(homes):
    with ExitStack() as stack:
        centre = shared_by(homes, stack, False, torch.arange(10.0))
        homes[2].close()
        with pytest.raises(
            fs.WorkerLost, match="home of a shard of shared 'centre', is gone"
        ) as caught:
            centre.read()
        assert caught.value.rank == 2
