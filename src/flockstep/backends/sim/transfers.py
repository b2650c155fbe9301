"""What a simulated call puts on which links, and what of it is lost.

A network is *plain* where no two calls can share a link, but those to one shared tensor: then the
closed forms of `network.costs` are the time of a call. On all others the streams of a call share
links with those of other calls (`fair.py`):

- A message is a stream from its sender to its receiver, an exchange is two.
- A ring is a stream from each worker to the next: its messages follow each other without a gap, so
  that the slowest link decides how long all takes.
- A broadcast is rounds of a binomial tree, a barrier rounds of empty messages.

Where all links are equal and nobody else is there, that is the closed form, to the tick.

A message that is lost is noticed after a round trip and sent again. So a stream with losses has the
bytes of all attempts, and two latencies more for each. Whether one is lost depends on who sends it,
in which of its exchanges, when, and at which attempt: on nothing that lanes could change, and a run
that goes on from a checkpoint draws the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from flockstep.backends.sim.fair import (
    Done,
    FairLink,
    FairNetwork,
    Rounds,
    Stream,
    arrival_alone,
)
from flockstep.backends.sim.scheduler import Scheduler, Slot, to_ticks
from flockstep.network import Link, Network, Routes, Way, costs
from flockstep.randomness import Purpose, uniform

Plan = Callable[[Sequence[Slot], int], Rounds]
"""What a collective of these workers, in the order of the group, sends for a tensor of so many
bytes."""


class Transfers:
    """The links of one run."""

    def __init__(self, scheduler: Scheduler, network: Network, workers: int, seed: int) -> None:
        self.network = network
        self._scheduler = scheduler
        self._seed = seed
        self._routes = Routes(network, workers)
        self._shared = None if network.is_plain else FairNetwork(scheduler, self._routes)

    @property
    def are_shared(self) -> bool:
        """Whether calls may have to share links with each other."""
        return self._shared is not None

    @property
    def are_closed_forms(self) -> bool:
        """Whether the closed forms say what a collective or a message takes."""
        return self._shared is None and not self.network.loss

    # --- what calls send --------------------------------------------------------------------------

    def message(
        self,
        slot: Slot,
        way: Link,
        nbytes: int,
        *,
        place: int = 0,
        may_be_lost: bool = False,
        there: Link | None = None,
    ) -> tuple[Stream, bool]:
        """A message of a worker, or the answer to one that went `there`; and whether it is lost for
        good.
        """
        if may_be_lost:
            return _message(way, nbytes, 0, there), self._is_lost(slot, place, 0)
        again = self._attempts_lost(slot, place)
        slot.meter.sent_again(again * nbytes)
        return _message(way, nbytes, again, there), False

    def all_reduce(self, link: Link) -> Plan:
        def plan(slots: Sequence[Slot], nbytes: int) -> Rounds:
            steps = 2 * (len(slots) - 1)
            chunk = -(-nbytes // len(slots))
            return self._ring(link, slots, nbytes, steps, chunk, costs.all_reduce_seconds)

        return plan

    def all_gather(self, link: Link) -> Plan:
        def plan(slots: Sequence[Slot], nbytes: int) -> Rounds:
            steps = len(slots) - 1
            return self._ring(link, slots, nbytes, steps, nbytes, costs.all_gather_seconds)

        return plan

    def _ring(
        self,
        link: Link,
        slots: Sequence[Slot],
        nbytes: int,
        steps: int,
        chunk: int,
        seconds: Callable[[Link, int, float], float],
    ) -> Rounds:
        workers, streams = len(slots), []
        for index, slot in enumerate(slots):
            way = self._way(link, slot, slots[(index + 1) % workers])
            again = sum(self._attempts_lost(slot, step) for step in range(steps))
            slot.meter.sent_again(again * chunk)

            ticks = to_ticks(seconds(way, workers, nbytes))
            latency = min(ticks, to_ticks(steps * way.latency_seconds))
            work = ticks - latency
            streams.append(
                _stream(work + work * again // steps, latency + 2 * latency * again // steps, way)
            )
        return [streams]

    def broadcast(self, link: Link, root: int) -> Plan:
        def plan(slots: Sequence[Slot], nbytes: int) -> Rounds:
            workers = len(slots)
            ranks = [slot.rank for slot in slots]
            if root not in ranks:  # it is lost: nothing travels
                return [[Stream(0, 0)]]
            start = ranks.index(root)
            from_root = [slots[(start + distance) % workers] for distance in range(workers)]
            pairs = [
                [(sender, sender + (1 << k)) for sender in range(1 << k)]
                for k in range((workers - 1).bit_length())
            ]
            ends = [[pair for pair in each if pair[1] < workers] for each in pairs]
            return self._rounds(link, from_root, ends, nbytes, costs.broadcast_seconds)

        return plan

    def barrier(self, link: Link) -> Plan:
        def plan(slots: Sequence[Slot], _: int) -> Rounds:
            workers = len(slots)
            ends = [
                [(sender, (sender + (1 << k)) % workers) for sender in range(workers)]
                for k in range((workers - 1).bit_length())
            ]
            return self._rounds(
                link, slots, ends, 0, lambda way, size, _: costs.barrier_seconds(way, size)
            )

        return plan

    def _rounds(
        self,
        link: Link,
        slots: Sequence[Slot],
        ends: Sequence[Sequence[tuple[int, int]]],
        nbytes: int,
        seconds: Callable[[Link, int, float], float],
    ) -> Rounds:
        """Messages of one size between these places, in rounds which together take the closed
        form's time where links are equal.
        """
        rounds = []
        for number, pairs in enumerate(ends):
            streams = []
            for sender, receiver in pairs:
                way = self._way(link, slots[sender], slots[receiver])
                again = self._attempts_lost(slots[sender], number)
                slots[sender].meter.sent_again(again * nbytes)

                whole = to_ticks(seconds(way, len(slots), nbytes))
                ticks = _part(whole, number, len(ends))
                latencies = to_ticks(len(ends) * way.latency_seconds)
                latency = min(ticks, _part(latencies, number, len(ends)))
                work = (ticks - latency) * (1 + again)
                streams.append(_stream(work, latency * (1 + 2 * again), way))
            rounds.append(streams)
        return rounds

    # --- ways -------------------------------------------------------------------------------------

    def between(self, sender: int, receiver: int) -> Link:
        """What a message between two workers of the world travels on."""
        if self._shared is None:
            return self.network.between((sender, receiver))
        return self._routes.way(sender, receiver)

    def to_home(self, rank: int, home: int | None, identity: str, link: Link) -> Link:
        """From a worker to a shared tensor."""
        return link if self._shared is None else self._routes.to_home(rank, home, identity)

    def from_home(self, rank: int, home: int | None, identity: str, link: Link) -> Link:
        """From a shared tensor to a worker."""
        return link if self._shared is None else self._routes.from_home(rank, home, identity)

    def together(self, rank: int, streams: Sequence[Stream]) -> list[Stream]:
        """Streams of one worker that leave at the same time: it sends no faster for that."""
        out = self._routes.out(rank)
        return [replace(each, resources=each.resources + out) for each in streams]

    def _way(self, link: Link, sender: Slot, receiver: Slot) -> Link:
        """On a plain network a collective runs on the link of its slowest pair."""
        return link if self._shared is None else self._routes.way(sender.rank, receiver.rank)

    # --- time -------------------------------------------------------------------------------------

    def home_link(self) -> FairLink | None:
        """The link to a new shared tensor; None: it is one of those that all share."""
        return FairLink(self._scheduler) if self._shared is None else None

    def carry_to_home(self, rank: int, ticks: int, streams: Sequence[Stream], done: Done) -> None:
        """Begin at once, in the order of all calls."""
        assert self._shared is not None
        self._shared.carry(rank, ticks, [streams], done)

    def carry(self, slots: Sequence[Slot], ticks: int, rounds: Rounds, done: Done) -> None:
        """From `ticks` on, for workers who have met; what travels in the background is charged as
        if nobody else was there, since the time of who sent it does not go on with it.
        """
        shared = self._shared
        if shared is None or any(slot.is_in_background for slot in slots):
            done(self.arrival_alone(ticks, rounds))
            return
        last = max(slots, key=lambda slot: (slot.clock, slot.rank)).rank
        is_own = len(slots) == 1

        def begin() -> None:
            if not (is_own and slots[0].loss is not None):
                shared.carry(last, ticks, rounds, done, is_own)

        self._scheduler.at(ticks, begin, last)

    def arrival_alone(self, ticks: int, rounds: Rounds) -> int:
        """When what begins at `ticks` has arrived if nobody else is there."""
        return arrival_alone(None if self._shared is None else self._routes, ticks, rounds)

    def drop(self, rank: int, ticks: int) -> None:
        """A worker is dead: what it sends or asks for travels no further. A collective that has
        begun is one of those who are left, too.
        """
        if self._shared is not None:
            self._shared.drop(rank, ticks)

    def belongs_to(self, ranks: Collection[int]) -> bool:
        """Whether a transfer is under way that was begun by one of these."""
        return self._shared is not None and self._shared.belongs_to(ranks)

    def was_under_way(self, rank: int) -> bool:
        return self._shared is not None and self._shared.was_under_way(rank)

    def saved(self) -> dict[str, object] | None:
        return None if self._shared is None else self._shared.saved()

    def load(self, saved: dict[str, object] | None) -> None:
        if self._shared is not None and saved is not None:
            self._shared.load(saved)

    # --- loss -------------------------------------------------------------------------------------

    def _attempts_lost(self, slot: Slot, place: int) -> int:
        """How often a message is lost before it arrives."""
        lost = 0
        while self._is_lost(slot, place, lost):
            lost += 1
        return lost

    def _is_lost(self, slot: Slot, place: int, attempt: int) -> bool:
        probability = self.network.loss
        if not probability or slot.meter.paused:
            return False
        number = slot.meter.exchanges
        name = (slot.rank, number, slot.clock, place, attempt)
        return uniform(Purpose.LOSS, self._seed, *name) < probability


def _message(way: Link, nbytes: int, again: int, there: Link | None) -> Stream:
    """An answer and its request, `there`, together take the closed form's time."""
    ticks = to_ticks(costs.message_seconds(way, nbytes))
    if there is not None:
        before = costs.message_seconds(there, nbytes)
        ticks = to_ticks(before + costs.message_seconds(way, nbytes)) - to_ticks(before)
    latency = min(ticks, to_ticks(way.latency_seconds))
    return _stream((ticks - latency) * (1 + again), latency * (1 + 2 * again), way)


def _stream(work: int, delay: int, way: Link) -> Stream:
    if isinstance(way, Way):
        return Stream(work, delay, way.resources, way.ranks)
    return Stream(work, delay)


def _part(whole: int, number: int, count: int) -> int:
    """That part of so many equal ones, which add up to the whole."""
    return whole * (number + 1) // count - whole * number // count
