"""Messages between two workers. The tensor travels directly; what goes through here says that it
comes, and what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flockstep.backends.cluster.wire import WireError

Route = tuple[str, int, int]  # group, sender, recipient


class Mailbox:
    """Messages under way: at most one per route, so that a fast sender waits for a slow recipient.

    `answer(rank, reply)` lets a worker go on: a sender when its message is under way, a recipient
    when it has one."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], None]) -> None:
        self._answer = answer
        self._under_way: dict[Route, Any] = {}  # the message; None once it was handed over
        self._senders: dict[Route, Any] = {}  # who waits to send, and the message
        self._recipients: set[Route] = set()  # who waits to receive
        self._lost: set[int] = set()

    def send(self, sender: int, recipient: int, group: str, message: Any) -> None:
        self._senders[group, sender, recipient] = message
        self._move((group, sender, recipient))

    def receive(self, recipient: int, sender: int, group: str) -> None:
        self._recipients.add((group, sender, recipient))
        self._move((group, sender, recipient))

    def taken(self, recipient: int, sender: int, group: str) -> None:
        """The tensor has arrived: the next may come."""
        route = (group, sender, recipient)
        if self._under_way.get(route, "nothing") is not None:
            raise WireError(
                f"rank {recipient} was handed nothing of rank {sender} that it could have taken"
            )
        del self._under_way[route]
        self._move(route)

    def lose(self, rank: int) -> None:
        self._lost.add(rank)
        for route in [*self._senders, *self._recipients]:
            self._move(route)

    def _move(self, route: Route) -> None:
        _, sender, recipient = route
        if route in self._senders and recipient in self._lost:
            del self._senders[route]
            self._answer(sender, {"error": "WorkerLost", "lost": recipient})
        if route in self._senders and route not in self._under_way:
            self._under_way[route] = self._senders.pop(route)
            self._answer(sender, {})
        if route in self._recipients:
            message = self._under_way.get(route)
            if sender in self._lost:
                # What it sent may or may not have left its host: none of it counts.
                self._recipients.remove(route)
                self._answer(recipient, {"error": "WorkerLost", "lost": sender})
            elif message is not None:
                self._recipients.remove(route)
                self._under_way[route] = None
                self._answer(recipient, {"message": message})
