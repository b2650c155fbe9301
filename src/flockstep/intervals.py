"""How often something happens in the course of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flockstep.errors import InvalidField
from flockstep.fields import fitted, require_choice, require_integer, require_number

SHORTEST_SECONDS = 1e-9
UNITS = ("epochs", "steps", "seconds")

# What may be written, as the unit that it stands for and how many of it.
SPELLINGS = {
    **dict.fromkeys(("epoch", "epochs"), ("epochs", 1)),
    **dict.fromkeys(("", "step", "steps"), ("steps", 1)),
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("seconds", 1)),
    **dict.fromkeys(("min", "minute", "minutes"), ("seconds", 60)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600)),
}


@dataclass(frozen=True)
class Interval:
    """So many epochs, steps, or seconds of the run's clock.

    Fields:
        count: how many; of epochs and steps a whole number.
        unit: "epochs", "steps" or "seconds".

    Example:
        fs.Interval(50, "steps") == fs.Interval.read("50 steps") == fs.Interval.read(50)
        str(fs.Interval.read("5 min"))     # "300 seconds"
    """

    count: float
    unit: str = "steps"

    def __post_init__(self) -> None:
        require_choice("unit", self.unit, UNITS)
        if self.unit == "seconds":
            require_number("count", self.count, at_least=SHORTEST_SECONDS, finite=True)
            object.__setattr__(self, "count", float(self.count))
        else:
            require_integer("count", self.count, 1)

    @classmethod
    def read(cls, value: Interval | str | int, field: str = "interval") -> Interval:
        """An interval from text such as "1 epoch", "50 steps", "0.5 seconds" or "5 min"; a number
        alone is one of steps.
        """
        if isinstance(value, Interval):
            return value
        text = str(fitted(field, value, int | str)).strip()
        found = re.fullmatch(r"([0-9.e+-]*[0-9.])\s*([a-z]*)", text.lower())
        try:
            if found is None or found[2] not in SPELLINGS:
                raise ValueError
            unit, times = SPELLINGS[found[2]]
            count = float(found[1]) * times if unit == "seconds" else int(found[1])
            return cls(count, unit)
        except ValueError:
            message = "be an interval such as '1 epoch', '50 steps', '0.5 seconds' or '5 min'"
            raise InvalidField(f"{field!r} must {message} (got {value!r})") from None

    def __str__(self) -> str:
        unit = self.unit.removesuffix("s") if self.count == 1 else self.unit
        return f"{str(self.count).removesuffix('.0')} {unit}"
