"""Declaring a study: what a file says, and what is wrong with it."""

from __future__ import annotations

import pytest

import flockstep as fs
from flockstep.study.planning import planned_runs, require_one_score, spec_of_cell

OVERLAP = """
question = "Does overlap help?"
seeds = [3, 5]
metric = "accuracy"
margin = 0.005
baseline = { shards = "disjoint" }

[base]
task = "digits-mlp"
workers = 8
strategy = "households({households}, world_period={period})"
optimizer = "sgd(lr=0.1)"

[axes]
period = [8, 32]
shards = { disjoint = "disjoint", overlap = "household_shards({households}, shards=2)" }

[[zipped]]
households = [2, 4]
look_every = ["1 epoch", "2 epochs"]

[computed]
assignment = "shards"
batch_size = "round(local_batch(64, workers, households, period))"

[[exclude]]
period = 32
households = 2

[[hypotheses]]
cell = { shards = "overlap", households = 4 }
expect = "better"
claim = "overlap helps"

[[published]]
cell = { shards = "overlap", period = 8, households = 4 }
mean = 91.5
deviation = 0.2
n = 5
unit = "%"
source = "Table 5"

[[published]]
cell = { shards = "disjoint", period = 8, households = 4 }
mean = 90.5
unit = "%"

[full]
seeds = 10
[full.base]
workers = 16
[full.axes]
period = [8, 32, 128]
"""


@pytest.fixture
def overlap():
    return fs.Study.from_toml(OVERLAP)


def test_a_study_is_a_grid_of_specs(overlap):
    labels = [dict(cell.labels) for cell in overlap.cells]
    assert len(labels) == 2 * 2 * 2 - 2
    assert {
        "period": "32",
        "shards": "overlap",
        "households": "4",
        "look_every": "2 epochs",
    } in labels
    assert not any(each["period"] == "32" and each["households"] == "2" for each in labels)
    (cell,) = [
        c for c in overlap.cells if c.labels["shards"] == "overlap" and c.labels["period"] == "32"
    ]
    spec = cell.spec(3)
    assert spec.strategy == fs.Households(4, world_period=32)
    assert spec.assignment == fs.HouseholdShards(4, shards=2)
    assert spec.batch_size == round(64 * 32 * 4 / (8 * (4 + 32 - 1)))
    assert spec.look_every == fs.Interval(2, "epochs")
    assert cell.label == "period=32, shards=overlap, households=4"


def test_runs_come_seed_by_seed_with_the_ids_of_their_specs(overlap):
    runs = planned_runs(overlap, {})
    assert [run.spec.seed for run in runs] == [3] * 6 + [5] * 6
    assert [run.id for run in runs] == [run.spec.id for run in runs]
    assert [run.is_shown for run in runs] == [True] * 6 + [False] * 6


def test_it_reads_back_from_its_text(overlap, tmp_path):
    assert fs.Study.from_toml(overlap.to_toml()) == overlap
    path = tmp_path / "overlap.toml"
    path.write_text(OVERLAP)
    loaded = fs.Study.from_toml(path)
    assert loaded.name == "overlap"
    assert loaded.path == path
    assert fs.Study.from_toml(loaded.to_toml()) == loaded


def test_specs_as_objects_are_those_of_their_texts():
    study = fs.Study(
        "Which?",
        base={"task": "digits-mlp", "network": fs.Network.preset("wan-100m")},
        axes={"strategy": [fs.SyncSGD(), fs.LocalSGD(8)]},
        tune=fs.Tuning([0.1, 0.2]),
        hypotheses=[fs.Hypothesis({"strategy": fs.LocalSGD(8)}, "worse")],
    )
    assert [cell.label for cell in study.cells] == ["sync_sgd", "local_sgd(period=8)"]
    assert fs.Study.from_toml(study.to_toml()) == study


def test_the_full_setting_merges_tables_and_replaces_the_rest(overlap):
    full = overlap.at_full_scale()
    assert full.seed_list == tuple(range(10))
    assert full.base["workers"] == 16
    assert full.base["task"] == "digits-mlp"
    assert len(full.cells) == 3 * 2 * 2 - 2
    assert full.name == "study-full"
    with pytest.raises(fs.InvalidField, match="'full' must be in the study"):
        full.at_full_scale()


def test_a_level_may_set_several_fields():
    places = {"near": {"network": "lan-10g"}, "far": {"network": "wan-100m", "compute": "20ms"}}
    base = {"task": "digits-mlp", "strategy": "sync_sgd", "compute": "5ms"}
    study = fs.Study("Where?", base=base, axes={"place": places})
    near, far = (cell.spec(0) for cell in study.cells)
    assert (near.compute.seconds, far.compute.seconds) == (0.005, 0.02)
    assert near.network == fs.Network.preset("lan-10g")


