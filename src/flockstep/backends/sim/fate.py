"""When one simulated worker is paused, and when it dies."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from flockstep.backends.sim.faults import LONGEST_SECONDS, Faults, steps_in
from flockstep.backends.sim.scheduler import to_ticks
from flockstep.randomness import Purpose, numpy_stream

DEATH, PAUSES = range(2)  # streams of their own: a rate of deaths changes no pause

Span = tuple[int, int]
"""From when until when, in ticks."""


class Fate:
    """What befalls one worker, as (seed, rank) decides it.

    Fields:
        death: when it dies, in ticks; None: at no time that is known from the start.
        death_step: the step after which it dies; None: after none.
        step_pauses: after which steps it pauses, and for how many ticks.
    """

    def __init__(self, faults: Faults, seed: int, rank: int) -> None:
        own = [pause for pause in faults.pauses if pause.rank == rank]
        moment = faults.deaths.get(rank)
        self.death_step = None if moment is None else steps_in(moment)
        self.death = _earlier(
            None if moment is None or self.death_step else to_ticks(float(moment)),
            _drawn_death(faults, seed, rank),
        )
        self.step_pauses: dict[int, int] = {}
        at_times: list[Span] = []
        for pause in own:
            ticks, step = to_ticks(pause.seconds), steps_in(pause.at)
            if step is None:
                began = to_ticks(float(pause.at))
                at_times.append((began, began + ticks))
            else:
                self.step_pauses[step] = self.step_pauses.get(step, 0) + ticks

        self._coming = _joined(heapq.merge(sorted(at_times), _drawn_pauses(faults, seed, rank)))
        self._pauses: list[Span] = []  # in the order of time, as far as anybody has asked
        self._ends: list[int] = []

    def pause_within(self, since: int, until: int) -> Span | None:
        """The first pause that ends after `since`, if it begins at `until` or before."""
        while not self._pauses or self._pauses[-1][0] <= until:
            following = next(self._coming, None)
            if following is None:
                break
            self._pauses.append(following)
            self._ends.append(following[1])
        place = bisect_right(self._ends, since)
        if place == len(self._pauses) or self._pauses[place][0] > until:
            return None
        return self._pauses[place]

    def awake_from(self, ticks: int) -> int:
        """That moment, or the end of the pause in which it falls."""
        pause = self.pause_within(ticks, ticks)
        return ticks if pause is None else pause[1]


def _earlier(one: int | None, other: int | None) -> int | None:
    known = [ticks for ticks in (one, other) if ticks is not None]
    return min(known, default=None)


def _drawn_death(faults: Faults, seed: int, rank: int) -> int | None:
    if not faults.death_rate:
        return None
    draw = numpy_stream(Purpose.FAULTS, seed, rank, DEATH)
    return to_ticks(min(draw.exponential() / faults.death_rate, LONGEST_SECONDS))


def _drawn_pauses(faults: Faults, seed: int, rank: int) -> Iterator[Span]:
    """Without an end: from the end of one to the beginning of the next as the rate says."""
    if not faults.pause_rate:
        return
    draw = numpy_stream(Purpose.FAULTS, seed, rank, PAUSES)
    ended = 0
    while True:
        gap = min(draw.exponential() / faults.pause_rate, LONGEST_SECONDS)
        began = ended + to_ticks(gap)
        ended = began + to_ticks(draw.exponential(faults.pause_seconds))
        yield began, ended


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """In the order of time; those that overlap or touch are one."""
    current: Span | None = None
    for began, ended in spans:
        if current is None or began > current[1]:
            if current is not None:
                yield current
            current = began, ended
        else:
            current = current[0], max(current[1], ended)
    if current is not None:
        yield current
