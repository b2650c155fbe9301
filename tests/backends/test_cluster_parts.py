"""The parts of the coordinator by themselves, and values as they travel: whatever comes when,
all hear the same.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import defaultdict, deque
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.cluster_service import SECONDS, serving

import flockstep as fs
from flockstep.backends.base import Stopped
from flockstep.backends.cluster.calls import Calls
from flockstep.backends.cluster.comm import ClusterComm, WorkerContext
from flockstep.backends.cluster.completion import LauncherChannel, ResultCollector
from flockstep.backends.cluster.control_channel import ControlChannel
from flockstep.backends.cluster.coordinator import Coordinator
from flockstep.backends.cluster.locks import Lock
from flockstep.backends.cluster.mailbox import Mailbox
from flockstep.backends.cluster.values import (
    decode,
    decode_error,
    encode,
    encode_error,
)
from flockstep.backends.cluster.wire import DTYPES, WireError
from flockstep.backends.torchrun import World
from flockstep.errors import worker_error

RANDOM = st.integers(0, 2**32).map(Random)


class Answers:
    """What each rank was told and has not taken yet. Who is told twice in a row was told
    something it did not ask.
    """

    def __init__(self) -> None:
        self.told: dict[int, dict[str, Any]] = {}

    def __call__(self, rank: int, reply: dict[str, Any]) -> None:
        assert rank not in self.told, f"rank {rank} was told {self.told[rank]} and then {reply}"
        self.told[rank] = reply

    def take(self) -> dict[int, dict[str, Any]]:
        told, self.told = self.told, {}
        return told


def said(call: str = "barrier", seq: int = 1, group: str = "world", **more: Any) -> dict[str, Any]:
    text = more.pop("text", call)
    base = {
        "call": call,
        "signature": text,
        "must": text,
        "data": None,
        "root": None,
        "moves": True,
        "late": False,
    }
    return {"group": group, "seq": seq, **base, **more}


def report(seq: int = 1, ok: bool = True, group: str = "world") -> dict[str, Any]:
    return {"group": group, "seq": seq, "ok": ok}


# --- collective calls -----------------------------------------------------------------------------


@pytest.fixture
def answers():
    return Answers()


def test_a_call_goes_on_when_all_have_come(answers):
    calls = Calls(answers, 3, must_report=False)
    for rank in (2, 0):
        calls.join(rank, said("all_gather", data=rank * 10))
        assert answers.take() == {}
    calls.join(1, said("all_gather", data=10))
    assert answers.take() == {
        rank: {"members": (0, 1, 2), "data": [0, 10, 20]} for rank in range(3)
    }


def test_calls_of_groups_and_numbers_do_not_mix(answers):
    calls = Calls(answers, 4, must_report=False)
    for rank in range(4):
        calls.join(rank, said("split", data=rank % 2, moves=False))
    replies = answers.take()
    assert [(reply["group"], reply["ranks"]) for _, reply in sorted(replies.items())] == [
        ("world/1.0", (0, 2)),
        ("world/1.1", (1, 3)),
    ] * 2
    calls.join(0, said(group="world/1.0"))
    calls.join(1, said(group="world/1.1"))
    calls.join(2, said(seq=2))
    assert answers.take() == {}
    calls.join(3, said(group="world/1.1"))
    assert answers.take().keys() == {1, 3}


def test_a_mismatch_is_told_once_to_each_also_to_who_comes_later(answers):
    calls = Calls(answers, 4, must_report=False)
    calls.join(1, said("barrier"))
    calls.join(2, said("broadcast", text="broadcast from 0"))
    text = "rank 1 called barrier, rank 2 called broadcast from 0"
    error = {"error": "MismatchError", "text": text}
    assert answers.take() == {1: error, 2: error}
    calls.join(0, said("barrier"))
    assert answers.take() == {0: error}
    calls.join(3, said("split"))
    assert answers.take() == {3: error}
    for rank in range(4):  # a program that catches it goes on
        calls.join(rank, said(seq=2))
    assert answers.take().keys() == set(range(4))
    assert not calls._calls


def test_nobody_is_measured_by_what_a_lost_worker_called(answers):
    calls = Calls(answers, 3, must_report=True)
    calls.join(0, said("barrier", moves=False))
    calls.lose(0)
    calls.join(1, said("all_reduce"))
    calls.join(2, said("all_reduce"))
    assert [reply["members"] for reply in answers.take().values()] == [(1, 2)] * 2


@pytest.mark.parametrize("arrives", [False, True], ids=["before it came", "after it came"])
def test_who_is_lost_before_a_call_begins_takes_no_part(answers, arrives):
    calls = Calls(answers, 3, must_report=True)
    calls.join(0, said(data=0))
    if arrives:
        calls.join(1, said(data=1))
    calls.join(2, said(data=2)) if not arrives else None
    calls.lose(1)
    calls.join(2, said(data=2)) if arrives else None
    assert answers.take() == {rank: {"members": (0, 2), "data": [0, 2]} for rank in (0, 2)}


@pytest.mark.parametrize("broken", [(), (0,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize(
    "when", ["before all reports", "after its own report", "after some reports"]
)
def test_a_call_with_a_loss_counts_for_all_or_is_done_again_by_all(answers, broken, when):
    calls = Calls(answers, 3, must_report=True)
    for rank in range(3):
        calls.join(rank, said("all_reduce", data=rank))
    answers.take()
    if when == "after its own report":
        calls.report(1, report())
    if when == "after some reports":
        calls.report(0, report(ok=0 not in broken))
    calls.lose(1)
    assert answers.take() == {}
    for rank in (0, 2):
        if rank or when != "after some reports":
            calls.report(rank, report(ok=rank not in broken))
    if not broken:
        assert answers.take() == {0: {"members": []}, 2: {"members": []}}
        return
    assert answers.take() == {rank: {"members": (0, 2), "data": [0, 2]} for rank in (0, 2)}
    calls.report(0, report())
    calls.report(2, report())
    assert answers.take() == {0: {"members": []}, 2: {"members": []}}
    assert not calls._calls


@pytest.mark.parametrize("when", ["before it came", "after it came", "while tensors moved"])
def test_all_hear_that_a_root_is_lost(answers, when):
    calls = Calls(answers, 3, must_report=True)
    if when != "before it came":
        calls.join(1, said("broadcast", root=1))
    calls.join(0, said("broadcast", root=1))
    if when != "while tensors moved":
        calls.lose(1)
        assert answers.take() == {}
        calls.join(2, said("broadcast", root=1))
    else:
        calls.join(2, said("broadcast", root=1))
        assert answers.take().keys() == {0, 1, 2}
        calls.lose(1)
        calls.report(0, report(ok=True))
        calls.report(2, report(ok=False))
    assert answers.take() == {rank: {"error": "WorkerLost", "lost": 1} for rank in (0, 2)}
    assert not calls._calls


def test_a_broadcast_that_all_survivors_have_counts_though_its_root_is_lost(answers):
    calls = Calls(answers, 3, must_report=True)
    for rank in range(3):
        calls.join(rank, said("broadcast", root=1))
    answers.take()
    calls.lose(1)
    for rank in (0, 2):
        calls.report(rank, report())
    assert answers.take() == {rank: {"members": []} for rank in (0, 2)}


def test_reports_and_arrivals_that_nobody_awaits_are_refused(answers):
    calls = Calls(answers, 2, must_report=True)
    with pytest.raises(WireError, match="rank 0 has no part in call 1 of 'world' to tell of"):
        calls.report(0, report())
    calls.join(0, said())
    with pytest.raises(WireError, match="rank 0 has already come to call 1 of 'world'"):
        calls.join(0, said())
    with pytest.raises(WireError, match="rank 0 has no part in call 1"):
        calls.report(0, report())


class Crew:
    """Workers that make the same calls, each as fast as chance will have it, and of whom some
    are lost on the way.
    """

    def __init__(self, chance: Random, workers: int, script: list[dict[str, Any]]) -> None:
        self.chance = chance
        self.script = script
        self.answers = Answers()
        self.calls = Calls(self.answers, workers, must_report=True)
        self.alive = set(range(workers))
        self.state = dict.fromkeys(range(workers), "runs")
        self.moves_with: dict[int, tuple[int, ...]] = {}
        self.verdicts: dict[int, list[Any]] = {rank: [] for rank in range(workers)}

    def hear(self) -> None:
        for rank, reply in self.answers.take().items():
            if rank not in self.alive:
                continue
            assert self.state[rank] == "waits"
            call = self.script[len(self.verdicts[rank])]
            if "error" in reply:
                self.verdicts[rank].append(reply)
                self.state[rank] = "runs"
            elif reply["members"] == []:
                self.verdicts[rank].append(self.moves_with[rank])
                self.state[rank] = "runs"
            elif not call["moves"]:
                self.verdicts[rank].append(reply)
                self.state[rank] = "runs"
            else:
                assert rank in reply["members"]
                self.moves_with[rank] = reply["members"]
                self.state[rank] = "moves"

    def act(self, rank: int) -> None:
        if self.state[rank] == "runs":
            self.state[rank] = "waits"
            seq = len(self.verdicts[rank])
            self.calls.join(rank, {**self.script[seq], "seq": seq + 1})
        else:
            # Tensors that were to come from the lost may have come, or not.
            went_well = self.alive.issuperset(self.moves_with[rank]) or self.chance.random() < 0.5
            self.state[rank] = "waits"
            self.calls.report(rank, report(seq=len(self.verdicts[rank]) + 1, ok=went_well))

    def can_act(self) -> list[int]:
        done = {rank for rank in self.alive if len(self.verdicts[rank]) == len(self.script)}
        return sorted(rank for rank in self.alive - done if self.state[rank] != "waits")

    def run(self, losses: int) -> None:
        while able := self.can_act():
            if losses and len(self.alive) > 1 and self.chance.random() < 0.1:
                lost = self.chance.choice(sorted(self.alive))
                self.alive.discard(lost)
                self.calls.lose(lost)
                losses -= 1
            else:
                self.act(self.chance.choice(able))
            self.hear()


CALLS = [
    said("barrier", moves=False),
    said("all_reduce"),
    said("all_gather", data=5),
    said("split", data=0, moves=False),
    *(said("broadcast", root=root, text=f"broadcast from {root}") for root in range(5)),
]


@settings(max_examples=400, deadline=None)
@given(
    RANDOM,
    st.integers(1, 5),
    st.lists(st.sampled_from(CALLS), min_size=1, max_size=8),
    st.integers(0, 4),
)
def test_whoever_is_lost_and_when_all_survivors_hear_the_same_of_every_call(
    chance, workers, script, losses
):
    crew = Crew(
        chance, workers, [call for call in script if call["root"] is None or call["root"] < workers]
    )
    crew.run(losses)
    first = crew.verdicts[min(crew.alive)]
    assert len(first) == len(crew.script)  # nobody waits for ever
    for rank in crew.alive:
        assert crew.verdicts[rank] == first
    assert not crew.calls._calls


# --- locks ----------------------------------------------------------------------------------------


def granted(members: tuple[int, ...] = (0, 1, 2)) -> tuple[Lock, list[int]]:
    grants: list[int] = []
    return Lock(members, grants.append), grants


def test_a_lock_is_one_workers_at_a_time_first_come_first_served():
    lock, grants = granted()
    for rank in (2, 0, 1):
        lock.ask(rank, in_turn=False)
    assert grants == [2]
    lock.release(1)  # not its own
    assert grants == [2]
    lock.release(2)
    lock.release(0)
    assert grants == [2, 0, 1]


def test_turns_come_in_rank_order_round_after_round_and_pass_over_the_retired():
    lock, grants = granted((3, 5, 7))
    for rank in (7, 5, 3):
        lock.ask(rank, in_turn=True)
    assert grants == [3]
    lock.release(3)
    lock.retire(7)  # it waits, but takes no more turns
    lock.release(5)
    lock.ask(3, in_turn=True)
    assert grants == [3, 5, 3]


def test_who_waits_for_no_turn_does_not_wait_for_one():
    lock, grants = granted()
    lock.ask(1, in_turn=True)
    lock.ask(2, in_turn=False)
    assert grants == [2]
    lock.release(2)
    lock.ask(0, in_turn=True)
    lock.release(0)
    assert grants == [2, 0, 1]


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_lost_holder_holds_nothing(in_turn):
    lock, grants = granted()
    lock.ask(0, in_turn)
    lock.ask(1, in_turn)
    lock.ask(2, in_turn)
    lock.lose(1)
    assert grants == [0]
    lock.lose(0)
    assert grants == [0, 2]


class FollowedLock:
    """A lock, and what must hold of it by its own story: who asked when, who held it, whose
    turns are over.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.lock = Lock(members, self.granted)
        self.waiting: deque[tuple[int, bool]] = deque()
        self.holder: tuple[int, bool] | None = None
        self.had_last_turn: int | None = None
        self.out: set[int] = set()
        self.lost: set[int] = set()

    def turn(self) -> int | None:
        """The first after the last that still takes turns."""
        start = 0 if self.had_last_turn is None else self.members.index(self.had_last_turn) + 1
        following = self.members[start:] + self.members[:start]
        return next((rank for rank in following if rank not in self.out), None)

    def eligible(self) -> list[tuple[int, bool]]:
        return [
            (rank, in_turn) for rank, in_turn in self.waiting if not in_turn or rank == self.turn()
        ]

    def granted(self, rank: int) -> None:
        assert self.holder is None
        first = self.eligible()[0]
        assert first[0] == rank
        self.waiting.remove(first)
        self.holder = first

    def free(self, rank: int) -> None:
        if self.holder is not None and self.holder[0] == rank:
            self.had_last_turn = rank if self.holder[1] else self.had_last_turn
            self.holder = None

    def act(self, rank: int, chance: Random) -> None:
        waits = any(rank == other for other, _ in self.waiting)
        holds = self.holder is not None and self.holder[0] == rank
        if chance.random() < 0.05:
            self.lost.add(rank)
            self.out.add(rank)
            self.waiting = deque(entry for entry in self.waiting if entry[0] != rank)
            if holds:
                self.holder = None
            self.lock.lose(rank)
        elif holds and chance.random() < 0.7:
            self.free(rank)
            self.lock.release(rank)
        elif not waits and not holds:
            in_turn = chance.random() < 0.5 and rank not in self.out
            self.waiting.append((rank, in_turn))
            self.lock.ask(rank, in_turn)
        elif not waits and chance.random() < 0.1:
            self.out.add(rank)
            self.lock.retire(rank)


