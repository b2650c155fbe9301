"""The studies of experiments E, in full: the 305 cells of Håland and Birkeland (2020), no others.

What the studies declare is laid beside tables that were worked out from the thesis by hand. Steps,
marks and synchronisations are planned by the library from 45,000 numbers; nothing is trained.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import flockstep as fs
from flockstep.data import plan_batches
from flockstep.intervals import Interval
from flockstep.schedules import Progress

STUDIES = sorted((Path(__file__).parents[2] / "studies").glob("e[1-3]_*.toml"))
SAMPLES, EPOCHS, RATE, SEEDS = 45_000, 182, 0.1, 5

# How many cells each study has that none before it has.
CELLS_OF_ITS_OWN = {
    "e1_workers": 5,
    "e2_1_full_overlap": 4,
    "e2_2_degrees": 13,
    "e2_3_batch": 15,
    "e3_1_local_sgd": 56,
    "e3_2_1_constant_local_batch": 56,
    "e3_2_2_constant_effective_batch": 56,
    "e3_2_3_scaled_rate": 56,
    "e3_3_neighbourhoods": 44,
}

# ---- The tables

STEPS, STATED = 64_064, (32_000, 48_000)  # experiment 1 says 32k and 48k
BY_FRACTIONS = (32_032, 48_048)

# Workers, local batch.
E1 = [(1, 128), (2, 64), (4, 32), (8, 16), (16, 8)]

# Workers (and copies), local batch, overlap epochs, effective epochs, steps.
E2_1 = [(2, 64, 91, 182, 64_064), (4, 32, 46, 184, 64_722), (8, 16, 23, 184, 64_699)]
E2_1 += [(16, 8, 12, 192, 67_500)]

# Copies, overlap epochs, effective epochs, steps, schemes.
E2_2 = [
    (2, 91, 182, 64_064, (fs.Coarse(8), fs.MediumCoarse(2), fs.FineGrained(2))),
    (4, 46, 184, 64_722, (fs.Coarse(4), fs.MediumCoarse(4), fs.FineGrained(4))),
    (6, 31, 186, 65_410, (fs.FineGrained(6),)),
    (8, 23, 184, 64_699, (fs.Coarse(2), fs.MediumCoarse(8), fs.FineGrained(8))),
    (10, 19, 190, 66_804, (fs.FineGrained(10),)),
    (12, 16, 192, 67_504, (fs.FineGrained(12),)),
    (14, 13, 182, 63_986, (fs.FineGrained(14),)),
]

# Local batch, steps of disjoint, half and full, marks of disjoint. The row of 128 is above.
E2_3 = [
    (16, 32_032, 32_361, 33_756, (16_016, 24_024)),
    (32, 16_016, 16_192, 16_884, (8_008, 12_012)),
    (64, 8_008, 8_096, 8_448, (4_004, 6_006)),
    (128, 4_004, 4_048, 4_224, (2_002, 3_003)),
    (256, 2_002, 2_024, 2_112, (1_001, 1_502)),
]

PERIODS = (2, 4, 8, 16, 32, 64, 128)
AVERAGES = (32_032, 16_016, 8_008, 4_004, 2_002, 1_001, 501)  # of disjoint samples

# Setting 1 of E3.2, B_l = 8: copies, overlap epochs, steps.
SETTING_1 = {1: (182, 64_064), 2: (91, 64_064), 4: (46, 64_722), 8: (23, 64_699)}

# Settings 2 and 3: H, L_W, B_l (to the nearest number), iterations of an epoch; steps of S_H = H, 2
# and 1; and of S_H = H world synchronisations, both marks, scale of the rate, the rate, steps of
# warm-up, and the last batch of an epoch.
E3_2 = """
2   2 11 256 46592     - 46592 23296 23296 34944 1.3333 0.1333 1280  8
2   4 13 217 39494     - 39403  9874 19747 29621 1.6000 0.1600 1085  5
2   8 14 201 36582     - 36582  4573 18291 27437 1.7778 0.1778 1005 13
2  16 15 188 34216     - 34125  2139 17108 25662 1.8824 0.1882  940  8
2  32 16 176 32032     - 32032  1001 16016 24024 1.9394 0.1939  880 13
2  64 16 176 32032     - 32032   501 16016 24024 1.9692 0.1969  880 13
2 128 16 176 32032     - 32032   251 16016 24024 1.9845 0.1984  880 13
4   2 13 217 39494 39403 39836 19747 19747 29621 1.6000 0.1600 1085  5
4   4 18 157 28574 28483 28750  7144 14287 21431 2.2857 0.2286  785  5
4   8 23 123 22386 22295 22540  2799 11193 16790 2.9091 0.2909  615  7
4  16 27 105 19110 19019 19182  1195  9555 14333 3.3684 0.3368  525  5
4  32 29  97 17654 17654 17848   552  8827 13241 3.6571 0.3657  485 29
4  64 31  91 16562 16562 16698   259  8281 12422 3.8209 0.3821  455 23
4 128 31  91 16562 16562 16698   130  8281 12422 3.9084 0.3908  455 23
8   2 14 201 36582 36984 36984 18291 18291 27437 1.7778 0.1778 1005 13
8   4 23 123 22386 22540 22517  5597 11193 16790 2.9091 0.2909  615  7
8   8 34  83 15106 15226 15226  1889  7553 11330 4.2667 0.4267  415 25
8  16 45  63 11466 11500 11500   717  5733  8600 5.5652 0.5565  315 23
8  32 53  54  9828  9798  9775   308  4914  7371 6.5641 0.6564  270  4
8  64 58  49  8918  8924  8924   140  4459  6689 7.2113 0.7211  245 29
8 128 61  47  8554  8510  8487    67  4277  6416 7.5852 0.7585  235  7
"""

# L_N and its L_W; each with H = 4 and 8.
E3_3 = {2: (4, 8, 16, 32, 64, 128), 4: (8, 16, 32, 64, 128)}

PRINTED = """
[e1]
1 = [91.16, 0.27]
2 = [91.31, 0.22]
4 = [91.36, 0.23]
8 = [91.43, 0.28]
16 = [91.52, 0.11]
[e2_1]
16 = [91.44, 0.20]
[e2_2.coarse]
2 = [91.42, 0.24]
4 = [91.70, 0.12]
8 = [91.36, 0.32]
[e2_2.medium]
2 = [91.76, 0.23]
4 = [91.45, 0.46]
8 = [91.41, 0.34]
[e2_2.fine]
2 = [91.40, 0.21]
4 = [91.77, 0.31]
6 = [91.26, 0.20]
8 = [91.34, 0.15]
10 = [91.52, 0.23]
12 = [91.42, 0.23]
14 = [91.40, 0.33]
[e2_3.disjoint]
128 = [91.52, 0.11]
256 = [91.16, 0.37]
512 = [90.01, 0.44]
1024 = [88.76, 0.40]
2048 = [86.79, 0.57]
4096 = [83.60, 0.63]
[e2_3.half]
128 = [91.36, 0.32]
256 = [91.09, 0.55]
512 = [90.05, 0.24]
1024 = [88.84, 0.45]
2048 = [86.68, 0.77]
4096 = [84.03, 0.64]
[e2_3.full]
128 = [91.44, 0.20]
256 = [91.03, 0.41]
512 = [89.97, 0.43]
1024 = [88.64, 0.16]
2048 = [86.62, 0.56]
4096 = [84.44, 0.71]
[e3_2_2.own]        # H = 8; period = [mean, deviation, p against own shards]
32 = [88.29, 0.51]
64 = [87.77, 0.72]
128 = [87.26, 0.31]
[e3_2_2.two]
32 = [89.26, 0.42, 0.014]
64 = [88.95, 0.21, 0.0113]
128 = [88.29, 0.13, 0.001]
[e3_2_2.one]
32 = [89.27, 0.15, 0.007]
64 = [88.64, 0.38, 0.0375]
128 = [88.08, 0.30, 0.0065]
"""


# ---- What the tables come to


@dataclass(frozen=True)
class Key:
    """What tells a cell from all others."""

    strategy: fs.Strategy
    assignment: fs.Assignment
    workers: int
    batch: int
    scale: float = 1.0


@dataclass(frozen=True)
class Row:
    """What the thesis, or arithmetic, says of a cell; None where a table leaves it out."""

    steps: int
    iterations: int  # of an epoch
    passes: int
    marks: tuple[int, int] | None = None  # after how many steps the rate falls
    warmup: int = 0
    rate: float = RATE  # after the warm-up
    last_batch: int | None = None  # of an epoch
    averages: int | None = None  # of all workers

    @property
    def falls_after(self) -> tuple[int, int]:
        """As stated, or half and three quarters of all steps."""
        return self.marks or (-(-self.steps // 2), -(-3 * self.steps // 4))


def households(count, period, shards, batch, scale=1.0):
    strategy = fs.Households(count=count, world_period=period)
    return Key(strategy, fs.HouseholdShards(count, shards=shards), 16, batch, scale)


def tabulated():
    """Pairs of a cell and its row, experiment by experiment."""
    sync, disjoint, full = fs.SyncSGD(), fs.Disjoint(), fs.FullOverlap()
    for workers, batch in E1:
        yield Key(sync, disjoint, workers, batch), Row(STEPS, 352, EPOCHS, STATED)
    for workers, batch, passes, _, steps in E2_1:
        yield Key(sync, full, workers, batch), Row(steps, 352, passes)
    for _, passes, _, steps, schemes in E2_2:
        for scheme in schemes:
            yield Key(sync, scheme, 16, 8), Row(steps, 352, passes)
    for batch, *steps, marks in E2_3:
        iterations = -(-SAMPLES // (16 * batch))
        yield Key(sync, disjoint, 16, batch), Row(steps[0], iterations, EPOCHS, marks)
        yield Key(sync, fs.Coarse(2), 16, batch), Row(steps[1], iterations, 23)
        yield Key(sync, full, 16, batch), Row(steps[2], iterations, 12)

    for workers, batch, passes, _, steps in E2_1:
        for period, averages in zip(PERIODS, AVERAGES, strict=True):
            local = fs.LocalSGD(period)
            row = Row(STEPS, 352, EPOCHS, BY_FRACTIONS, averages=averages)
            yield Key(local, disjoint, workers, batch), row
            yield Key(local, full, workers, batch), Row(steps, 352, passes)

    for line in E3_2.strip().splitlines():
        yield from of_households(*line.split())
    for near, periods in E3_3.items():
        for period in periods:
            for count in (4, 8):
                together = fs.Households(count, period, 1, 2, near)
                for shards, passes in ((count, 182), (count // 2, 91)):
                    key = Key(together, fs.HouseholdShards(count, shards=shards), 16, 8)
                    yield key, Row(STEPS, 352, passes, BY_FRACTIONS)


def of_households(count, period, batch, iterations, own, two, one, *rest):
    """Settings 1, 2 and 3 of one line of the table."""
    count, period, batch, iterations = map(int, (count, period, batch, iterations))
    averages, first, second, scale, rate, warmup, last = map(float, rest)
    for shards, steps in ((count, own), (2, two), (1, one)):
        if steps == "-":  # two shards for two households are their own
            continue
        passes, steps_1 = SETTING_1[count // shards]
        yield households(count, period, shards, 8), Row(steps_1, 352, passes)
        printed = {}
        if shards == count:
            printed = {"marks": (first, second), "last_batch": last, "averages": averages}
        row = functools.partial(Row, int(steps), iterations, passes, **printed)
        yield households(count, period, shards, batch), row()
        scaled = households(count, period, shards, batch, scale)
        yield scaled, row(warmup=int(warmup), rate=rate)


TABLE = dict(tabulated())


# ---- What the studies come to


@functools.cache
def in_full(path):
    return fs.Study.from_toml(path).at_full_scale()


@functools.cache
def specs_of(path):
    """The different cells of a study, as the runs of its first seed."""
    specs = [cell.spec(0) for cell in in_full(path).cells]
    return {spec.id: spec for spec in specs}


@functools.cache
def declared():
    """All cells, by what tells them apart in the tables, with all that were declared so."""
    found = {}
    for path in STUDIES:
        for name, spec in specs_of(path).items():
            found.setdefault(key_of(spec), {})[name] = spec
    return found


def key_of(spec):
    scale = getattr(getattr(spec.resolved().schedule, "left", None), "scale", 1.0)
    return Key(spec.strategy, spec.assignment, spec.workers, spec.batch_size, round(scale, 4))


@functools.cache
def timetable(assignment, workers, batch, epochs):
    passes = assignment.overlap_epochs(epochs, workers)
    return plan_batches(
        torch.arange(SAMPLES),
        batch,
        passes,
        assignment,
        None,
        workers=workers,
        rank=0,
        seed=0,
    ).timetable


def planned(spec):
    return timetable(spec.assignment, spec.workers, spec.batch_size, spec.epochs)


def laid_beside(told, wanted):
    """What the studies say, and the tables, of all cells of which the tables say something."""
    rows = {key: wanted(row) for key, row in TABLE.items() if wanted(row) is not None}
    return {key: told(only_spec(key)) for key in rows}, rows


def only_spec(key):
    (spec,) = declared()[key].values()
    return spec


# ---- The grid


def test_the_tables_have_305_cells():
    assert len(TABLE) == len(list(tabulated())) == 305


def test_the_studies_have_the_cells_of_the_tables_and_no_others():
    assert {path.stem for path in STUDIES} == {*CELLS_OF_ITS_OWN}
    assert declared().keys() - TABLE.keys() == set()
    assert TABLE.keys() - declared().keys() == set()


def test_a_cell_in_two_studies_is_the_same_run():
    known, own = set(), {}
    for path in STUDIES:
        own[path.stem] = len(specs_of(path).keys() - known)
        known |= specs_of(path).keys()
    assert own == CELLS_OF_ITS_OWN
    assert len(known) == 305


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_settings_that_all_cells_have(path):
    study = in_full(path)
    assert (study.seeds, study.metric, study.tune, study.budget) == (SEEDS, "accuracy", None, None)
    for spec in specs_of(path).values():
        assert (spec.task, spec.train_samples, spec.epochs) == ("cifar10-resnet20", SAMPLES, EPOCHS)
        assert spec.resolved().optimizer == fs.OptimizerSpec(
            "sgd", lr=RATE, momentum=0.9, weight_decay=1e-4
        )
        assert (spec.sampling, spec.drop_last) == (fs.Sampling(), False)
        assert (spec.validation, spec.recalibrate) == (None, False)
        assert (spec.batch_norm_group, spec.weight_decay_schedule) == (None, None)
        # Households are looked at when the world has synchronised.
        is_of_households = isinstance(spec.strategy, fs.Households)
        assert spec.look_at == ("synchronisation" if is_of_households else "due")
        assert spec.look_every == Interval(1, "epochs")


def test_steps_are_those_of_the_grid():
    def told(spec):
        table = planned(spec)
        return table.passes, table.steps, table.step_of(1)

    found, wanted = laid_beside(told, lambda row: (row.passes, row.steps, row.iterations))
    assert len(wanted) == 305
    assert found == wanted


def test_the_last_batches_of_epochs_are_those_of_the_grid():
    def told(spec):
        table = planned(spec)
        starts, sizes = table.cuts(0, rank=0)
        return min(max(table.held) - starts[-1], sizes[-1])

    found, wanted = laid_beside(told, lambda row: row.last_batch)
    assert len(wanted) == 2 * 21
    assert found == wanted


def test_all_workers_average_as_often_as_in_the_grid():
    """The end is a synchronisation, too."""

    def told(spec):
        next_one, steps = spec.strategy.next_synchronisation, planned(spec).steps
        period = next_one(1, steps)
        assert next_one(period + 1, steps) == 2 * period
        return -(-steps // period)

    found, wanted = laid_beside(told, lambda row: row.averages)
    assert len(wanted) == 4 * 7 + 2 * 21
    assert found == wanted


def test_rates_are_those_of_the_grid():
    """To the last printed digit."""
    for key, row in TABLE.items():
        spec = only_spec(key)
        schedule, table = spec.resolved().schedule, planned(spec)

        def rate(step, schedule=schedule, table=table):
            now = Progress(int(step), table.steps, table.epochs_done(int(step)))
            return RATE * schedule.factor(now)

        first, second = row.falls_after
        assert rate(0) == RATE, key
        if row.warmup:
            assert RATE < rate(row.warmup // 2) < rate(row.warmup - 1) < rate(row.warmup), key
            fifth = RATE + (row.rate - RATE) / 5
            assert rate(row.warmup // 5) == pytest.approx(fifth, abs=1e-4), key
        tenths = {row.warmup: 0, first - 1: 0, first: 1, second - 1: 1, second: 2}
        for step, tenth in {**tenths, table.steps - 1: 2}.items():
            wanted = pytest.approx(row.rate / 10**tenth, abs=5.1e-5 / 10**tenth)
            assert rate(step) == wanted, (key, step)


def test_overlap_makes_the_effective_epochs_of_the_grid():
    rows = [(fs.FullOverlap(), workers, *rest) for workers, _, *rest in E2_1]
    rows += [(scheme, 16, *rest) for _, *rest, schemes in E2_2 for scheme in schemes]
    for scheme, workers, passes, effective, _ in rows:
        assert scheme.overlap_epochs(EPOCHS, workers) == passes
        assert scheme.effective_epochs(passes, workers) == effective


def test_the_last_synchronisations_of_8_households_are_as_the_text_says():
    """After 47·182 steps there were 67 of them, about 7.5 times less than the 501 of setting 1."""
    rare = only_spec(households(8, 128, 8, 61))
    often = only_spec(households(8, 128, 8, 8))
    syncs = [-(-planned(spec).steps // spec.strategy.world_period) for spec in (rare, often)]
    assert (planned(rare).steps, syncs) == (47 * 182, [67, 501])


def test_who_shares_with_neighbourhoods_has_what_neighbourhood_overlap_says():
    for count in (4, 8):
        shards = fs.HouseholdShards(count, shards=count // 2)
        parts = zip(
            shards.assign(SAMPLES, 16, 0),
            fs.NeighbourhoodOverlap(count, 2).assign(SAMPLES, 16, 0),
            strict=True,
        )
        assert all((one == other).all() for one, other in parts)


# ---- The printed figures


def figures():
    """Study, cell and what is printed of it."""
    printed = tomllib.loads(PRINTED)
    for workers, figure in printed["e1"].items():
        yield "e1_workers", {"workers": workers}, figure
    yield "e2_1_full_overlap", {"data": "full", "workers": "16"}, printed["e2_1"]["16"]
    for scheme, rows in printed["e2_2"].items():
        for copies, figure in rows.items():
            yield "e2_2_degrees", {"data": f"{scheme}-{copies}"}, figure
    for data, rows in printed["e2_3"].items():
        for batch, figure in rows.items():
            yield "e2_3_batch", {"data": data, "batch": batch}, figure
    for shards, rows in printed["e3_2_2"].items():
        for period, figure in rows.items():
            cell = {"households": "8", "period": period, "shards": shards}
            yield "e3_2_2_constant_effective_batch", cell, figure


@functools.cache
def study_of(name):
    (path,) = (path for path in STUDIES if path.stem == name)
    return fs.Study.from_toml(path)


def printed_of(study, cell):
    (figure,) = (each for each in study.printed if each.cell == cell)
    assert (figure.n, figure.unit) == (SEEDS, "%")
    return figure


def significance_of(study, cell):
    found = [each for each in study.tests_printed if each.cell == cell]
    assert all(not each.against or each.against == study.baseline_levels for each in found)
    return found


def test_printed_figures_stand_in_the_studies():
    for name, cell, (mean, deviation, *p) in figures():
        study = study_of(name)
        found = printed_of(study, cell)
        assert (found.mean, found.deviation) == (mean, deviation), cell
        if p:
            (test,) = significance_of(study, cell)
            assert (test.p, test.tail) == (*p, "greater"), cell
            assert study.baseline_levels == {"shards": "own"}


def test_full_overlap_at_4096_has_the_printed_p():
    study = study_of("e2_3_batch")
    (test,) = significance_of(study, {"data": "full", "batch": "4096"})
    assert study.baseline_levels == {"data": "disjoint"}
    assert (test.p, test.tail) == (0.059, "greater")


@pytest.mark.parametrize(("count", "difference"), [("2", 0.25), ("4", -0.75), ("8", -1.5)])
def test_differences_of_setting_1_to_synchronous_training(count, difference):
    study = study_of("e3_2_1_constant_local_batch")
    assert study.baseline_levels == {"households": "1"}
    rest = {"period": "128", "shards": "own"}
    means = [printed_of(study, {"households": each, **rest}).mean for each in (count, "1")]
    assert means[0] - means[1] == pytest.approx(difference)
    (baseline,) = {
        cell.spec(0).id for cell in study.at_full_scale().cells if cell.labels["households"] == "1"
    }
    assert baseline == only_spec(Key(fs.SyncSGD(), fs.Disjoint(), 16, 8)).id


@pytest.mark.parametrize(
    ("count", "period", "shards", "is_significant"),
    [
        ("8", "16", "two", True),
        ("8", "16", "one", False),
        ("4", "128", "two", True),
        ("4", "128", "one", True),
    ],
)
def test_what_setting_2_says_of_significance(count, period, shards, is_significant):
    study = study_of("e3_2_2_constant_effective_batch")
    (test,) = significance_of(study, {"households": count, "period": period, "shards": shards})
    assert test.significant is is_significant


def test_the_largest_difference_of_setting_3():
    study = study_of("e3_2_3_scaled_rate")
    cell = {"rate": "scaled", "households": "8", "period": "128", "shards": "two"}
    (test,) = significance_of(study, cell)
    assert study.baseline_levels == {"shards": "own"}
    assert (test.difference, test.unit, test.p, test.n) == (0.57, "%", 0.09, SEEDS)
