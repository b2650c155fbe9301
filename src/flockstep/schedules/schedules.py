"""Learning rates over a training, as factors of the base rate. They compose by multiplication."""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from flockstep.errors import InvalidField
from flockstep.fields import (
    known_spelling,
    require,
    require_integer,
    require_number,
    shown,
)
from flockstep.intervals import Interval
from flockstep.schedules.progress import Progress

MOST_FACTORS = 100  # of a product


class Schedule(ABC):
    """Base class. A schedule is a frozen dataclass that says what the base rate is multiplied with
    at any moment.

        schedule = fs.LinearScaling(8) * fs.StepDecay()   # its factor is the product of theirs
        schedule.apply(optimizer, progress)               # before every step

    It keeps no state, so a training that goes on from a checkpoint needs to know no more than how
    far it has come."""

    name: ClassVar[str]
    """The name on the command line."""

    @property
    def needs_length(self) -> bool:
        """Whether it goes by `progress.fraction` or `total_steps`, and so must know from the start
        how long the training will be. That is the safe answer.
        """
        return True

    @abstractmethod
    def factor(self, progress: Progress) -> float:
        """What the base rate is multiplied with for the next step."""

    def apply(self, optimizer: Optimizer, progress: Progress, setting: str = "lr") -> None:
        """Set the rate of every group of parameters to its base rate times the factor; or another
        setting that is a number, such as "weight_decay".

        The base rate is what the group had at the first call, kept as `initial_lr` like torch's own
        schedulers do."""
        factor = self.factor(progress)
        groups = [group for group in optimizer.param_groups if setting in group]
        kept = f"initial_{setting}"
        # All bases first: groups that were given none of their own share one tensor, and filling
        # changes it for all.
        bases = [float(group.setdefault(kept, float(group[setting]))) for group in groups]
        for group, base in zip(groups, bases, strict=True):
            if isinstance(group[setting], Tensor):
                group[setting].fill_(base * factor)
            else:
                group[setting] = base * factor

    def __mul__(self, other: Schedule) -> Product:
        if not isinstance(other, Schedule):
            return NotImplemented
        return Product(self, other)


@dataclass(frozen=True)
class Product(Schedule):
    """Two schedules at once, as `left * right` gives it.

        f(t) = left(t) · right(t)

    Fields:
        left, right: schedules, products among them.

    Example:
        fs.Warmup(epochs=5) * fs.Cosine()
    """

    name: ClassVar[str] = "product"
    left: Schedule
    right: Schedule

    def __post_init__(self) -> None:
        for field in ("left", "right"):
            value = getattr(self, field)
            require(isinstance(value, Schedule), field, "be a schedule such as fs.Cosine()", value)
        # Whatever is done with a product goes down to its factors, one call within the other.
        rule = f"be a product of at most {MOST_FACTORS} factors"
        require(_factors(self) <= MOST_FACTORS, "schedule", rule, _factors(self))

    @property
    def needs_length(self) -> bool:
        return self.left.needs_length or self.right.needs_length

    def factor(self, progress: Progress) -> float:
        return self.left.factor(progress) * self.right.factor(progress)


def _factors(schedule: Schedule) -> int:
    if isinstance(schedule, Product):
        return _factors(schedule.left) + _factors(schedule.right)
    return 1


class _ByEpoch(Schedule):
    """A schedule that goes by nothing but epochs."""

    @property
    def needs_length(self) -> bool:
        return False


@dataclass(frozen=True)
class Constant(_ByEpoch):
    """The base rate throughout.

        f(t) = 1

    Example:
        fs.Constant()
    """

    name: ClassVar[str] = "constant"

    def factor(self, progress: Progress) -> float:
        return 1.0


@dataclass(frozen=True)
class Warmup(_ByEpoch):
    """A ramp to the base rate, then the base rate.

        f(e) = s + (1 − s) · min(1, e/k)

    Fields:
        epochs: k, the length of the ramp; 0: none.
        start: s, the factor it starts from. At 0 the first step of all does not move the
            parameters.

    Paper: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017; its own
    ramp is LinearScaling.

    Example:
        fs.Warmup(epochs=5) * fs.Cosine()
    """

    name: ClassVar[str] = "warmup"
    epochs: float
    start: float = 0.0

    def __post_init__(self) -> None:
        require_number("epochs", self.epochs, at_least=0, finite=True)
        require_number("start", self.start, at_least=0, at_most=1)

    def factor(self, progress: Progress) -> float:
        return _ramp(self.start, 1.0, progress.epoch, self.epochs)


