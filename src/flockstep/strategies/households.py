"""Averaging often with those nearby, and rarely with all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, overload

from flockstep.comm import Comm, handle
from flockstep.fields import require, require_choice, require_integer
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class HouseholdsState:
    averaged_at: int = 0  # the step after which all replicas were last equal

    household: Comm = handle()
    neighbourhood: Comm | None = handle()


@dataclass(frozen=True)
class Households(Strategy[HouseholdsState]):
    """Workers in equal groups of groups; each level averages with its own period.

        every household_period steps:       x_i ← mean over the household
                                            (1: g_i ← mean over the household)
        every neighbourhood_period steps:   x_i ← mean over the neighbourhood
        every world_period steps:           x_i ← (1/w) Σ_j x_j

    Where periods coincide the widest average alone takes place: it includes the others. Neighbours
    in rank live together. One household with household_period=1 equals SyncSGD; households of one
    worker equal LocalSGD.

    Bytes: each level's all-reduce of parameters and buffers, inside each group, whenever it is due;
    with household_period=1 one of the gradients inside each household per step; one of all at the
    end.

    Use: where some workers are near each other (one host, one rack) and others far.

    Fields:
        count: households, dividing the number of workers.
        world_period: optimizer steps between averages over all.
        household_period: between averages inside a household; 1 averages gradients.
        neighbourhoods: into how many neighbourhoods the households are divided; None: no such
            level.
        neighbourhood_period: between averages inside a neighbourhood. Periods must not shrink
            outwards.

    Paper: Håland and Birkeland, "Exploring data assignment schemes when training deep neural
    networks using data parallelism", 2020.

    Example:
        fs.run("digits-mlp", fs.Households(count=2, world_period=8), workers=4)
    """

    name: ClassVar[str] = "households"
    count: int
    world_period: int
    household_period: int = 1
    neighbourhoods: int | None = None
    neighbourhood_period: int | None = None

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

    def init(self, worker: Worker) -> HouseholdsState:
        comm = worker.comm
        require(
            comm.size % self.count == 0,
            "count",
            f"divide the number of workers, {comm.size}",
            self.count,
        )
        household = comm.split(comm.rank * self.count // comm.size)
        neighbourhood = None
        if self.neighbourhoods is not None:
            neighbourhood = comm.split(comm.rank * self.neighbourhoods // comm.size)
        return HouseholdsState(household=household, neighbourhood=neighbourhood)

    def on_gradients(self, worker: Worker, state: HouseholdsState) -> None:
        if self.household_period == 1:
            state.household.all_reduce(worker.flat.gradients, op="mean")

    def after_step(self, worker: Worker, state: HouseholdsState) -> None:
        steps, own = worker.steps, worker.flat.state
        if steps % self.world_period == 0:
            self._average(worker, state)
        elif (
            state.neighbourhood is not None
            and self.neighbourhood_period
            and steps % self.neighbourhood_period == 0
        ):
            state.neighbourhood.all_reduce(own, op="mean")
        elif self.household_period > 1 and steps % self.household_period == 0:
            state.household.all_reduce(own, op="mean")

    def finish(self, worker: Worker, state: HouseholdsState) -> None:
        if state.averaged_at != worker.steps:
            self._average(worker, state)

    def _average(self, worker: Worker, state: HouseholdsState) -> None:
        worker.comm.all_reduce(worker.flat.state, op="mean")
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