def test_a_value_alone_keeps_its_type():
    base = {"task": "digits-mlp", "strategy": "sync_sgd", "lr": "{rate}", "epochs": "{passes}"}
    study = fs.Study("?", base=base, axes={"rate": [0.5]}, computed={"passes": "1 + 1"})
    spec = study.cells[0].spec(0)
    assert (spec.lr, spec.epochs) == (0.5, 2)
    assert study.cells[0].label == "the only cell"


@pytest.mark.parametrize(
    ("budget", "field", "value"),
    [
        ({"epochs": 3}, "epochs", 3),
        ({"steps": 30}, "steps", 30),
        ({"seconds": 0.5}, "seconds", 0.5),
        ({"bytes": 1e6}, "bytes", 1_000_000),
        ({"samples": 1000}, "steps", 16),  # of 4 × 16 samples
    ],
)
def test_a_budget_is_the_same_for_all(budget, field, value):
    base = {"task": "digits-mlp", "strategy": "sync_sgd", "workers": 4}
    study = fs.Study("?", base=base, budget=budget)
    assert getattr(spec_of_cell(study, study.cells[0], 0), field) == value


def test_zipped_lists_with_repeats_are_cells_of_their_own():
    zipped = [{"lr": [0.1, 0.1, 0.2], "batch_size": [8, 16, 8]}]
    base = {"task": "digits-mlp", "strategy": "sync_sgd"}
    study = fs.Study("?", base=base, zipped=zipped, baseline={"lr": 0.2})
    labels = [cell.label for cell in study.cells]
    assert labels == ["lr=0.1, batch_size=8", "lr=0.1, batch_size=16", "lr=0.2, batch_size=8"]
    runs = planned_runs(study.replace(seeds=1), {})
    assert [run.spec.batch_size for run in runs] == [8, 16, 8]
    assert len({run.id for run in runs}) == 3
    assert study.partner(study.cells[1], study.baseline_levels) is study.cells[2]
    with pytest.raises(fs.InvalidField, match="'zipped 1' must have no row twice"):
        fs.Study("?", base=base, zipped=[{"lr": [0.1, 0.1], "batch_size": [8, 8]}])


def test_a_number_is_a_level_however_it_is_written():
    base = {"task": "digits-mlp", "strategy": "sync_sgd"}
    study = fs.Study("?", base=base, axes={"lr": [1.0, 0.5]}, baseline={"lr": 1})
    assert study.baseline_levels == {"lr": "1.0"}


def test_fewer_and_more_seeds_are_the_first_and_the_next(overlap):
    assert overlap.with_seeds(1).seed_list == (3,)
    assert overlap.with_seeds(4).seed_list == (3, 5, 6, 7)


def test_the_baseline_is_the_first_strategy_unless_told(overlap):
    assert overlap.baseline_levels == {"shards": "disjoint"}
    study = overlap.replace(baseline=None, hypotheses=(), published=())
    assert study.baseline_levels == {"period": "8"}
    axes = {"workers": [2, 4], "strategy": ["sync_sgd", "gosgd"]}
    study = fs.Study("?", base={"task": "digits-mlp"}, axes=axes)
    assert study.baseline_levels == {"strategy": "sync_sgd"}


