"""Links that transfers share fairly, in virtual time.

A transfer is so many ticks of *work*: what its bytes take where it is alone. While it shares links
it gets on more slowly. When it ends depends on what begins later, so its end is an event that the
scheduler settles in the order of time.

Progress is counted in fixed point, `FINE` bits below a tick, and rounded the same way whoever asks:
equal transfers end in the same tick, and one that is alone takes its work, exactly."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flockstep.backends.sim.scheduler import Scheduler, to_ticks
from flockstep.network import Resource, Routes

FINE = 40
HALF = 1 << (FINE - 1)

Done = Callable[[int], None]
"""Told when the last bytes have arrived."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Messages that go one way, one after the other."""

    work: int  # ticks that their bytes take where they are alone
    delay: int  # ticks of latency
    resources: tuple[Resource, ...] = ()  # links that they share with others
    ranks: tuple[int, ...] = ()  # whose links they are


Rounds = Sequence[Sequence[Stream]]
"""Streams that go at the same time; the next round begins when the last of them has arrived."""


class Events(Protocol):
    """What runs acts in the order of time: a run's scheduler."""

    def at(self, ticks: int, act: Callable[[], None]) -> None: ...


class FairLink:
    """One link, of which all transfers under way have equal parts.

    All get on at the same pace, so one number says how far everybody has got: the `progress` of
    whoever has been there since the link was last idle. A transfer ends when it has grown by the
    transfer's work.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._moment = 0  # of the last beginning or end
        self._progress = 0
        self._under_way: list[tuple[int, int, int, Done]] = []  # heap: progress at the end, rank
        self._alarm: int | None = None  # when to look whether one has ended
        self._saved: dict[int, int] = {}  # of transfers that will be begun again, by rank

    def carry(self, rank: int, ticks: int, stream: Stream, done: Done) -> None:
        """Begin at `ticks`, on behalf of a worker. Called in the order of time."""
        end = self._saved.pop(rank, None)
        if end is None:
            self._move_on(ticks)
            end = self._progress + (stream.work << FINE)
        heapq.heappush(self._under_way, (end, rank, stream.delay, done))
        self._watch()

    def _move_on(self, ticks: int) -> None:
        count = len(self._under_way)
        if not count and not self._saved:
            self._moment, self._progress = ticks, 0
        elif not count:
            self._moment = max(self._moment, ticks)
        elif ticks > self._moment:
            self._progress += ((ticks - self._moment) << FINE) // count
            self._moment = ticks

    def _next_end(self) -> int:
        left = max(0, self._under_way[0][0] - self._progress)
        return self._moment + ((left * len(self._under_way) + HALF) >> FINE)

    def _watch(self) -> None:
        end = self._next_end()
        if self._alarm is None or end < self._alarm:
            self._alarm = end
            self._scheduler.at(end, lambda: self._look(end))

    def _look(self, ticks: int) -> None:
        """Those who have ended by now have."""
        if self._alarm != ticks:
            return
        self._alarm = None
        while self._under_way and (end := self._next_end()) <= ticks:
            self._progress, _, delay, done = heapq.heappop(self._under_way)
            self._moment = end
            done(end + delay)
        if self._under_way:
            self._watch()

    def drop(self, rank: int, ticks: int) -> None:
        """What a worker has under way ends here."""
        rest = [each for each in self._under_way if each[1] != rank]
        if len(rest) < len(self._under_way):
            self._move_on(ticks)
            self._under_way = rest
            heapq.heapify(self._under_way)
            if rest:
                self._watch()

    def was_under_way(self, rank: int) -> bool:
        return rank in self._saved

    def saved(self) -> dict[str, Any]:
        under_way = [[rank, end] for end, rank, *_ in sorted(self._under_way, key=lambda t: t[:2])]
        return {"moment": self._moment, "progress": self._progress, "under_way": under_way}

    def load(self, saved: dict[str, Any]) -> None:
        self._moment, self._progress = saved["moment"], saved["progress"]
        self._saved = dict(saved["under_way"])


@dataclass(eq=False, slots=True)
class _Flow:
    """A stream that is under way."""

    stream: Stream
    transfer: _Transfer
    place: int  # in its round
    capacity: int  # of the narrowest of its links, before any change: that of its work
    left: int  # of its work, in fixed point
    delay: int
    share: int = 0

    def end(self, moment: int) -> int:
        return moment + (2 * self.left * self.capacity + (self.share << FINE)) // (
            self.share << (FINE + 1)
        )


@dataclass(eq=False, slots=True)
class _Transfer:
    """Rounds that one call has under way."""

    rank: int  # that it belongs to
    rounds: Rounds
    done: Done
    is_own: bool  # of that worker alone
    round: int = 0
    until: int = 0  # when what has arrived of this round did
    flows: int = 0  # of this round, under way


class FairNetwork:
    """Links that are shared by max–min fairness: nobody can have more without taking it from
    somebody who has no more than he.
    """

    def __init__(self, scheduler: Events, routes: Routes) -> None:
        self._scheduler = scheduler
        self._routes = routes
        self._changes = [to_ticks(seconds) for seconds in routes.change_seconds]
        self._moment = 0
        self._era = 0
        self._flows: list[_Flow] = []
        self._transfers: dict[int, _Transfer] = {}  # by rank
        self._alarm: int | None = None
        self._saved: dict[int, dict[str, Any]] = {}

    def carry(self, rank: int, ticks: int, rounds: Rounds, done: Done, is_own: bool = True) -> None:
        """Begin at `ticks`, on behalf of a worker. Called in the order of time."""
        transfer = _Transfer(rank, rounds, done, is_own)
        self._transfers[rank] = transfer
        saved = self._saved.pop(rank, None)
        if saved is None:
            self._begin_round(transfer, ticks)
            return
        transfer.round, transfer.until = saved["round"], saved["until"]
        for place, left, delay in saved["flows"]:
            self._add(transfer, place, left, delay)
        if transfer.flows:
            self._share_out()
        else:
            self._end_round(transfer)

    def _begin_round(self, transfer: _Transfer, ticks: int) -> None:
        self._move_on(ticks)
        transfer.until = ticks
        for place, stream in enumerate(transfer.rounds[transfer.round]):
            delay = stream.delay
            if self._era:
                delay = round(delay * self._routes.latency_factor(stream.ranks, self._era))
            if stream.work:
                self._add(transfer, place, stream.work << FINE, delay)
            else:
                transfer.until = max(transfer.until, ticks + delay)
        if transfer.flows:
            self._share_out()
        else:
            self._end_round(transfer)

    def _add(self, transfer: _Transfer, place: int, left: int, delay: int) -> None:
        stream = transfer.rounds[transfer.round][place]
        capacity = min(self._routes.capacity(each, 0) for each in stream.resources)
        self._flows.append(_Flow(stream, transfer, place, capacity, left, delay))
        transfer.flows += 1

    def _end_round(self, transfer: _Transfer) -> None:
        """All of a round has arrived, or will by `until`."""
        if transfer.round + 1 == len(transfer.rounds):
            del self._transfers[transfer.rank]
            transfer.done(transfer.until)
            return
        ticks = transfer.until

        def begin() -> None:
            transfer.round += 1
            self._begin_round(transfer, ticks)

        self._scheduler.at(ticks, begin)

    def _move_on(self, ticks: int) -> None:
        """All flows get on until `ticks`. Changes of links before are events of their own."""
        if not self._flows:
            self._moment = max(self._moment, ticks) if self._saved else ticks
            self._era = bisect_right(self._changes, self._moment)
            return
        passed = ticks - self._moment
        if passed > 0:
            for flow in self._flows:
                flow.left = max(0, flow.left - ((passed * flow.share) << FINE) // flow.capacity)
            self._moment = ticks

    def _share_out(self) -> None:
        """Progressive filling: the link with the least for each of its flows gives them that, and
        what they leave of other links is for the rest.
        """
        left: dict[Any, int] = {}
        users: dict[Any, list[_Flow]] = {}
        for flow in self._flows:
            flow.share = 0
            for resource in flow.stream.resources:
                users.setdefault(resource, []).append(flow)
        count = {resource: len(flows) for resource, flows in users.items()}
        for resource in users:
            left[resource] = self._routes.capacity(resource, self._era)

        heap = [(left[each] // count[each], number, each) for number, each in enumerate(users)]
        heapq.heapify(heap)
        while heap:
            share, number, resource = heapq.heappop(heap)
            if not count[resource]:
                continue
            now = left[resource] // count[resource]
            if now > share:  # some of its flows have got less elsewhere
                heapq.heappush(heap, (now, number, resource))
                continue
            for flow in users[resource]:
                if not flow.share:
                    flow.share = max(1, share)
                    for each in flow.stream.resources:
                        left[each] -= share
                        count[each] -= 1
        self._watch()

    def _watch(self) -> None:
        ticks = min(flow.end(self._moment) for flow in self._flows)
        if self._era < len(self._changes):
            ticks = min(ticks, max(self._changes[self._era], self._moment))
        if self._alarm is None or ticks < self._alarm:
            self._alarm = ticks
            self._scheduler.at(ticks, lambda: self._look(ticks))

    def _look(self, ticks: int) -> None:
        if self._alarm != ticks:
            return
        self._alarm = None
        if not self._flows:
            return
        ended = [flow for flow in self._flows if flow.end(self._moment) <= ticks]
        changes = self._era < len(self._changes) and self._changes[self._era] <= ticks
        if ended or changes:
            self._move_on(ticks)
            if changes:
                self._era += 1
            for flow in ended:
                flow.left = -1
            self._flows = [flow for flow in self._flows if flow.left >= 0]
            for flow in ended:
                self._end(flow, ticks)
            if self._flows:
                self._share_out()
        else:
            self._watch()

    def _end(self, flow: _Flow, ticks: int) -> None:
        transfer = flow.transfer
        transfer.until = max(transfer.until, ticks + flow.delay)
        transfer.flows -= 1
        if not transfer.flows:
            self._end_round(transfer)

    def drop(self, rank: int, ticks: int) -> None:
        """What a worker alone has under way ends here."""
        transfer = self._transfers.get(rank)
        if transfer is None or not transfer.is_own:
            return
        del self._transfers[rank]
        self._move_on(ticks)
        self._flows = [flow for flow in self._flows if flow.transfer is not transfer]
        if self._flows:
            self._share_out()

    def belongs_to(self, ranks: Collection[int]) -> bool:
        return any(rank in self._transfers for rank in ranks)

    # --- saving -----------------------------------------------------------------------------------

    def was_under_way(self, rank: int) -> bool:
        return rank in self._saved

    def saved(self) -> dict[str, Any]:
        transfers = []
        for rank, transfer in self._transfers.items():
            flows = [
                [flow.place, flow.left, flow.delay]
                for flow in self._flows
                if flow.transfer is transfer
            ]
            transfers.append(
                [rank, {"round": transfer.round, "until": transfer.until, "flows": flows}]
            )
        return {"moment": self._moment, "era": self._era, "transfers": transfers}

    def load(self, saved: dict[str, Any]) -> None:
        self._moment, self._era = saved["moment"], saved["era"]
        self._saved = dict(saved["transfers"])


class _EventsOfOneTransfer:
    """Time in which nothing else happens."""

    def __init__(self) -> None:
        self._coming: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, ticks: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (ticks, next(self._numbers), act))

    def run(self) -> None:
        while self._coming:
            _, _, act = heapq.heappop(self._coming)
            act()


def arrival_alone(routes: Routes | None, ticks: int, rounds: Rounds) -> int:
    """When a transfer that begins at `ticks` has arrived if nobody else is there: its own streams
    share links, which may change meanwhile. Without routes no two streams share a link.
    """
    if routes is None:
        longest = (max(each.work + each.delay for each in streams) for streams in rounds if streams)
        return ticks + sum(longest)
    events = _EventsOfOneTransfer()
    arrivals: list[int] = []
    FairNetwork(events, routes).carry(0, ticks, rounds, arrivals.append)
    events.run()
    return arrivals[0]