@settings(max_examples=300, deadline=None)
@given(RANDOM, st.integers(1, 5), st.integers(1, 80))
def test_locks_exclude_each_other_keep_the_order_and_leave_nobody_waiting(chance, members, steps):
    followed = FollowedLock(tuple(range(10, 10 + members)))
    for _ in range(steps):
        alive = [rank for rank in followed.members if rank not in followed.lost]
        if not alive:
            break
        followed.act(chance.choice(alive), chance)
        assert followed.holder is not None or not followed.eligible()
        assert followed.lock.holder == (followed.holder and followed.holder[0])


# --- messages between two workers -----------------------------------------------------------------


def test_one_message_is_under_way_at_a_time(answers):
    mailbox = Mailbox(answers)
    mailbox.send(0, 1, "world", "first")
    assert answers.take() == {0: {}}
    mailbox.send(0, 1, "world", "second")
    assert answers.take() == {}
    mailbox.receive(1, 0, "world")
    assert answers.take() == {1: {"message": "first"}}
    mailbox.taken(1, 0, "world")
    assert answers.take() == {0: {}}
    mailbox.receive(1, 0, "world")
    assert answers.take() == {1: {"message": "second"}}


def test_what_was_not_handed_over_cannot_be_taken(answers):
    mailbox = Mailbox(answers)
    for _ in range(2):
        with pytest.raises(
            WireError, match="rank 1 was handed nothing of rank 0 that it could have taken"
        ):
            mailbox.taken(1, 0, "world")
        mailbox.send(0, 1, "world", "message")  # under way, but not handed over
        answers.take()


