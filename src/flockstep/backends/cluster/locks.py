"""Locks of shared tensors, and whose turn it is. Those who are lost hold nothing and are passed
over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Lock:
    """One lock. `grant` tells a waiting member that the lock is now its own."""

    members: tuple[int, ...]
    grant: Callable[[int], None]
    turn: int | None = None
    holder: int | None = None
    holds_in_turn: bool = False
    queue: deque[tuple[int, bool]] = field(default_factory=deque)
    retired: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.turn = self.members[0]

    def ask(self, rank: int, in_turn: bool) -> None:
        self.queue.append((rank, in_turn))
        self._grant_next()

    def release(self, rank: int) -> None:
        if self.holder != rank:
            return
        if self.holds_in_turn:
            self._pass_turn(rank)
        self.holder = None
        self._grant_next()

    def retire(self, rank: int) -> None:
        """`rank` takes no more turns."""
        self.retired.add(rank)
        if self.turn == rank:
            self._pass_turn(rank)
        self._grant_next()

    def lose(self, rank: int) -> None:
        self.queue = deque(entry for entry in self.queue if entry[0] != rank)
        if self.holder == rank:
            self.holder = None
        self.retire(rank)

    def _pass_turn(self, rank: int) -> None:
        start = self.members.index(rank) + 1
        following = (*self.members[start:], *self.members[:start])
        self.turn = next((member for member in following if member not in self.retired), None)

    def _grant_next(self) -> None:
        if self.holder is not None:
            return
        for entry in self.queue:
            rank, in_turn = entry
            if not in_turn or self.turn == rank:
                self.queue.remove(entry)
                self.holder, self.holds_in_turn = rank, in_turn
                self.grant(rank)
                return
