"""Messages between two workers. A tensor travels directly; a letter, sent through here, says
that and what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flockstep.backends.cluster.wire import WireError

Way = tuple[str, int, int]  # group, sender, recipient


class Post:
    """Letters under way: at most one each way, so that a fast sender waits for a slow recipient.

    `answer(rank, reply)` lets a worker go on: a sender when its letter is under way, a recipient
    when it has one."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], None]) -> None:
        self._answer = answer
        self._under_way: dict[Way, Any] = {}  # the letter; None once it was handed over
        self._senders: dict[Way, Any] = {}  # who waits to send, and the letter
        self._recipients: set[Way] = set()  # who waits to receive
        self._lost: set[int] = set()

    def send(self, sender: int, recipient: int, group: str, letter: Any) -> None:
        self._senders[group, sender, recipient] = letter
        self._move((group, sender, recipient))

    def receive(self, recipient: int, sender: int, group: str) -> None:
        self._recipients.add((group, sender, recipient))
        self._move((group, sender, recipient))

    def taken(self, recipient: int, sender: int, group: str) -> None:
        """The tensor has arrived: the next may come."""
        way = (group, sender, recipient)
        if self._under_way.get(way, "nothing") is not None:
            raise WireError(
                f"rank {recipient} was handed nothing of rank {sender} that it could have taken"
            )
        del self._under_way[way]
        self._move(way)

    def lose(self, rank: int) -> None:
        self._lost.add(rank)
        for way in [*self._senders, *self._recipients]:
            self._move(way)

    def _move(self, way: Way) -> None:
        _, sender, recipient = way
        if way in self._senders and recipient in self._lost:
            del self._senders[way]
            self._answer(sender, {"error": "WorkerLost", "lost": recipient})
        if way in self._senders and way not in self._under_way:
            self._under_way[way] = self._senders.pop(way)
            self._answer(sender, {})
        if way in self._recipients:
            letter = self._under_way.get(way)
            if sender in self._lost:
                # What it sent may or may not have left its host: none of it counts.
                self._recipients.remove(way)
                self._answer(recipient, {"error": "WorkerLost", "lost": sender})
            elif letter is not None:
                self._recipients.remove(way)
                self._under_way[way] = None
                self._answer(recipient, {"letter": letter})
