"""Simulated workers that die, pause and come back: who, and when."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flockstep.backends.sim.compute import FrozenDict
from flockstep.errors import InvalidField
from flockstep.fields import require, require_integer, require_number, shown
from flockstep.units import read_seconds, shown_number, shown_seconds

LONGEST_SECONDS = 1e12
HIGHEST_RATE = 1e6  # more would be no pauses, but another speed
STEPS = re.compile(r"([0-9]{1,18}) ?steps?")


@dataclass(frozen=True)
class Pause:
    """Worker `rank` does nothing from `at` on for `seconds`, and then goes on where it was.

    `at` is a time of the run's clock, in seconds or as text ("500ms"), or a number of steps as
    text: "100 steps" is when the worker has computed its hundredth. At 0 it joins late.

        fs.Pause(2, seconds=30)                # rank 2 joins half a minute late
        fs.Pause(2, at="100 steps", seconds=5)
    """

    rank: int
    at: float | str = 0.0
    seconds: float = 1.0

    def __post_init__(self) -> None:
        require_integer("rank", self.rank, 0)
        object.__setattr__(self, "at", _moment("at", self.at))
        require_number("seconds", self.seconds, above=0, at_most=LONGEST_SECONDS)
        object.__setattr__(self, "seconds", float(self.seconds))


@dataclass(frozen=True)
class Faults:
    """What befalls simulated workers. What is drawn at random depends on (seed, rank) alone.

    Fields:
        deaths: by rank, when it dies: seconds of the run's clock, a time as text ("1.5s"), or a
            number of steps as text, "100 steps": as soon as it has computed its hundredth, of
            which nobody hears.
        pauses: one or several `fs.Pause`.
        death_rate: deaths per worker and second, at random: 0.001 is one death in 1,000 seconds of
            a worker, on average.
        pause_rate: pauses per worker and second in which it is not paused, at random.
        pause_seconds: how long such a pause is on average; each is drawn from an exponential
            distribution.

    Example:
        fs.Faults(deaths={3: "100 steps"}, pauses=[fs.Pause(2, at="1s", seconds=5)])
        fs.run("digits-mlp", "local_sgd(period=8)", faults=fs.Faults(death_rate=0.01),
               on_failure="continue").lost
    """

    deaths: Mapping[int, float | str] = field(default_factory=dict, hash=False)
    pauses: tuple[Pause, ...] = ()
    death_rate: float = 0.0
    pause_rate: float = 0.0
    pause_seconds: float = 1.0

    def __post_init__(self) -> None:
        rule = "map ranks to seconds, or to steps, such as {3: '100 steps'}"
        require(isinstance(self.deaths, Mapping), "deaths", rule, self.deaths)
        for rank in self.deaths:
            require_integer("deaths", rank, 0)
        moments = {rank: _moment("deaths", at) for rank, at in self.deaths.items()}
        object.__setattr__(self, "deaths", FrozenDict(moments))  # which nobody can change
        object.__setattr__(self, "pauses", _pauses(self.pauses))
        for name in ("death_rate", "pause_rate"):
            require_number(name, getattr(self, name), at_least=0, at_most=HIGHEST_RATE)
            object.__setattr__(self, name, float(getattr(self, name)))
        require_number("pause_seconds", self.pause_seconds, above=0, at_most=LONGEST_SECONDS)
        object.__setattr__(self, "pause_seconds", float(self.pause_seconds))

    @classmethod
    def read(cls, value: Any, name: str = "faults") -> Faults | None:
        """As they are; those that cannot happen are None."""
        rule = "be one such as fs.Faults(deaths={3: '100 steps'})"
        require(value is None or isinstance(value, Faults), name, rule, value)
        return None if value is None or value.are_none else value

    @property
    def are_none(self) -> bool:
        """Whether nothing can befall anybody."""
        return not (self.pauses or self.pause_rate or self.kill)

    @property
    def kill(self) -> bool:
        """Whether somebody may die."""
        return bool(self.deaths or self.death_rate)

    def require_workers(self, workers: int) -> None:
        """Complain of ranks that do not exist, and if nobody would be left."""
        rule = f"name ranks below the number of workers, {workers}"
        for rank in self.deaths:
            require(rank < workers, "deaths", rule, rank)
        for pause in self.pauses:
            require(pause.rank < workers, "pauses", rule, pause.rank)
        rule = f"leave one of {workers} workers alive"
        require(len(self.deaths) < workers, "deaths", rule, self.deaths)

    def in_words(self) -> str:
        """`rank 3 dies after 100 steps; rank 2 pauses for 5 s at 1 s`."""
        words = [f"rank {rank} dies {_when(at)}" for rank, at in sorted(self.deaths.items())]
        if self.death_rate:
            words.append(f"{shown_number(self.death_rate)} deaths per worker and second")
        words += [
            f"rank {each.rank} pauses for {shown_seconds(each.seconds)} {_when(each.at)}"
            for each in self.pauses
        ]
        if self.pause_rate:
            words.append(
                f"{shown_number(self.pause_rate)} pauses per worker and second, of "
                f"{shown_seconds(self.pause_seconds)}"
            )
        return "; ".join(words)


def steps_in(moment: float | str) -> int | None:
    """How many steps a moment is, if it is counted in steps."""
    found = STEPS.fullmatch(moment) if isinstance(moment, str) else None
    return None if found is None else int(found[1])


def _moment(name: str, value: Any) -> float | str:
    """Seconds as a number, or steps as a text."""
    if isinstance(value, str):
        text = value.strip()
        steps = steps_in(text)
        if steps is not None:
            require(steps >= 1, name, "be at least 1 step", value)
            return f"{steps} step{'s' if steps > 1 else ''}"
        try:
            value = read_seconds(name, text)
        except InvalidField:
            rule = "be seconds, a time such as '1.5s', or steps such as '100 steps'"
            raise InvalidField(f"{name!r} must {rule} (got {shown(value)})") from None
    require_number(name, value, at_least=0, at_most=LONGEST_SECONDS)
    return float(value)


def _pauses(value: Any) -> tuple[Pause, ...]:
    rule = "be one such as fs.Pause(2, at='1s', seconds=5), or several"
    pauses = (value,) if isinstance(value, Pause) else value
    require(isinstance(pauses, Iterable) and not isinstance(pauses, str), "pauses", rule, value)
    pauses = tuple(pauses)
    for each in pauses:
        require(isinstance(each, Pause), "pauses", rule, each)
    return pauses


def _when(moment: float | str) -> str:
    return f"after {moment}" if isinstance(moment, str) else f"at {shown_seconds(moment)}"
