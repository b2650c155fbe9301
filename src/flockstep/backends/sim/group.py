"""What the members of a simulated comm share: who has arrived, and what is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flockstep.backends.sim.scheduler import Slot
from flockstep.backends.sim.shared import Home
from flockstep.network import Link


@dataclass(frozen=True)
class Arrival:
    """One worker's part in a collective: what it calls, with what, at what cost."""

    slot: Slot
    call: str
    tensor: Tensor
    settle: Callable[[list[Tensor]], list[Any]]
    seconds: Callable[[int], float]
    heard: list[Any]  # what it brings, once all have arrived


@dataclass(frozen=True)
class Message:
    """What a worker sends, and how long it takes to arrive."""

    slot: Slot
    tensor: Tensor
    ticks: int


@dataclass
class Channel:
    """The way from one worker of a group to another. One message may be on its way."""

    sender: int  # in the group, as the receiver
    receiver: int
    on_its_way: tuple[Tensor, int] | None = None  # with the time of its arrival
    taken_at: int = 0  # the message before
    next: Message | None = None  # of a sender that waits until the way is free
    waiting: tuple[Slot, Tensor] | None = None  # the receiver, and where the message goes


@dataclass
class SimGroup:
    """What the members of one comm share."""

    ranks: tuple[int, ...]  # in the world
    link: Link
    name: str = ""  # the same in every run of the same program
    splits: int = 0  # so far
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    channels: dict[tuple[int, int], Channel] = field(default_factory=dict)
    exchanges: dict[tuple[int, int], tuple[Slot, Tensor, Tensor]] = field(default_factory=dict)
    homes: dict[str, Home] = field(default_factory=dict)

    def channel(self, sender: int, receiver: int) -> Channel:
        """One and the same for both, whichever asks first: `setdefault` is done at once."""
        return self.channels.setdefault((sender, receiver), Channel(sender, receiver))