def test_both_may_send_first(answers):
    mailbox = Mailbox(answers)
    mailbox.send(0, 1, "world", "a")
    mailbox.send(1, 0, "world", "b")
    assert answers.take() == {0: {}, 1: {}}
    mailbox.receive(0, 1, "world")
    mailbox.receive(1, 0, "world")
    assert answers.take() == {0: {"message": "b"}, 1: {"message": "a"}}


def test_who_waits_for_a_lost_peer_hears_so_at_once(answers):
    mailbox = Mailbox(answers)
    mailbox.receive(0, 2, "world")
    mailbox.send(1, 2, "world", "first")
    answers.take()
    mailbox.send(1, 2, "world", "second")
    mailbox.lose(2)
    lost = {"error": "WorkerLost", "lost": 2}
    assert answers.take() == {0: lost, 1: lost}
    mailbox.send(0, 2, "world", "late")
    mailbox.receive(1, 2, "world")
    assert answers.take() == {0: lost, 1: lost}


def test_a_message_is_held_until_it_has_arrived_though_the_one_before_is_put_down_late():
    """The first message of two workers is posted by a thread. What gloo is to send must be held by
    somebody, or its peer waits for ever: the thread must not put the first, which has arrived, in
    the place of the second.
    """
    second_is_sent, posts = threading.Event(), []

    class Group:
        def send(self, tensors, rank, tag):
            text = f"message {len(posts)}"
            posts.append(threading.current_thread())
            if len(posts) == 1:
                second_is_sent.wait(0.5)  # the peer has it, and wants more
            else:
                second_is_sent.set()
            return text

    groups, control = mock.Mock(), mock.Mock(rank=0)
    groups.of.return_value = Group()
    groups.has.side_effect = [False, True]
    context = WorkerContext(control, groups, 0, False, mock.Mock(), mock.Mock())
    comm = ClusterComm(context, "world", (0, 1))
    comm.send(torch.ones(3), 1)
    while not posts:
        time.sleep(0.001)
    comm.send(torch.ones(3), 1)
    posts[0].join()
    ((work, _),) = context.sent.values()
    assert work == "message 1"