@dataclass(frozen=True)
class LinearScaling(_ByEpoch):
    """A rate that grows with the batch: from the base rate, ramp up to `scale` times it.

        f(e) = 1 + (n − 1) · min(1, e/k)

    Fields:
        scale: n, how many times the batch that the base rate is for all workers process together in
            a step.
        warmup_epochs: k, the length of the ramp; 0: scaled at once.

    Paper: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017.

    Example:
        fs.LinearScaling(8, warmup_epochs=5) * fs.StepDecay()
    """

    name: ClassVar[str] = "linear_scaling"
    scale: float
    warmup_epochs: float = 5.0

    def __post_init__(self) -> None:
        require_number("scale", self.scale, above=0, finite=True)
        require_number("warmup_epochs", self.warmup_epochs, at_least=0, finite=True)

    def factor(self, progress: Progress) -> float:
        return _ramp(1.0, self.scale, progress.epoch, self.warmup_epochs)


@dataclass(frozen=True)
class StepDecay(Schedule):
    """A drop at each of some moments.

        f(t) = γ^(number of marks ≤ t)

    Fields:
        at: the marks, all of one kind: fractions of all steps, as numbers above 0 and below 1; or
            moments such as "32000 steps", or 32000, and "145 epochs".
        gamma: γ, what the rate is multiplied with at each mark.

    Paper: He et al., "Deep Residual Learning for Image Recognition", 2016 (÷10 at half and three
        quarters).

    Example:
        fs.StepDecay(at=(0.5, 0.75), gamma=0.1)
        fs.StepDecay(at=("32000 steps", "48000 steps"))
    """

    name: ClassVar[str] = "step_decay"
    at: tuple[float | int | str, ...] = (0.5, 0.75)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", _read_marks("at", self.at))
        require_number("gamma", self.gamma, above=0, at_most=1)

    @property
    def needs_length(self) -> bool:
        return _unit_and_marks(self.at)[0] == "fractions"

    def factor(self, progress: Progress) -> float:
        unit, marks = _unit_and_marks(self.at)
        if unit == "fractions":
            now = progress.fraction
        else:
            now = progress.epoch if unit == "epochs" else progress.step
        return float(self.gamma ** bisect_right(marks, now))


Marks = tuple[float | int | str, ...]


def _read_marks(field: str, value: object) -> Marks:
    """Marks as they are written: fractions as numbers, others as texts such as "145 epochs"."""
    rule = (
        "be a tuple of increasing fractions above 0 and below 1, or of increasing moments "
        "such as '32000 steps' or '145 epochs'"
    )
    given: Marks = value if isinstance(value, tuple) else ()
    try:
        marks = tuple(mark if isinstance(mark, float) else str(_moment(mark)) for mark in given)
        units, numbers = zip(*map(_unit_and_number, marks), strict=True) if marks else ((), ())
    except InvalidField:
        raise InvalidField(f"{field!r} must {rule} (got {shown(value)})") from None
    is_one_kind = isinstance(value, tuple) and len(set(units)) <= 1
    require(is_one_kind and list(numbers) == sorted(set(numbers)), field, rule, value)
    return marks


def _moment(mark: object) -> Interval:
    moment = Interval.read(mark)  # type: ignore[arg-type]
    require(moment.unit != "seconds", "at", "be in steps or epochs", mark)
    return moment


def _unit_and_number(mark: float | int | str) -> tuple[str, float]:
    if isinstance(mark, float):
        require_number("at", mark, above=0, below=1)
        return "fractions", mark
    moment = _moment(mark)
    return moment.unit, moment.count


@functools.lru_cache(maxsize=64)  # asked for before every step
def _unit_and_marks(at: Marks) -> tuple[str, tuple[float, ...]]:
    pairs = [_unit_and_number(mark) for mark in at]
    return (pairs[0][0] if pairs else "steps"), tuple(number for _, number in pairs)


@dataclass(frozen=True)
class SlowStart(_ByEpoch):
    """A large rate only half as large as usual, but for longer; then three drops.

        f(e) = the factor of the part in which epoch e lies; behind the last part, its factor

    By default 0.5 for 40 epochs, 0.075 for 30, 0.01 for 15 and 0.001 for 5.

    Fields:
        epochs: how long each part is.
        factors: of the base rate, one for each part.

    Paper: Akiba, Suzuki and Fukuda, "Extremely Large Minibatch SGD: Training ResNet-50 on ImageNet
    in 15 Minutes", 2017.

    Example:
        fs.SlowStart(epochs=(8, 6, 3, 1))
    """

    name: ClassVar[str] = "slow_start"
    epochs: tuple[float, ...] = (40.0, 30.0, 15.0, 5.0)
    factors: tuple[float, ...] = (0.5, 0.075, 0.01, 0.001)

    def __post_init__(self) -> None:
        rule = "be a tuple of numbers, one at least"
        for field in ("epochs", "factors"):
            values = getattr(self, field)
            require(isinstance(values, tuple) and len(values) > 0, field, rule, values)
        for length in self.epochs:
            require_number("epochs", length, above=0, finite=True)
        for factor in self.factors:
            require_number("factors", factor, at_least=0, finite=True)
        as_many = len(self.factors) == len(self.epochs)
        require(as_many, "factors", f"be as many as epochs, {len(self.epochs)}", self.factors)

    def factor(self, progress: Progress) -> float:
        ends = list(itertools.accumulate(self.epochs))
        part = min(bisect_right(ends, progress.epoch), len(ends) - 1)
        return self.factors[part]


