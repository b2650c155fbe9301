"""Shared tensors whose homes are lost, one after the other, while a worker goes on."""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

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


def comm_and_peers(
    homes: list[Any], stack: ExitStack, continues: bool
) -> tuple[ClusterComm, Peers]:
    """Of the worker of rank 0. It has no control channel: nobody takes a lock here."""
    control: Any = SimpleNamespace(rank=0, lost_launchers=set())
    peers = Peers(Directory(tuple(home.address for home in homes), RUN, TOKEN), 0)
    stack.callback(lambda: [connection.close() for connection in peers._connections.values()])
    context: Any = WorkerContext(control, None, 0, continues, None, None)  # type: ignore[arg-type]
    return ClusterComm(context, "world", RANKS), peers


def shared_by(
    homes: list[Any], stack: ExitStack, continues: bool, like: torch.Tensor
) -> ShardedTensor:
    """The shared tensor as the worker of rank 0 sees it."""
    return ShardedTensor(
        *comm_and_peers(homes, stack, continues), "centre", like, None, is_first=True
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


# --- codecs ---------------------------------------------------------------------------------------

ELEMENTS = 4003
PARTS = [slice(ELEMENTS * k // 4, ELEMENTS * (k + 1) // 4) for k in range(4)]
CORRECTED = fs.TopK(0.01, momentum_correction=0.5, warmup=2)
CODECS = [
    fs.TopK(0.01),
    CORRECTED,
    fs.Threshold(2.0),
    fs.OneBit(),
    fs.QSGD(levels=4),
    fs.RandomK(0.1),
]
FRAME_BYTES = 400  # at most, of the header and the codec's text


def received_bytes(centre: ShardedTensor) -> int:
    """What the homes' ends of the connections have acknowledged, as the kernel counts it."""
    acknowledged = struct.Struct("120xQ")  # the field tcpi_bytes_acked
    return sum(
        acknowledged.unpack(
            each.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, acknowledged.size)
        )[0]
        for each in centre._peers._connections.values()
    )


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_each_part_has_its_own_message_with_its_part_of_the_memory(homes, codec):
    """As if the parts were tensors of their own; and no more than their messages travels."""
    memory = codec.memory(torch.zeros(ELEMENTS))
    by_hand = [codec.memory(torch.zeros(part.stop - part.start)) for part in PARTS]
    for own in by_hand:
        own.draw = by_hand[0].draw  # the parts draw one after the other
    value = torch.arange(ELEMENTS).float()
    with ExitStack() as stack:
        centre = shared_by(homes, stack, False, value)
        for k in range(3):
            tensor = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(k))
            messages = [
                codec.encode(tensor[part], own) for part, own in zip(PARTS, by_hand, strict=True)
            ]
            sent = torch.cat(
                [
                    codec.decode(message, tensor[part])
                    for message, part in zip(messages, PARTS, strict=True)
                ]
            )
            counted, crossed = centre.meter.bytes_sent, received_bytes(centre)
            assert torch.equal(centre.add(tensor, 0.5, codec=codec, memory=memory), sent)
            counted, crossed = (
                now - before
                for now, before in (
                    (centre.meter.bytes_sent, counted),
                    (received_bytes(centre), crossed),
                )
            )
            assert counted == sum(message.nbytes for message in messages)
            assert counted <= crossed <= counted + 4 * FRAME_BYTES
            value += 0.5 * sent
            torch.testing.assert_close(centre.read(), value)
    if memory.error is not None:
        assert torch.equal(memory.error, torch.cat([own.error for own in by_hand]))
    assert memory.messages == by_hand[0].messages


def test_a_message_reaches_the_next_home_when_its_own_is_lost(homes):
    like, codec = torch.arange(10.0), fs.TopK(1.0)
    with ExitStack() as stack:
        centre = shared_by(homes, stack, True, like)
        centre.add(torch.ones(10), codec=codec)
        homes[1].close()
        centre.add(torch.ones(10), 2, codec=codec)
        assert torch.equal(centre.read(), like + 3)
        homes[2].close()
        assert torch.equal(centre.read(), like + 3)


@dataclass(frozen=True)
class Scaled(fs.Codec):
    """A codec of the user's own, with fields of several kinds."""

    name: ClassVar[str] = "scaled"
    factors: tuple[float, ...] = (1.0,)
    label: str = ""

    def _encode(self, tensor, memory):
        return tensor.to(torch.float16).view(torch.uint8)

    def add_decoded(self, message, total, scale, memory=None):
        assert isinstance(self.factors, tuple)
        total.add_(message.view(torch.float16).to(total.dtype), alpha=scale * self.factors[0])


def test_homes_know_the_codecs_of_the_program(homes):
    with ExitStack() as stack:
        centre = shared_by(homes, stack, False, torch.zeros(10))
        centre.add(torch.ones(10), codec=Scaled((3.0, 4.0), "näme"))
        assert centre.read().tolist() == [3.0] * 10


def mailboxes_of(homes: list[Any], stack: ExitStack, continues: bool) -> list[ShardedTensor]:
    """One at each of the other ranks, as the worker of rank 0 sees them."""
    comm, peers = comm_and_peers(homes, stack, continues)
    return [
        ShardedTensor(comm, peers, f"box {rank}", torch.zeros(6), rank, is_first=True)
        for rank in RANKS[1:]
    ]


@pytest.mark.parametrize("codec", [None, fs.Float16()], ids=str)
def test_all_homes_are_asked_before_any_answer_is_awaited(homes, monkeypatch, codec):
    said = []
    for name in ("_ask", "_take"):
        plain = getattr(ShardedTensor, name)

        def noted(self, shard, what, plain=plain, name=name):
            said.append((name, shard.home))
            plain(self, shard, what)

        monkeypatch.setattr(ShardedTensor, name, noted)
    with ExitStack() as stack:
        boxes = mailboxes_of(homes, stack, continues=False)
        said.clear()
        change = torch.arange(6.0)
        message = None if codec is None else codec.encode(change)
        ShardedTensor._add_to_each(boxes, change, 2.0, codec, message)
        assert said == [(name, home) for name in ("_ask", "_take") for home in (1, 2, 3)]
        for box in boxes:
            out = torch.empty(6)
            box._read(out)
            assert out.tolist() == [0, 2, 4, 6, 8, 10]


def test_what_is_added_to_each_reaches_those_whose_home_is_lost(homes):
    with ExitStack() as stack:
        boxes = mailboxes_of(homes, stack, continues=True)
        change = torch.arange(6.0)
        ShardedTensor._add_to_each(boxes, change, 1.0, None, None)
        homes[1].close()  # its mailbox moves to the next home, which is asked, too
        ShardedTensor._add_to_each(boxes, change, 1.0, None, None)
        for box in boxes:
            out = torch.empty(6)
            box._read(out)
            assert torch.equal(out, 2 * change)
