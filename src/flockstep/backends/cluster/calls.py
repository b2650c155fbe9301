"""Agreement on collective calls: who takes part, that all call the same, and that all came out of it.

Every member of a group numbers its calls. A call may go on when all members that are still there have come with the
same number and have called the same. Where workers may be lost, they also say how the call went: it counts if it
went well for all that are left, and is done again by these if not. So a collective ends in the same way for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, int]


@dataclass
class Call:
    """One collective call of one group."""

    arrived: dict[int, dict[str, Any]] = field(default_factory=dict)  # what each member said, by rank
    mismatch: str | None = None
    went: tuple[int, ...] = ()  # who was let go
    reports: dict[int, bool] = field(default_factory=dict)  # how it went


class Calls:
    """All calls that are not over. `answer(rank, reply)` lets a member go on."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], None], workers: int, must_report: bool) -> None:
        self._answer = answer
        self._must_report = must_report
        self._calls: dict[Key, Call] = {}
        self._lost: set[int] = set()
        self.groups: dict[str, tuple[int, ...]] = {"world": tuple(range(workers))}

    def join(self, rank: int, said: dict[str, Any]) -> None:
        """A member has come to a call."""
        key = (said["group"], said["seq"])
        call = self._calls.setdefault(key, Call())
        call.arrived[rank] = said
        first = min(call.arrived)
        for other in sorted(call.arrived):
            if call.arrived[other]["must"] != call.arrived[first]["must"]:
                texts = (call.arrived[who]["signature"] for who in (first, other))
                call.mismatch = f"rank {first} called {next(texts)}, rank {other} called {next(texts)}"
        if call.mismatch is not None:
            for who in call.arrived:
                self._answer(who, {"error": "MismatchError", "text": call.mismatch})
            call.arrived = {first: call.arrived[first]}  # who comes later differs from it, or hears the same
            return
        self._let_go(key, call)

    def report(self, rank: int, said: dict[str, Any]) -> None:
        """A member tells how its part of a call went."""
        key = (said["group"], said["seq"])
        call = self._calls[key]
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

    def _let_go(self, key: Key, call: Call) -> None:
        """Let all members go if all are there."""
        members = tuple(rank for rank in self.groups[key[0]] if rank not in self._lost)
        if call.mismatch is not None or not all(rank in call.arrived for rank in members) or not members:
            return
        said = call.arrived[members[0]]
        if self._root_is_lost(call, members):
            del self._calls[key]
            return
        replies: dict[int, dict[str, Any]] = {
            rank: {"members": members, "data": [call.arrived[who]["data"] for who in members]} for rank in members
        }
        if said["call"] == "split":
            self._split(key, call, members, replies)
        if self._must_report and said["moves"]:
            call.went = members
        else:
            del self._calls[key]
        for rank, reply in replies.items():
            self._answer(rank, reply)

    def _split(self, key: Key, call: Call, members: tuple[int, ...], replies: dict[int, dict[str, Any]]) -> None:
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
            self._answer(rank, {"members": survivors, "data": [call.arrived[who]["data"] for who in survivors]})

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