@settings(max_examples=300, deadline=None)
@given(RANDOM, st.integers(2, 4), st.integers(1, 120))
def test_messages_arrive_once_in_order_and_nobody_waits_for_the_lost(chance, workers, steps):
    answers = Answers()
    mailbox = Mailbox(answers)
    alive = set(range(workers))
    waits: dict[int, tuple[str, int]] = {}  # who waits, in what, for whom
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    takes: dict[int, int] = {}  # who was handed a message of whom, and has not taken the tensor
    for _ in range(steps):
        able = sorted(alive - waits.keys())
        if len(alive) > 1 and chance.random() < 0.03:
            lost = chance.choice(sorted(alive))
            alive.discard(lost)
            mailbox.lose(lost)
        elif able:
            rank = chance.choice(able)
            peer = chance.choice([other for other in range(workers) if other != rank])
            if rank in takes:
                mailbox.taken(rank, takes.pop(rank), "world")
            elif chance.random() < 0.5:
                sent[rank, peer] += 1
                waits[rank] = ("send", peer)
                mailbox.send(rank, peer, "world", [sent[rank, peer]])
            else:
                waits[rank] = ("receive", peer)
                mailbox.receive(rank, peer, "world")
        for rank, reply in answers.take().items():
            if rank not in alive:
                continue
            doing, peer = waits.pop(rank)
            if "error" in reply:
                assert reply == {"error": "WorkerLost", "lost": peer}
                assert peer not in alive
            elif doing == "receive":
                received[peer, rank] += 1
                assert reply == {"message": [received[peer, rank]]}
                takes[rank] = peer
        for rank in alive & waits.keys():
            doing, peer = waits[rank]
            assert peer in alive
            if doing == "receive":
                # Else there is something to receive.
                assert sent[peer, rank] == received[peer, rank]
            else:
                # One is under way.
                assert sent[rank, peer] - 1 > received[rank, peer] or takes.get(peer) == rank


