"""Learning rates over a training, as factors of the base rate. They compose by multiplication."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from flockstep.fields import known_spelling, require, require_marks, require_number
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

    def apply(self, optimizer: Optimizer, progress: Progress) -> None:
        """Set the rate of every group of parameters to its base rate times the factor.

        The base rate is what the group had at the first call, kept as `initial_lr` like torch's own
        schedulers do."""
        factor = self.factor(progress)
        groups = optimizer.param_groups
        # All bases first: groups that were given none of their own share one tensor, and filling
        # changes it for all.
        bases = [float(group.setdefault("initial_lr", float(group["lr"]))) for group in groups]
        for group, base in zip(groups, bases, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

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

        f(t) = γ^(number of marks ≤ t/T)

    Fields:
        at: the marks, as fractions of all steps.
        gamma: γ, what the rate is multiplied with at each mark.

    Paper: He et al., "Deep Residual Learning for Image Recognition", 2016 (÷10 at half and three
        quarters).

    Example:
        fs.StepDecay(at=(0.5, 0.75), gamma=0.1)
    """

    name: ClassVar[str] = "step_decay"
    at: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        require_marks("at", self.at)
        require_number("gamma", self.gamma, above=0, at_most=1)

    def factor(self, progress: Progress) -> float:
        return float(self.gamma ** bisect_right(self.at, progress.fraction))


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
        f(t) = (1 − a) · ((1 − t/T)/(1 − a))^p            from there to the end

    Choices made here: that the end is the last tenth, and that its polynomial starts where the line
    has come to, so that the rate makes no jump.

    Fields:
        at: a, the fraction of all steps at which the end begins.
        power: p, of the end; 1 would go on with the line.

    Paper: Codreanu, Podareanu and Saletore, "Scale out for large minibatch SGD: Residual network
    training on ImageNet-1K with improved accuracy and reduced time to train", 2017.

    Example:
        fs.LinearScaling(8) * fs.FinalCollapse()
    """

    name: ClassVar[str] = "final_collapse"
    at: float = 0.9
    power: float = 2.0

    def __post_init__(self) -> None:
        require_number("at", self.at, above=0, below=1)
        require_number("power", self.power, at_least=1, finite=True)

    def factor(self, progress: Progress) -> float:
        left, at_mark = 1 - progress.fraction, 1 - self.at
        return left if left >= at_mark else at_mark * (left / at_mark) ** self.power


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.name: schedule
    for schedule in (Constant, Warmup, LinearScaling, StepDecay, Polynomial, Cosine, FinalCollapse)
}


def find_schedule(name: str) -> type[Schedule]:
    """The class behind a name such as `step_decay`, or its own name."""
    return SCHEDULES[known_spelling("schedule", name, SCHEDULES)]


def _mix(low: float, high: float, share: float) -> float:
    """`share` of the way from low to high; exactly low at 0, exactly high at 1."""
    return low * (1 - share) + high * share


def _ramp(start: float, end: float, epoch: float, length: float) -> float:
    return end if epoch >= length else _mix(start, end, epoch / length)
