"""One line for each strategy, and variants of some: what every row must satisfy stands in
test_table.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flockstep as fs


@dataclass(frozen=True)
class Size:
    """What formulas of bytes are made of: workers, steps, bytes of parameters and of buffers."""

    w: int
    t: int
    p: int
    b: int

    @property
    def s(self) -> int:
        return self.p + self.b

    def ring(self, nbytes: int, workers: int | None = None) -> int:
        """An all-reduce, over all workers of it."""
        return 2 * ((workers or self.w) - 1) * nbytes

    def scores(self) -> int:
        """One number of each worker to all."""
        return self.w * (self.w - 1) * 8

    def spread(self, nbytes: int) -> int:
        """A broadcast."""
        return (self.w - 1) * nbytes

    def times(self, period: int) -> int:
        return self.t // period

    def times_and_end(self, period: int) -> int:
        """Every `period` steps, and at the end unless just then."""
        return -(-self.t // period)


Bytes = Callable[[Size], int]
ALWAYS, RACES = "", "its outcome depends on who comes first"
OWN, SHARED = "", "on local processes its parameters are the shared ones"
WHOLE, CHANGES = "", "only what others have changed is read"
GOES_ON, STOPS = "", "its messages go a fixed way, through every worker"


@dataclass(frozen=True)
class Row:
    strategy: fs.Strategy[Any]
    bytes: Bytes | None  # over all workers; None: drawn at random, with a test of its own
    repeats: str = ALWAYS  # why it need not be the same on real processes as in the simulator
    reads: str = WHOLE  # why there may be fewer bytes
    loses: str = GOES_ON  # why it cannot go on without a lost worker
    shares: str = OWN  # why what a worker does to its model is done to all
    workers: int = 4

    def __str__(self) -> str:
        return repr(self.strategy)


def _wire(codec_bytes: Callable[[Size], int]) -> Bytes:
    """Gradients through a codec whose messages all workers give to all."""
    return lambda z: z.t * z.w * (z.w - 1) * codec_bytes(z) + z.ring(z.b)


INT8, TOP = fs.Int8(), fs.TopK(0.1)


def _int8(nbytes: int) -> int:
    """A message of Int8 for so many bytes in double precision."""
    return INT8.nbytes(nbytes // 8)


def _top(nbytes: int) -> int:
    """One of TopK."""
    return TOP.nbytes(nbytes // 8, 8)


TABLE = [
    Row(fs.SyncSGD(), lambda z: z.t * z.ring(z.p) + z.ring(z.b)),
    Row(fs.SyncSGD("ring"), lambda z: z.t * z.ring(z.p) + z.ring(z.b), loses=STOPS),
    Row(fs.SyncSGD("tree"), lambda z: z.t * z.ring(z.p) + z.ring(z.b), loses=STOPS),
    Row(fs.SyncSGD("torus"), lambda z: z.t * z.ring(z.p) + z.ring(z.b), loses=STOPS),
    # 4 workers in pairs: 3(w−k) + 2(k−1) = 8 times all, and the smaller half of it in each of the
    # two pairs.
    Row(
        fs.SyncSGD("hierarchical"),
        lambda z: z.t * (8 * z.p + 2 * (z.p // 8 // 2 * 8)) + z.ring(z.b),
        loses=STOPS,
    ),
    # All here is small: as hierarchical.
    Row(
        fs.SyncSGD("hybrid"),
        lambda z: z.t * (8 * z.p + 2 * (z.p // 8 // 2 * 8)) + z.ring(z.b),
        loses=STOPS,
    ),
    Row(fs.SyncSGD(codec=fs.Float16()), lambda z: z.t * z.ring(z.p // 4) + z.ring(z.b)),
    Row(fs.SyncSGD(codec=fs.OneBit()), _wire(lambda z: fs.OneBit().nbytes(z.p // 8))),
    Row(fs.SyncSGD(codec=fs.TopK(0.1)), _wire(lambda z: fs.TopK(0.1).nbytes(z.p // 8, 8))),
    Row(fs.Independent(), lambda z: z.scores() + z.spread(z.s)),
    Row(fs.BestOnly(3), lambda z: z.times_and_end(3) * (z.scores() + z.spread(z.s))),
    Row(
        fs.BestOnly(3, codec=INT8),
        lambda z: z.times_and_end(3) * (z.scores() + z.spread(8 + _int8(z.p) + z.b)),
    ),
    Row(fs.LocalSGD(3), lambda z: z.times_and_end(3) * z.ring(z.s)),
    Row(
        fs.LocalSGD(3, codec=fs.Int8()),
        lambda z: z.times_and_end(3) * (z.w * (z.w - 1) * _int8(z.p) + z.ring(z.b)),
    ),
    Row(fs.PostLocalSGD(7, 3), lambda z: 7 * z.ring(z.p) + -(-(z.t - 7) // 3) * z.ring(z.s)),
    Row(
        fs.PostLocalSGD(7, 3, INT8),
        lambda z: (
            z.w * (z.w - 1) * (7 + -(-(z.t - 7) // 3)) * _int8(z.p)
            + -(-(z.t - 7) // 3) * z.ring(z.b)
        ),
    ),
    Row(fs.AdaComm(3, 1e9), lambda z: z.times_and_end(3) * z.ring(z.s) + z.times(3) * z.ring(16)),
    Row(fs.Households(2, 3), lambda z: 2 * z.t * z.ring(z.p, 2) + z.times_and_end(3) * z.ring(z.s)),
    Row(
        fs.Households(4, 8, 2, neighbourhoods=2, neighbourhood_period=4),
        lambda z: (z.times(4) - z.times(8)) * 2 * z.ring(z.s, 2) + z.times_and_end(8) * z.ring(z.s),
    ),
    # Messages of two workers to each other, in two households, and of all four to all.
    Row(
        fs.Households(2, 4, 2, codec=fs.Int8()),
        lambda z: (
            (z.times(2) - z.times(4)) * 2 * (2 * _int8(z.p) + z.ring(z.b, 2))
            + z.times_and_end(4) * (z.w * (z.w - 1) * _int8(z.p) + z.ring(z.b))
        ),
    ),
    Row(fs.DiLoCo(3), lambda z: z.times_and_end(3) * z.ring(z.s)),
    Row(fs.DiLoCo(3, codec=fs.Float16()), lambda z: z.times_and_end(3) * z.ring(z.p // 4 + z.b)),
    Row(fs.SlowMo(3), lambda z: z.times_and_end(3) * z.ring(z.s)),
    Row(fs.NoSync(0.3), lambda z: (z.t + 1) * z.ring(z.s)),
    Row(fs.NoSync(0.3, period=2, staleness=1), lambda z: (z.times(2) + 1) * z.ring(z.s)),
    Row(
        fs.NoSync(0.3, best=2),
        lambda z: z.t * (z.scores() + (1 + z.w - 1) * (z.s + 8)) + z.ring(z.s),
    ),
    Row(
        fs.NoSync(0.3, groups=2),
        lambda z: z.t * (2 * z.ring(z.p, 2) + z.scores() + (1 + z.w - 1) * (z.s + 8)) + z.ring(z.s),
    ),
    Row(
        fs.NoSync(0.3, best=2, codec=INT8),
        lambda z: z.t * (z.scores() + 2 * z.spread(_int8(z.s))) + z.ring(z.s),
    ),
    Row(
        fs.NoSync(0.3, all_reduce="tree"),
        lambda z: z.t * z.ring(z.s) + z.ring(z.s),
        loses=STOPS,
    ),
    Row(
        fs.PSOPS(3),
        lambda z: z.times(3) * (z.scores() + z.spread(z.p)) + z.scores() + z.spread(z.s),
    ),
    Row(
        fs.PSOPS(3, codec=TOP),
        lambda z: z.times(3) * (z.scores() + z.spread(8 + _top(z.p))) + z.scores() + z.spread(z.s),
    ),
    Row(fs.EASGD(2), lambda z: z.w * (2 * z.times_and_end(2) + 1) * z.s),
    Row(
        # Number by number: of other codecs each shard of a tensor would have another message.
        fs.EASGD(2, codec=fs.Float16()),
        lambda z: z.w * (z.times_and_end(2) * (z.s + z.s // 4) + z.s),
        reads=CHANGES,
    ),
    Row(
        fs.EASGD(2, mode="sync", codec=INT8),
        lambda z: z.times_and_end(2) * z.w * (z.w - 1) * _int8(z.s),
    ),
    Row(
        fs.EASGD(2, mode="first_come"),
        lambda z: z.w * (2 * z.times_and_end(2) + 1) * z.s,
        repeats=RACES,
    ),
    Row(fs.EASGD(2, mode="sync"), lambda z: z.times_and_end(2) * z.ring(z.s)),
    Row(fs.EAMSGD(2), lambda z: z.w * (2 * z.times_and_end(2) + 1) * z.s, repeats=RACES),
    Row(fs.EAMSGD(2, mode="round_robin"), lambda z: z.w * (2 * z.times_and_end(2) + 1) * z.s),
    Row(fs.EAWild(2), lambda z: z.w * (2 * z.times_and_end(2) + 1) * z.s, repeats=RACES),
    Row(
        fs.EAWild(2, codec=INT8),
        lambda z: z.w * (z.times_and_end(2) * (z.s + _int8(z.s)) + z.s),
        reads=CHANGES,
        repeats=RACES,
    ),
    Row(
        fs.EAWild(2, groups=2),
        lambda z: 2 * z.t * z.ring(z.p, 2) + z.times_and_end(2) * 2 * (2 * z.s + z.s) + z.w * z.s,
        repeats=RACES,
    ),
    Row(
        fs.EAWild(2, groups=2, grouping="random"),
        lambda z: 2 * z.t * z.ring(z.p, 2) + z.times_and_end(2) * 2 * (2 * z.s + z.s) + z.w * z.s,
        repeats=RACES,
        loses=STOPS,
    ),
    Row(
        fs.Hogwild(),
        lambda z: z.w * (2 * z.t + 2) * z.p + z.ring(z.b),
        repeats=RACES,
        shares=SHARED,
    ),
    Row(fs.AsyncSGD(), lambda z: z.w * (2 * z.t + 1) * z.p + z.ring(z.b), repeats=RACES),
    Row(
        fs.AsyncSGD(codec=TOP),
        lambda z: z.w * (z.t * (z.p + _top(z.p)) + z.p) + z.ring(z.b),
        reads=CHANGES,
        repeats=RACES,
    ),
    Row(
        fs.AsyncSGD(momentum=0.5, staleness_aware=True),
        lambda z: z.w * ((4 * z.t + 1) * z.p + z.t * 16) + z.ring(z.b),
        repeats=RACES,
    ),
    Row(
        fs.Downpour(3, 2),
        lambda z: z.w * (z.times_and_end(3) + z.times(2) + 1) * z.p + z.ring(z.b),
        repeats=RACES,
    ),
    Row(
        fs.Downpour(3, 2, TOP),
        lambda z: z.w * (z.times_and_end(3) * _top(z.p) + (z.times(2) + 1) * z.p) + z.ring(z.b),
        reads=CHANGES,
        repeats=RACES,
    ),
    Row(
        fs.StaleSync(2),
        lambda z: z.w * ((2 * z.t + 2) * z.p + (2 * z.t + 2) * 8 * z.w) + z.ring(z.b),
        repeats=RACES,
    ),
    Row(
        fs.StaleSync(0),
        lambda z: z.w * ((2 * z.t + 2) * z.p + (2 * z.t + 2) * 8 * z.w) + z.ring(z.b),
    ),
    Row(
        fs.AllToAllSGD(),
        lambda z: z.t * z.w * (z.w - 1) * z.p + z.ring(z.s),
        repeats=RACES,
    ),
    Row(
        fs.AllToAllSGD(0),
        lambda z: z.t * z.w * (z.w - 1) * z.p + z.ring(z.s) + z.w * (2 * z.t + 1) * 8 * z.w,
    ),
    Row(fs.GoSGD(0.5), None, repeats=RACES),
    Row(fs.ADPSGD(), lambda z: -(-z.w // 2) * z.t * 2 * z.s + z.ring(z.s), repeats=RACES),
    Row(
        fs.ADPSGD(order="printed", representative="best"),
        lambda z: -(-z.w // 2) * z.t * 2 * z.s + z.scores() + z.spread(z.s),
        repeats=RACES,
    ),
    Row(
        fs.ADPSGD(codec=INT8),
        lambda z: -(-z.w // 2) * z.t * (z.s + _int8(z.s)) + z.ring(z.s),
        repeats=RACES,
    ),
    Row(fs.DPSGD(codec=INT8), lambda z: z.w * 2 * z.t * _int8(z.s) + z.ring(z.s)),
    Row(fs.DPSGD(), lambda z: z.w * 2 * z.t * z.s + z.ring(z.s)),
    Row(
        fs.DPSGD(order="after_step", representative="any"),
        lambda z: z.w * 2 * z.t * z.s + z.spread(z.s),
    ),
    Row(fs.DPSGD("exponential"), lambda z: z.w * 3 * z.t * z.s + z.ring(z.s)),
    Row(fs.DPSGD("one_peer_exponential"), lambda z: z.w * z.t * z.s + z.ring(z.s)),
    Row(fs.SGP(), lambda z: z.w * z.t * (z.s + 16) + z.ring(z.s + 8) + z.ring(8)),
    Row(
        fs.SGP(codec=fs.Int8()),
        lambda z: z.w * z.t * fs.Int8().nbytes(z.s // 8) + z.ring(z.s + 8) + z.ring(8),
    ),
    Row(
        fs.Codistillation(2, 4, 5, codec=INT8),
        lambda z: (
            2 * z.t * z.ring(z.p, 2)
            + (1 + (z.t - 5) // 4) * z.w * _int8(z.s)
            + 2 * z.ring(z.b + 8, 2)
            + z.scores()
            + z.spread(z.s)
        ),
    ),
    Row(
        fs.Codistillation(2, 4, 5),
        lambda z: (
            2 * z.t * z.ring(z.p, 2)
            + (1 + (z.t - 5) // 4) * z.w * z.s
            + 2 * z.ring(z.b + 8, 2)
            + z.scores()
            + z.spread(z.s)
        ),
    ),
]

# More of them, where a strategy's fields change what it keeps in its state, or how it ends.
# One codec of each kind of memory: an error, numbers drawn, a count of messages, bases.
REMEMBERING = [fs.OneBit(), fs.QSGD(4), fs.RandomK(0.2), fs.PowerSGD(1)]

VARIANTS: list[fs.Strategy[Any]] = [
    *(fs.LocalSGD(3, codec=codec) for codec in REMEMBERING),
    *(make(codec) for codec in (fs.OneBit(), fs.PowerSGD(1)) for make in (
        lambda codec: fs.SyncSGD(codec=codec),
        lambda codec: fs.DiLoCo(3, codec=codec),
    )),
    fs.Households(4, 8, 2, neighbourhoods=2, neighbourhood_period=4, codec=fs.QSGD(4)),
    fs.SyncSGD(codec=fs.TopK(0.1, warmup=6)),
    fs.Households(2, 4, codec=fs.OneBit()),
    fs.Households(2, 6, 3, codec=fs.RandomK(0.2)),
    fs.Households(2, 6, 3, codec=fs.PowerSGD(1)),
    fs.Households(2, 4, momentum="reset"),
    fs.Households(2, 6, 3, momentum="average"),
    fs.LocalSGD(None),
    fs.LocalSGD(3, momentum="reset"),
    fs.LocalSGD(3, momentum="average"),
    fs.PostLocalSGD(0.5, 2),
    fs.AdaComm(4, 0.03),
    fs.Households(2, 6, 3),
    fs.DiLoCo(4, outer_momentum=0.0),
    fs.DiLoCo(2, nesterov=False),
    fs.SlowMo(4, 0.7, 0.8),
    fs.NoSync(0.0),
    fs.NoSync(0.3, staleness=2),
    fs.NoSync(0.3, best=2, period=3, staleness=2, score="accuracy"),
    fs.PSOPS(2, random="vector", decay="all"),
    fs.EASGD(3, rho=0.5, order="after_step"),
    fs.EASGD(2, representative="mean"),
    fs.EASGD(2, mode="sync", representative="best"),
    fs.EAMSGD(3, momentum=0.5),
    fs.EAMSGD(2, mode="sync", rho=0.7, representative="any"),
    fs.EAWild(1),
    fs.EAWild(2, representative="best", order="after_step"),
    fs.EAWild(2, groups=2, delegate="random"),
    fs.EAWild(2, groups=2, grouping="random", delegate="random"),
    fs.Independent(representative="mean"),
    fs.Independent(representative="any"),
    fs.NoSync(0.3, best=1, groups=2, representative="best"),
    fs.PSOPS(3, decay="position", personal_best="swarm_steps"),
    fs.AsyncSGD(momentum=0.5),
    fs.AsyncSGD(staleness_aware=True),
    fs.AsyncSGD(delay_compensation=0.1),
    fs.AsyncSGD(momentum=0.5, staleness_aware=True, delay_compensation=0.1),
    fs.Downpour(2, 3),
    fs.Downpour(4, 1),
    fs.Downpour(1, 4),
    fs.GoSGD(1.0),
    fs.GoSGD(0.5, representative="best"),
    fs.GoSGD(0.5, representative="any"),
    fs.GoSGD(0.5, peers="exponential"),
    fs.ADPSGD("complete"),
    fs.ADPSGD("one_peer_exponential", "printed", pull=0.3),
    fs.ADPSGD("exponential", representative="any"),
    fs.DPSGD(representative="best"),
    fs.DPSGD("one_peer_exponential", "after_step"),
    fs.AllToAllSGD(2, fs.TopK(0.1)),
    fs.AllToAllSGD(codec=fs.QSGD(4)),
    fs.SGP("ring", representative="any"),
    fs.SGP("complete", 3, "best"),
    fs.SGP(peers=2, codec=fs.TopK(0.3)),
    fs.Codistillation(2, 2, 0, topology="complete"),
    fs.Codistillation(4, 3, 2, temperature=2.0, topology="complete"),
    fs.BestOnly(2, codec=fs.OneBit()),
    fs.PostLocalSGD(4, 3, fs.OneBit()),
    fs.AdaComm(4, 0.03, fs.TopK(0.1)),
    fs.SlowMo(3, codec=fs.PowerSGD(1)),
    fs.NoSync(0.3, staleness=1, codec=fs.RandomK(0.5)),
    fs.NoSync(0.3, best=1, groups=2, codec=fs.Float16()),
    fs.EASGD(2, mode="first_come", order="after_step", codec=fs.PowerSGD(1)),
    fs.EAMSGD(2, codec=fs.Float16()),
    fs.EAWild(2, groups=2, delegate="random", codec=fs.TopK(0.1)),
    fs.Hogwild(fs.Threshold(0.01)),
    fs.AsyncSGD(0.5, True, codec=fs.OneBit()),
    fs.Downpour(2, 3, fs.QSGD(4)),
    fs.StaleSync(1, fs.RandomK(0.2)),
    fs.GoSGD(0.5, codec=fs.TopK(0.1)),
    fs.GoSGD(1.0, "best", fs.Float16()),
    fs.ADPSGD(order="printed", codec=fs.PowerSGD(1)),
    fs.DPSGD("complete", "after_step", codec=fs.Threshold(0.01), gossip_rate=0.1),
    fs.Codistillation(2, 2, 0, topology="complete", codec=fs.Float16()),
]  # fmt: skip