# --- values ---------------------------------------------------------------------------------------

TENSORS = st.builds(
    lambda dtype, shape, seed: torch.from_numpy(
        np.random.default_rng(seed).integers(0, 2, shape)
    ).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
    st.integers(0, 9),
)
ARRAYS = TENSORS.filter(lambda tensor: tensor.dtype != torch.bfloat16).map(
    lambda tensor: tensor.numpy()
)
KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
VALUES = st.recursive(
    KEYS | st.floats() | TENSORS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=8,
)


def travelled(value: Any, like: Any = None) -> Any:
    tensors: list[torch.Tensor] = []
    tree = json.loads(json.dumps(encode(value, tensors)))
    return decode(tree, [tensor.clone() for tensor in tensors], like)


def same(one: Any, other: Any) -> bool:
    """Equal in value and type, all the way down; NaN is itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other or (one != one and other != other)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_values_arrive_as_they_were(value):
    assert same(travelled(value), value)


def test_arrays_of_any_memory_and_numbers_of_numpy_arrive_as_they_were():
    fixed = np.arange(4.0)
    fixed.flags.writeable = False
    values = [
        fixed,
        np.arange(12).reshape(3, 4)[::2, ::-1],
        np.array(3),
        np.arange(3, dtype=">i4"),
        np.float64(0.5),
    ]
    values += [np.float32(1.5), np.bool_(True), np.int8(-3), torch.arange(6).view(2, 3).T]
    for value in values:
        back = travelled(value)
        assert type(back) is type(value)
        assert back.shape == value.shape
        assert (back == value).all()
    assert travelled({np.int64(3): 1}) == {3: 1}
    assert travelled(torch.Size([2, 3])) == (2, 3)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert torch.equal(travelled(parameter), torch.ones(2))


class Net(torch.nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, width)
        self.norm = torch.nn.BatchNorm1d(width)


class OtherNet(Net):
    pass


def test_a_module_is_filled_into_the_receivers_own():
    sent, own = Net(), Net()
    back = travelled([sent, 3], [own, 4])[0]
    assert type(back) is Net
    assert back is not own
    assert all(
        torch.equal(back.state_dict()[key], value) for key, value in sent.state_dict().items()
    )
    assert not torch.equal(own.layer.weight, sent.layer.weight)


@pytest.mark.parametrize(
    "own", [None, 3, Net(width=4), OtherNet(), Net], ids=["none", "number", "size", "class", "type"]
)
def test_a_module_without_a_fitting_one_stays_a_state(own):
    sent = Net()
    back = travelled({"model": sent}, {"model": own})["model"]
    assert type(back) is dict
    assert back.keys() == sent.state_dict().keys()
    assert torch.equal(back["layer.weight"], sent.layer.weight)


@dataclasses.dataclass
class Plain:
    number: int
    tensor: torch.Tensor
    made: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    inner: Any
    model: Any = None


def test_dataclasses_are_filled_into_the_receivers_own():
    sent = Plain(3, torch.ones(2))
    sent.made = 7
    own = Plain(0, torch.zeros(2))
    own.seen = "an attribute that is no field"
    net = Net()
    back = travelled(Frozen(sent, net), Frozen(own, Net()))
    assert type(back) is Frozen
    assert type(back.inner) is Plain
    assert (back.inner.number, back.inner.made) == (3, 7)
    assert torch.equal(back.inner.tensor, torch.ones(2))
    assert torch.equal(back.model.layer.weight, net.layer.weight)
    assert (own.number, own.made) == (0, 0)


@pytest.mark.parametrize(
    "own", [None, Frozen(1), Plain, {"number": 1}], ids=["none", "other", "type", "dict"]
)
def test_a_dataclass_without_its_like_stays_a_dict(own):
    assert travelled(Plain(3, torch.ones(1)), own) == {
        "number": 3,
        "tensor": torch.ones(1),
        "made": 0,
    }


@pytest.mark.parametrize(
    "value",
    [object(), Plain, lambda: 0, 1j, np.array(["text"]), np.array([1j]), {Frozen(1)},
     {Frozen(1): 2}, bytearray(3), {torch.ones(1): 1}, torch.ones(1, dtype=torch.complex64),
     torch.ones((1,) * 9), torch.ones(2).to_sparse(), np.uint16(3), np.longdouble(3),
     [ValueError("no")]],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_travel_is_an_error_of_the_sender(value):
    with pytest.raises(fs.FlockstepError, match="cannot be sent to another host"):
        encode(value, [])


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "tensor",
                    "array",
                    "scalar",
                    "bytes",
                    "list",
                    "tuple",
                    "set",
                    "dict",
                    "module",
                    "dataclass",
                ]
            )
            | st.sampled_from(["error", "other"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=10,
)


@settings(max_examples=500, deadline=None)
@given(JUNK, st.sampled_from([None, [Net(), Net()], {"a": Frozen(1)}]))
def test_a_tree_is_a_value_or_refused(tree, like):
    try:
        decode(tree, [torch.ones(2), torch.ones((), dtype=torch.bfloat16)], like)
    except WireError:
        pass


def test_a_tree_of_very_many_levels_is_refused():
    tree: Any = 1
    for _ in range(900):
        tree = {"list": [tree]}
    with pytest.raises(WireError, match="too many levels"):
        decode(tree, [])


# --- errors ---------------------------------------------------------------------------------------


class OurOwn(ValueError):
    pass


class Picky(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


def error_travelled(error: BaseException) -> Any:
    return decode_error(json.loads(json.dumps(encode_error(error))))


@pytest.mark.parametrize(
    ("raised", "kinds", "text"),
    [
        (
            ZeroDivisionError("by zero"),
            (ZeroDivisionError,),
            "rank 2 raised ZeroDivisionError: by zero",
        ),
        (KeyError("key"), (KeyError, LookupError), "rank 2 raised KeyError: 'key'"),
        (OurOwn("bad"), (ValueError,), "rank 2 raised OurOwn: bad"),
        (
            json.JSONDecodeError("bad", "doc", 0),
            (ValueError,),
            "rank 2 raised JSONDecodeError: bad: line 1 column 1",
        ),
        (Picky(1, 2), (), "rank 2 raised Picky: (1, 2)"),
        (
            UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
            (),
            "rank 2 raised UnicodeDecodeError: 'utf-8' codec",
        ),
        (ExceptionGroup("two", [ValueError()]), (), "rank 2 raised ExceptionGroup: two"),
        (SystemExit(3), (), "rank 2 raised SystemExit: 3"),
        (StopIteration(), (StopIteration,), "rank 2 raised StopIteration: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_program_raised_arrives_as_the_nearest_of_pythons_own(raised, kinds, text):
    raised.add_note("In the process of rank 2:\n…")
    back = error_travelled(worker_error(2, raised))
    assert isinstance(back, fs.WorkerError)
    assert all(isinstance(back, kind) for kind in kinds)
    assert not isinstance(back, SystemExit)
    assert str(back).startswith(text)
    assert back.rank == 2
    assert (back.__cause__ or back).__notes__ == ["In the process of rank 2:\n…"]


@pytest.mark.parametrize(
    "error",
    [
        fs.WorkerLost("rank 1 was killed", 1, -9, 5, 0.25),
        fs.MismatchError("differ"),
        fs.DeadlockError("all wait"),
        fs.InvalidField("'x' must y"),
        fs.UnknownName("unknown"),
        fs.FlockstepError("something"),
        fs.NonFiniteLoss("nan"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    "cause", [None, ConnectionResetError("by peer")], ids=["alone", "with a cause"]
)
def test_our_own_errors_arrive_as_what_they_are(error, cause):
    error.__cause__ = cause
    back = error_travelled(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_errors_of_any_attributes_and_lengths_can_be_told():
    awkward = ValueError("x" * 10_000_000)
    awkward.step = torch.ones(1)
    awkward.seconds = object()
    awkward.__notes__ = ["n" * 1_000_000, 3]
    back = error_travelled(worker_error(0, awkward))
    assert isinstance(back, ValueError)
    assert 10_000 < len(str(back)) < 200_000


# --- what a launcher hears ------------------------------------------------------------------------


def test_a_launcher_hears_how_the_run_ended():
    with serving() as served:
        channels = [LauncherChannel(served.join("launcher", rank), rank) for rank in range(3)]
        channels[0].bring({"tensor": torch.arange(3), "model": Net()})
        channels[1].bring(None)
        channels[2].tell_lost(fs.WorkerLost("", 2, -9, 7))
        collector: ResultCollector = served.collector
        while not all(channel.is_over for channel in channels):
            collector.tick()
            assert [channel.look(0.01) for channel in channels] == [None] * 3
        assert [(lost.rank, lost.exit_code, lost.step) for lost in channels[0].lost] == [(2, -9, 7)]
        results = collector.results({"tensor": None, "model": Net()})
        assert torch.equal(results[0]["tensor"], torch.arange(3))
        assert isinstance(results[0]["model"], Net)
        for channel in channels:
            channel.close()


@pytest.mark.parametrize(
    "verdict", [{}, {"over": 3}, {"over": [3]}, {"failure": []}, {"over": [{}]}, {"failure": {}}]
)
def test_a_verdict_that_is_none_is_refused(verdict):
    with serving() as served:
        channel = LauncherChannel(served.join("launcher", 1), 1)
        while 1 not in served.collector._connections:
            pass
        served.collector._connections[1].say(verdict)
        with pytest.raises(WireError):
            channel.look(SECONDS)
        channel.close()


# --- deadlocks ------------------------------------------------------------------------------------


def ask(
    control: ControlChannel, outcomes: dict[int, Any], do: str, waits_in: str, **more: Any
) -> None:
    try:
        outcomes[control.rank] = control.ask(do, waits_in, **more)
    except (Stopped, fs.FlockstepError) as stopped:
        outcomes[control.rank] = stopped


def in_parallel(*calls: Any) -> dict[int, Any]:
    """Each a control channel, and what to ask on it; what it came to, by rank."""
    outcomes: dict[int, Any] = {}
    threads = [
        threading.Thread(target=ask, args=(control, outcomes), kwargs=more)
        for control, more in calls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(outcomes) == len(calls), "somebody still waits"
    for control, _ in calls:
        control.close()
    return outcomes


RECEIVE = {"do": "receive", "waits_in": "recv from rank 1", "peer": 1, "group": "world"}
BARRIER = {"do": "join", "waits_in": "barrier", **said("barrier", moves=False)}
END = {"do": "end", "waits_in": "the end"}


def test_a_deadlock_names_every_rank_its_call_and_its_line():
    with serving() as served:
        served.renew(3)
        controls = [served.control(rank) for rank in range(3)]
        outcomes = in_parallel((controls[0], RECEIVE), (controls[1], BARRIER), (controls[2], END))
        assert all(isinstance(outcome, Stopped) for outcome in outcomes.values())
        failure = served.coordinator.failure
    assert isinstance(failure, fs.DeadlockError)
    first, *ranks = str(failure).splitlines()
    assert first == "no worker can go on:"
    assert ranks[0].startswith("  rank 0 waits in recv from rank 1 at ")
    assert "test_cluster_parts.py:" in ranks[0]
    assert ranks[1].startswith("  rank 1 waits in barrier at ")
    assert ranks[2] == "  rank 2 has ended its program"


def test_a_loss_may_end_a_wait_or_show_that_it_has_no_end():
    for survivors_call, is_deadlock in [
        ((BARRIER, BARRIER), False),
        ((RECEIVE | {"peer": 2}, BARRIER), True),
    ]:
        with serving() as served:
            served.renew(3)
            controls = [served.control(rank) for rank in range(3)]
            controls[0].close()
            loss = threading.Timer(0.2, served.coordinator.declare_lost, [0])
            loss.start()
            outcomes = in_parallel(
                (controls[1], survivors_call[0]), (controls[2], survivors_call[1])
            )
            loss.join()
            failure = served.coordinator.failure
        assert isinstance(failure, fs.DeadlockError) == is_deadlock
        if not is_deadlock:
            assert [outcome["members"] for outcome in outcomes.values()] == [[1, 2]] * 2


def test_nothing_is_a_deadlock_while_somebody_runs():
    with serving() as served:
        served.renew(2)
        controls = [served.control(rank) for rank in range(2)]
        releasing = threading.Timer(
            0.3, lambda: controls[1].ask(**{**RECEIVE, "do": "send", "peer": 0, "message": [0, 1]})
        )
        releasing.start()
        assert in_parallel((controls[0], RECEIVE))[0] == {"message": [0, 1]}
        releasing.join()
        assert served.coordinator.failure is None
        controls[1].close()


def test_the_last_words_of_a_worker_whose_process_is_gone_count():
    with serving() as served:
        served.renew(2)
        controls = [served.control(rank) for rank in range(2)]
        controls[0].tell("steps", steps=1)
        while served.coordinator.steps[0] != 1:  # until it is heard: before, it is not known there
            time.sleep(0.01)
        served.coordinator.declare_gone(0)
        assert served.coordinator.lost == {}
        controls[0].tell("steps", steps=7)
        controls[0].close()
        assert controls[1].await_loss((0,), 5.0).step == 7
        controls[1].close()


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_worker_whose_process_is_gone_and_says_nothing_is_lost(is_connected):
    with serving() as served:
        served.renew(2)
        controls = [served.control(rank) for rank in range(1 - is_connected, 2)]
        served.coordinator.declare_gone(0)
        while is_connected and not served.coordinator.lost:
            served.coordinator.tick()
            time.sleep(0.01)
        assert served.coordinator.lost.keys() == {0}
        for control in controls:
            control.close()


def test_the_last_loss_is_the_failure():
    coordinator = Coordinator(2, "continue")
    coordinator.declare_lost(1, -9, 3)
    assert coordinator.failure is None
    coordinator.declare_lost(0, 7)
    assert isinstance(coordinator.failure, fs.WorkerLost)
    assert str(coordinator.failure) == "rank 0 exited with 7 after step 0"
    assert coordinator.lost.keys() == {0, 1}


# --- what torchrun says ---------------------------------------------------------------------------

ENVIRONMENT = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_the_world_is_what_the_environment_says():
    world = World.read(ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"})
    assert (world.rank, world.size, world.local_size, world.master) == (
        2,
        4,
        4,
        ("10.0.0.1", 29500),
    )
    assert world.host == "127.0.0.1"


@pytest.mark.parametrize("value", [None, "", "two", "-1"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_missing_variable_is_named_in_one_line(name, value):
    environment = {key: text for key, text in ENVIRONMENT.items() if key != name}
    if value is not None:
        environment[name] = value
    with pytest.raises(
        fs.InvalidField, match=f"'{name}' must be set, as torchrun does: torchrun "
    ) as raised:
        World.read(environment)
    assert "\n" not in str(raised.value)


def test_an_interface_that_is_none_is_named():
    with pytest.raises(
        fs.InvalidField, match="'GLOO_SOCKET_IFNAME' must be an interface .* .got 'mars0'."
    ):
        World.read(ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "mars0"}).host
