"""Agreement on collective calls: who takes part, that all call the same, and that all came out of
it.

Every member of a group numbers its calls. A call may go on when all members that are still there
have come with the same number and have called the same. Where workers may be lost, they also say
how the call went: it counts if it went well for all that are left, and is done again by these if
not. So a collective ends in the same way for all.

A call that repeats the one before needs no agreement: whoever calls something else instead asks,
and so differs. Those who repeat come here only if they wait for long ("late"), to hear of such a
difference; they are let go already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flockstep.backends.cluster.wire import WireError

Key = tuple[str, int]


@dataclass
class Call:
    """One collective call of one group."""

    # What each member said, by rank.
    arrived: dict[int, dict[str, Any]] = field(default_factory=dict)
    mismatch: str | None = None
    went: tuple[int, ...] = ()  # who was let go
    reports: dict[int, bool] = field(default_factory=dict)  # how it went


class Calls:
    """All calls that are not over. `answer(rank, reply)` lets a member go on."""

    def __init__(
        self, answer: Callable[[int, dict[str, Any]], None], workers: int, must_report: bool
    ) -> None:
        self._answer = answer
        self._must_report = must_report
        self._calls: dict[Key, Call] = {}
        self._lost: set[int] = set()
        self.groups: dict[str, tuple[int, ...]] = {"world": tuple(range(workers))}

    def join(self, rank: int, said: dict[str, Any]) -> None:
        """A member has come to a call."""
        key = (said["group"], said["seq"])
        call = self._calls.setdefault(key, Call())
        if rank in call.arrived:
            raise WireError(f"rank {rank} has already come to call {key[1]} of {key[0]!r}")
        call.arrived[rank] = said
        others_know = call.mismatch is not None
        call.mismatch = call.mismatch or self._mismatch(call)
        if call.mismatch is not None:
            for who in [rank] if others_know else call.arrived.keys() - self._lost:
                self._answer(who, {"error": "MismatchError", "text": call.mismatch})
        self._let_go(key, call)

    def forget(self, rank: int, said: dict[str, Any]) -> None:
        """A member that came late has moved its tensors."""
        call = self._calls.get((said["group"], said["seq"]), Call())
        if rank in call.arrived and (call.went or not call.arrived[rank]["late"]):
            raise WireError(
                f"rank {rank} did not come late to call {said['seq']} of {said['group']!r}"
            )
        call.arrived.pop(rank, None)
        if not call.arrived:
            self._calls.pop((said["group"], said["seq"]), None)

    def are_all_at(self, group: str, seq: int, passed: Callable[[int, str], int]) -> bool:
        """Whether all members that are left have come to a call, or have passed it without a
        word.
        """
        call = self._calls.get((group, seq), Call())
        members = (rank for rank in self.groups[group] if rank not in self._lost)
        return all(rank in call.arrived or passed(rank, group) >= seq for rank in members)

    def report(self, rank: int, said: dict[str, Any]) -> None:
        """A member tells how its part of a call went."""
        key = (said["group"], said["seq"])
        call = self._calls.get(key)
        if call is None or rank not in call.went or rank in call.reports:
            raise WireError(f"rank {rank} has no part in call {key[1]} of {key[0]!r} to tell of")
        call.reports[rank] = said["ok"]
        self._judge(key, call)

    def lose(self, rank: int) -> None:
        """Nobody waits for `rank` any more."""
        self._lost.add(rank)
        for key, call in list(self._calls.items()):
            if call.went:
                self._judge(key, call)
            elif call.arrived:
                self._let_go(key, call)

    def _mismatch(self, call: Call) -> str | None:
        """Who of those that are here called something else than the first of them."""
        first, *others = sorted(call.arrived.keys() - self._lost)
        for other in others:
            if call.arrived[other]["must"] != call.arrived[first]["must"]:
                texts = [call.arrived[who]["signature"] for who in (first, other)]
                return f"rank {first} called {texts[0]}, rank {other} called {texts[1]}"
        return None

    def _let_go(self, key: Key, call: Call) -> None:
        """Let all members go if all are there."""
        members = tuple(rank for rank in self.groups[key[0]] if rank not in self._lost)
        if not all(rank in call.arrived for rank in members):
            return
        if call.mismatch is not None or self._root_is_lost(call, members):
            del self._calls[key]  # all have heard so
            return
        said = call.arrived[members[0]]
        replies: dict[int, dict[str, Any]] = {
            rank: {"members": members, "data": [call.arrived[who]["data"] for who in members]}
            for rank in members
        }
        if said["call"] == "split":
            self._split(key, call, members, replies)
        late = {rank for rank in members if call.arrived[rank]["late"]}
        if self._must_report and said["moves"]:
            call.went = members
        elif not late:  # who is late is forgotten when it has moved its tensors
            del self._calls[key]
        for rank in replies.keys() - late:
            self._answer(rank, replies[rank])

    def _split(
        self, key: Key, call: Call, members: tuple[int, ...], replies: dict[int, dict[str, Any]]
    ) -> None:
        for rank in members:
            color = call.arrived[rank]["data"]
            name = f"{key[0]}/{key[1]}.{color}"
            self.groups[name] = tuple(who for who in members if call.arrived[who]["data"] == color)
            replies[rank] |= {"group": name, "ranks": self.groups[name]}

    def _judge(self, key: Key, call: Call) -> None:
        """Say how a call ended, once all that took part and are left have told."""
        survivors = tuple(rank for rank in call.went if rank not in self._lost)
        if not all(rank in call.reports for rank in survivors):
            return
        if all(call.reports[rank] for rank in survivors):
            del self._calls[key]
            for rank in survivors:
                self._answer(rank, {"members": []})
            return
        call.went, call.reports = survivors, {}
        if self._root_is_lost(call, survivors):
            del self._calls[key]
            return
        for rank in survivors:
            self._answer(
                rank,
                {"members": survivors, "data": [call.arrived[who]["data"] for who in survivors]},
            )

    def _root_is_lost(self, call: Call, members: tuple[int, ...]) -> bool:
        """Tell all members if what they wait for can come from nobody any more."""
        if not members:
            return True
        root = call.arrived[members[0]].get("root")
        if root is None or root not in self._lost:
            return False
        for rank in members:
            self._answer(rank, {"error": "WorkerLost", "lost": root})
        return True
