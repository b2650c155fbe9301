"""Averaging often with those nearby, and rarely with all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, overload

from torch import Tensor

from flockstep.codecs import Codec
from flockstep.comm import Comm, handle
from flockstep.fields import require, require_choice, require_integer
from flockstep.optimizers import average_state, reset_state
from flockstep.strategies._compressed import Averager, require_codec
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class Level:
    """Averages of parameters over one group that the worker is in."""

    period: int
    averager: Averager
    start: Tensor | None  # where the replicas of the group were last equal, for a codec

    group: Comm = handle()


@dataclass
class HouseholdsState:
    levels: tuple[Level, ...]  # the world first, then what is inside
    averaged_at: int = 0  # the step after which all replicas were last equal

    household: Comm = handle()


@dataclass(frozen=True)
class Households(Strategy[HouseholdsState]):
    """Workers in equal groups of groups; each level averages with its own period.

        every household_period steps:       x_i ← mean over the household
                                            (1: g_i ← mean over the household)
        every neighbourhood_period steps:   x_i ← mean over the neighbourhood
        every world_period steps:           x_i ← (1/w) Σ_j x_j
        with a codec, at each of them:      x_i ← x₀ + mean over the group of (x_j − x₀)

    Where periods coincide the widest average alone takes place: it includes the others. Neighbours
    in rank live together. A group of one worker averages nothing. One household with
    household_period=1 and no codec equals SyncSGD; households of one worker equal LocalSGD, to the
    bit, with a codec or without.

    A codec carries what parameters have changed by since the replicas of that group were last equal
    (x₀): after the last average over it, or over a wider group. Each level has its own x₀ and its
    own memory of what was not sent. Statistics of batch normalisation travel as they are, and so do
    gradients inside a household: its links are the fast ones, and a gradient is no change since an
    exchange.

    Bytes: each level's all-reduce of parameters and buffers, inside each group, whenever it is due,
    or the codec's and one of the buffers; with momentum="average" also one of the optimizer's
    state; with household_period=1 one of the gradients inside each household per step; one of all
    at the end.

    Use: where some workers are near each other (one host, one rack) and others far.

    Fields:
        count: households, dividing the number of workers.
        world_period: optimizer steps between averages over all.
        household_period: between averages inside a household; 1 averages gradients.
        neighbourhoods: into how many neighbourhoods the households are divided; None: no such
            level.
        neighbourhood_period: between averages inside a neighbourhood. Periods must not shrink
            outwards.
        momentum: what happens to the optimizer's state at an average of parameters, at any level:
            "keep" the worker's own, "reset" it as if the optimizer were new, or "average" it over
            the same group.
        codec: how changes of parameters are written on the wire; None: parameters as they are.

    Paper: Håland and Birkeland, "Exploring data assignment schemes when training deep neural
    networks using data parallelism", 2020.

    Example:
        fs.run("digits-mlp", fs.Households(count=2, world_period=8), workers=4)
    """

    name: ClassVar[str] = "households"
    codec_revision: ClassVar[int] = 1
    count: int
    world_period: int
    household_period: int = 1
    neighbourhoods: int | None = None
    neighbourhood_period: int | None = None
    momentum: str = "keep"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_integer("count", self.count, 1)
        require_integer("household_period", self.household_period, 1)
        together = (self.neighbourhoods is None) == (self.neighbourhood_period is None)
        require(
            together,
            "neighbourhood_period",
            "be given if and only if 'neighbourhoods' is",
            self.neighbourhood_period,
        )
        inner, name = self.household_period, "household_period"
        if self.neighbourhoods is not None and self.neighbourhood_period is not None:
            require_integer("neighbourhoods", self.neighbourhoods, 1)
            divides = self.count % self.neighbourhoods == 0
            require(
                divides,
                "neighbourhoods",
                f"divide the number of households, {self.count}",
                self.neighbourhoods,
            )
            require_integer("neighbourhood_period", self.neighbourhood_period, 1)
            grows = self.neighbourhood_period >= inner
            require(
                grows,
                "neighbourhood_period",
                f"be at least {name}, {inner}",
                self.neighbourhood_period,
            )
            inner, name = self.neighbourhood_period, "neighbourhood_period"
        require_integer("world_period", self.world_period, 1)
        require(
            self.world_period >= inner,
            "world_period",
            f"be at least {name}, {inner}",
            self.world_period,
        )
        require_choice("momentum", self.momentum, ("keep", "reset", "average"))
        require_codec(self.codec)

    def next_synchronisation(self, steps: int, total_steps: int | None) -> int | None:
        return -(-steps // self.world_period) * self.world_period

    def init(self, worker: Worker) -> HouseholdsState:
        comm = worker.comm
        require(
            comm.size % self.count == 0,
            "count",
            f"divide the number of workers, {comm.size}",
            self.count,
        )
        household = comm.split(comm.rank * self.count // comm.size)
        groups = [(self.world_period, comm)]
        if self.neighbourhoods is not None and self.neighbourhood_period is not None:
            neighbourhood = comm.split(comm.rank * self.neighbourhoods // comm.size)
            groups.append((self.neighbourhood_period, neighbourhood))
        if self.household_period > 1:
            groups.append((self.household_period, household))
        levels = tuple(
            self._level(worker, stream, period, group)
            for stream, (period, group) in enumerate(groups)
            if group.size > 1
        )
        return HouseholdsState(levels, household=household)

    def _level(self, worker: Worker, stream: int, period: int, group: Comm) -> Level:
        own = worker.flat.state
        averager = Averager.among(group, stream, worker, self.codec, own)
        start = None if self.codec is None else own.clone()
        return Level(period, averager, start, group=group)

    def on_gradients(self, worker: Worker, state: HouseholdsState) -> None:
        if self.household_period == 1:
            state.household.all_reduce(worker.flat.gradients, op="mean")

    def after_step(self, worker: Worker, state: HouseholdsState) -> None:
        for place, level in enumerate(state.levels):
            if worker.steps % level.period == 0:
                self._average(worker, state, place)
                if self.momentum == "reset":
                    reset_state(worker.optimizer)
                elif self.momentum == "average":
                    average_state(worker.optimizer, level.group)
                return  # it includes those inside

    def finish(self, worker: Worker, state: HouseholdsState) -> None:
        if state.averaged_at != worker.steps:
            self._average(worker, state, 0)

    def _average(self, worker: Worker, state: HouseholdsState, place: int) -> None:
        own, level = worker.flat.state, state.levels[place]
        if level.start is None:
            level.averager.average(own)
        else:
            level.averager.average(own.sub_(level.start))  # the change since they were last equal
            own.copy_(level.start.add_(own))
            for inner in state.levels[place + 1 :]:
                inner.start = own.clone()
        if place == 0:
            state.averaged_at = worker.steps


def effective_batch(local_batch: float, workers: int, households: int, world_period: int) -> float:
    """How many samples one worker's view of a step rests on: B_e = B_l·M·(H + L_W − 1) /
    (H·L_W).
    """
    return local_batch * workers * (households + world_period - 1) / (households * world_period)


@overload
def local_batch(
    effective: float, workers: int, households: int, world_period: int, rounding: None = None
) -> float: ...


@overload
def local_batch(
    effective: float, workers: int, households: int, world_period: int, rounding: str
) -> int: ...


def local_batch(
    effective: float,
    workers: int,
    households: int,
    world_period: int,
    rounding: str | None = None,
) -> float:
    """The inverse: B_l = B_e·L_W·H / (M·(H + L_W − 1)).

    `rounding` makes it a batch size, of at least 1: "nearest" (a half goes up) or "up". None: the
    exact number. The thesis does not say which; its one example, 60.68 → 61, fits both.
    """
    require_choice("rounding", rounding, (None, "nearest", "up"))
    exact = Fraction(effective) * world_period * households
    exact /= workers * (households + world_period - 1)
    if rounding is None:
        return float(exact)
    return max(1, math.ceil(exact) if rounding == "up" else math.floor(exact + Fraction(1, 2)))