@dataclass(frozen=True)
class Polynomial(Schedule):
    """A fall to `end` that is linear, or of another power.

        f(t) = e + (1 − e) · (1 − t/T)^p

    Fields:
        power: p; 1 is linear, above it the rate falls early, below it late.
        end: e, the factor at the end.

    Example:
        fs.Polynomial(power=2.0)
    """

    name: ClassVar[str] = "polynomial"
    power: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        require_number("power", self.power, above=0, finite=True)
        require_number("end", self.end, at_least=0, at_most=1)

    def factor(self, progress: Progress) -> float:
        return _mix(self.end, 1.0, (1 - progress.fraction) ** self.power)


@dataclass(frozen=True)
class Cosine(Schedule):
    """A fall to `end` along half a wave: slow, fast, slow.

        f(t) = e + (1 − e) · (1 + cos(π·t/T))/2

    Fields:
        end: e, the factor at the end.

    Paper: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017;
        without restarts.

    Example:
        fs.Warmup(epochs=5) * fs.Cosine()
    """

    name: ClassVar[str] = "cosine"
    end: float = 0.0

    def __post_init__(self) -> None:
        require_number("end", self.end, at_least=0, at_most=1)

    def factor(self, progress: Progress) -> float:
        return _mix(self.end, 1.0, (1 + math.cos(math.pi * progress.fraction)) / 2)


@dataclass(frozen=True)
class FinalCollapse(Schedule):
    """A linear fall that steepens at the end.

        f(t) = 1 − t/T                                    before the mark a
        f(t) = (1 − a) · (1 − s)^p                        from there to the end

    With s = (t/T − a)/(1 − a), the share of the end that is over. With several cycles the end has
    so many equal parts, s is the share of the part that is under way, and the rate leaps back to
    1 − a with each: the models at the ends of the parts (`ends`) make an ensemble, see
    `fs.Ensemble`.

    Choices made here: that the end is the last tenth, and that its polynomial starts where the line
    has come to, so that the rate makes no jump; that all cycles are alike.

    Fields:
        at: a, the fraction of all steps at which the end begins.
        power: p, of the end; 1 would go on with the line.
        cycles: how often the rate collapses.

    Paper: Codreanu, Podareanu and Saletore, "Scale out for large minibatch SGD: Residual network
    training on ImageNet-1K with improved accuracy and reduced time to train", 2017.

    Example:
        fs.LinearScaling(8) * fs.FinalCollapse()
        fs.FinalCollapse(at=0.7, cycles=3).ends     # after 80, 90 and 100 % of all steps
    """

    name: ClassVar[str] = "final_collapse"
    at: float = 0.9
    power: float = 2.0
    cycles: int = 1

    def __post_init__(self) -> None:
        require_number("at", self.at, above=0, below=1)
        require_number("power", self.power, at_least=1, finite=True)
        require_integer("cycles", self.cycles, 1)

    @property
    def ends(self) -> tuple[float, ...]:
        """The fractions of all steps at which the rate has collapsed."""
        length = (1 - self.at) / self.cycles
        return (*(self.at + number * length for number in range(1, self.cycles)), 1.0)

    def factor(self, progress: Progress) -> float:
        left, at_mark = 1 - progress.fraction, 1 - self.at
        if left >= at_mark:
            return left
        # In cycles that are still to come: 2.3 is in the third from the end, 0.3 of it is left.
        to_come = left / at_mark * self.cycles
        of_this = to_come - max(0, math.ceil(to_come) - 1)
        return float(at_mark * of_this**self.power)


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.name: schedule
    for schedule in (
        Constant,
        Warmup,
        LinearScaling,
        StepDecay,
        SlowStart,
        Polynomial,
        Cosine,
        FinalCollapse,
    )
}


def find_schedule(name: str) -> type[Schedule]:
    """The class behind a name such as `step_decay`, or its own name."""
    return SCHEDULES[known_spelling("schedule", name, SCHEDULES)]


def _mix(low: float, high: float, share: float) -> float:
    """`share` of the way from low to high; exactly low at 0, exactly high at 1."""
    return low * (1 - share) + high * share


def _ramp(start: float, end: float, epoch: float, length: float) -> float:
    return end if epoch >= length else _mix(start, end, epoch / length)