def replaced(old: str, new: str) -> str:
    assert old in OVERLAP
    return OVERLAP.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (replaced("question", "qestion"), "unknown field 'qestion'; did you mean 'question'?"),
        (OVERLAP + "x = 1\n[", "not TOML: "),
        (replaced('task = "digits-mlp"', 'tsk = "x"'), "unknown field in [base] 'tsk'; did you"),
        (replaced("[axes]", "[axes]\npriod = [1, 2]"), "'axes.priod' must be a field of a run"),
        (replaced("[axes]", "[axes]\nseed = [1, 2]"), "'axes' must leave the seed to 'seeds'"),
        (replaced("period = [8, 32]", "period = []"), "'axes.period' must be a list of values"),
        (replaced("period = [8, 32]", "period = [8, 8]"), "'axes.period' must have no value twice"),
        (replaced("households = [2, 4]", "households = [2]"), "'zipped 1' must have lists of one"),
        (replaced("seeds = [3, 5]", "seeds = 0"), "'seeds' must be at least 1 (got 0)"),
        (replaced("seeds = [3, 5]", "seeds = []"), "'seeds' must have at least one"),
        (replaced("seeds = [3, 5]", "seeds = [1, 1]"), "'seeds' must have none twice"),
        (replaced("seeds = [3, 5]", "seeds = [-1]"), "'seed' must be at least 0"),
        (replaced('metric = "accuracy"', 'metric = "acuracy"'), "unknown metric 'acuracy'; did"),
        (replaced('"shards"', '"shards + assignment"'), "circular values: assignment → assignment"),
        (
            replaced('assignment = "shards"', 'assignment = "b"\nb = "assignment + shards"'),
            "circular values: assignment → b → assignment",
        ),
        (replaced('"shards"', '"shrds"'), "'axes.shards' must be a field of a run"),
        (replaced("[computed]", '[computed]\nx = "1"'), "'computed.x' must be a field of a run"),
        (
            replaced("[computed]", '[computed]\nworkers = "1"'),
            "'computed.workers' must be given once",
        ),
        (
            replaced('cell = { shards = "overlap", households = 4 }', "cell = { period = 9 }"),
            "hypothesis 1: unknown level of period in 'cell' '9'",
        ),
        (
            replaced('cell = { shards = "overlap", households = 4 }', "cell = { priod = 8 }"),
            "hypothesis 1: unknown axis in 'cell' 'priod'",
        ),
        (
            replaced(
                'cell = { shards = "overlap", households = 4 }',
                "cell = { period = 32, households = 2 }",
            ),
            "hypothesis 1: 'cell' must be one that exists",
        ),
        (
            replaced('expect = "better"', 'expect = "bigger"'),
            "hypothesis 1: 'expect' must be one of",
        ),
        (replaced('expect = "better"', ""), "hypothesis 1: 'expect' must be given"),
        (
            replaced('expect = "better"', 'expect = "equal"').replace("margin = 0.005", ""),
            "hypothesis 1: 'margin' must be given, here or in the study",
        ),
        (replaced("mean = 91.5", 'mean = "x"'), "published figure 1: 'mean' must be a number"),
        (
            replaced('{ shards = "overlap", period = 8, households = 4 }', "{ period = 7 }"),
            "[full]: published figure 1: 'cell' must be one that exists",
        ),
        (
            replaced('{ shards = "overlap", period = 8, households = 4 }', "{ period = 8 }"),
            "[full]: published figure 1: 'cell' must be one cell, not 4",
        ),
        (replaced("[full.axes]", "[full.axs]"), "[full]: unknown field of [full] 'axs'"),
        (
            replaced('baseline = { shards = "disjoint" }', 'baseline = { shards = "x" }'),
            "unknown level",
        ),
        (replaced("margin = 0.005", "margin = 0"), "'margin' must be above 0"),
        (
            replaced("margin = 0.005", "margin = 0.1\nbudget = { epoch = 3 }"),
            "unknown budget 'epoch'",
        ),
        (
            replaced("[base]", "[budget]\nepochs = 3\n[base]\nsteps = 4"),
            "'steps' must be left to the budget",
        ),
        (OVERLAP + "[tune]\nlr = []", "tune: 'tune.lr' must be a list of rates"),
        (
            OVERLAP + "[tune]\nlr = { low = 1 }",
            "tune: 'tune.lr.high' must be given",
        ),
    ],
    ids=lambda value: (
        value[:40] if value.startswith(("'", "u", "h", "p", "c", "t", "[", "n")) else ""
    ),
)
def test_what_is_wrong_is_one_line_that_names_file_and_field(text, message, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(fs.FlockstepError) as caught:
        fs.Study.from_toml(path)
    assert str(caught.value).startswith(f"{path}: {message}"), caught.value
    assert "\n" not in str(caught.value)


def test_a_wrong_field_of_a_run_names_its_cell(overlap):
    study = overlap.replace(base={**overlap.base, "workers": 7})
    with pytest.raises(fs.FlockstepError, match="cell period="):
        planned_runs(overlap.replace(base={**overlap.base, "optimizer": "sdg"}), {})
    assert planned_runs(study, {})  # what needs the data is found when it is run


def test_scores_of_different_kinds_are_not_compared(monkeypatch):
    from flockstep.tasks import TASKS

    other = fs.task("digits-cnn")
    import dataclasses

    renamed = dataclasses.replace(other, metric_name="perplexity")
    monkeypatch.setitem(TASKS, "digits-cnn", renamed)
    base = {"strategy": "sync_sgd"}
    study = fs.Study("?", base=base, axes={"task": ["digits-mlp", "digits-cnn"]})
    with pytest.raises(fs.InvalidField, match="accuracy of 'digits-mlp' and perplexity of"):
        require_one_score(study)
    require_one_score(study.replace(metric="test_loss"))


def test_rates_are_left_to_tuning():
    base = {"task": "digits-mlp", "strategy": "sync_sgd", "lr": 0.1}
    study = fs.Study("?", base=base, tune={"lr": [0.1]})
    with pytest.raises(fs.InvalidField, match="'lr' must be left to 'tune'"):
        planned_runs(study, {"the only cell": 0.1})
