"""`fs.flatness`: scores of a model with noise on its parameters."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import flockstep as fs
from flockstep.tasks import TASKS
from flockstep.training import NOISE_SCALES, SCALES

CURVATURES = torch.linspace(0.1, 3.0, 400, dtype=torch.float64)  # of the loss, in each direction


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.full((400,), 0.02, dtype=torch.float64))


def bowl(model, batch):
    """½ Σ h x²: its Hessian is h, wherever the point is."""
    return 0.5 * (CURVATURES * model.place.square()).sum()


BOWL = fs.Task(
    "bowl",
    model=Point,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    loss=bowl,
    metric=lambda model, batch: float(model.place.square().mean().sqrt()),
    train=torch.zeros(4, 1),
    test=torch.zeros(2, 1),
    metric_name="size",
)


def test_the_loss_of_a_bowl_grows_by_half_the_variance_times_the_trace_of_its_hessian():
    point = Point()
    own = float(bowl(point, None).detach())
    found = fs.flatness(point, BOWL, scales=(0, 0.1, 0.5), draws=200, noise="absolute")
    for row in found.by_scale:
        expected = own + 0.5 * row.scale**2 * float(CURVATURES.sum())
        error = (row.loss_deviation or 0.0) / math.sqrt(row.draws)
        assert row.loss == pytest.approx(expected, abs=4 * error + 1e-12)
    assert [row.draws for row in found.by_scale] == [1, 200, 200]


def test_relative_noise_is_that_many_root_mean_squares_of_each_tensor():
    """All parameters are 0.02, and so is their root mean square."""
    point = Point()
    relative = fs.flatness(point, BOWL, scales=(0.5, 2), draws=3)
    absolute = fs.flatness(point, BOWL, scales=(0.5 * 0.02, 2 * 0.02), draws=3, noise="absolute")
    losses = [[each.loss for each in found.draws] for found in (relative, absolute)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)

    with torch.no_grad():
        point.place.mul_(100)  # a larger point suffers as much, in its own measure
    larger = fs.flatness(point, BOWL, scales=(0.5, 2), draws=3)
    assert [each.loss for each in larger.draws] == pytest.approx(
        [100**2 * loss for loss in losses[0]], rel=1e-9
    )


def test_every_scale_has_the_same_draws_which_the_seed_decides():
    first = fs.flatness(Point(), BOWL, scales=(0.1, 0.3), draws=2)
    again = fs.flatness(Point(), BOWL, scales=(0.3,), draws=4)
    other = fs.flatness(Point(), BOWL, scales=(0.3,), draws=4, seed=1)
    assert [each for each in first.draws if each.scale == 0.3] == [*again.draws[:2]]
    assert len({each.loss for each in (*again.draws, *other.draws)}) == 8


def normed_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 10)
    )
    model[1].running_mean.fill_(0.3)
    model.train()
    model[1].eval()  # as some do who fine-tune
    return model


@pytest.mark.parametrize("data", ["test", "validation", "train"])
def test_the_model_is_left_as_it_was_to_the_bit_and_scale_zero_is_its_own_score(data):
    task = dataclasses.replace(TASKS["digits-mlp"], model=normed_model, validation=0.2).loaded()
    model = normed_model()
    before = copy.deepcopy(model)
    drawn = torch.get_rng_state()
    found = fs.flatness(model, task, scales=(0, 0.5), draws=2, data=data)
    assert torch.equal(torch.get_rng_state(), drawn)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.state_dict().items())
    assert [each.training for each in model.modules()] == [
        each.training for each in before.modules()
    ]
    own = found.draws[0]
    assert (own.loss, own.accuracy) == task.evaluate(before, getattr(task, data))
    assert found.draws[1].loss != own.loss


def test_a_model_is_left_as_it_was_when_its_task_fails():
    def fails(model, batch):
        if float(model.place.detach()[0]) != 0.02:
            raise ValueError("no such place")
        return bowl(model, batch)

    point = Point()
    with pytest.raises(ValueError, match="no such place"):
        fs.flatness(point, dataclasses.replace(BOWL, loss=fails), scales=(0, 1))
    assert torch.equal(point.place, Point().place)


def test_statistics_of_batch_normalisation_get_no_noise():
    seen = set()

    class Watching(nn.BatchNorm1d):
        def forward(self, x):
            seen.add(tuple(self.running_mean.tolist()))
            return super().forward(x)

    model = nn.Sequential(nn.Linear(64, 4), Watching(4), nn.Linear(4, 10))
    fs.flatness(model, "digits-mlp", scales=(0, 1.0), draws=2)
    assert seen == {(0.0,) * 4}


def test_a_table_has_every_draw_and_the_words_every_scale():
    found = fs.flatness(Point(), BOWL, scales=(0, 0.1), draws=3)
    table = found.table()
    assert list(table.columns) == ["scale", "draw", "loss", "accuracy"]
    assert table["scale"].tolist() == [0.0, 0.1, 0.1, 0.1]
    assert table["draw"].tolist() == [0, 0, 1, 2]
    assert table["loss"].tolist() == [each.loss for each in found.draws]
    lines = repr(found).splitlines()
    assert lines[0] == "Flatness under relative noise, on the test data"
    assert lines[1].startswith("  scale 0: size 0.02, loss")
    assert lines[1].endswith("(1 draw)")
    assert lines[2].endswith("(3 draws)")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scales": ()}, "'scales' must be numbers such as"),
        ({"scales": "0.1"}, "'scales' must be numbers such as"),
        ({"scales": (0.1, -1)}, "'scales' must be at least 0 and finite"),
        ({"scales": (0.1, 0.1)}, "'scales' must be different from each other"),
        ({"draws": 0}, "'draws' must be at least 1"),
        ({"noise": "loud"}, "'noise' must be one of 'relative', 'absolute'"),
        ({"data": "all"}, "'data' must be one of 'test', 'validation', 'train'"),
        ({"data": "validation"}, "'data' must be data that task 'bowl' has"),
        ({"seed": -1}, "'seed' must be at least 0"),
        ({"task": 3}, "'task' must be a name, or an fs.Task"),
        ({"model": Point}, "'model' must be an nn.Module"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fields, message):
    with pytest.raises(fs.InvalidField, match=message):
        fs.flatness(**{"model": Point(), "task": BOWL, **fields})


# ---- In a run


def test_a_run_measures_it_at_its_end_and_is_the_same_run():
    fields = {"workers": 2, "steps": 12, "seed": 3, "validation": 0.2}
    plain = fs.run("digits-mlp", fs.LocalSGD(5), **fields)
    drawn = torch.get_rng_state()
    run = fs.run("digits-mlp", fs.LocalSGD(5), measure="flatness", **fields)
    assert torch.equal(torch.get_rng_state(), drawn)
    own = fs.flatness(run.model, run.spec.find_task(), NOISE_SCALES)
    found = {name: value for name, value in run.metrics.items() if "_noise_" in name}
    assert found == {
        **{f"test_accuracy_noise_{each.scale:g}": each.accuracy for each in own.by_scale},
        **{f"test_loss_noise_{each.scale:g}": each.loss for each in own.by_scale},
    }
    assert plain.history == run.history
    same = {name: value for name, value in plain.metrics.items() if name != "wall_seconds"}
    assert same == {name: run.metrics[name] for name in same}
    left = plain.model.state_dict()
    assert all(torch.equal(value, left[name]) for name, value in run.model.state_dict().items())


def test_runs_that_do_not_ask_for_it_do_not_measure_it():
    run = fs.run("digits-mlp", fs.SyncSGD(), 2, steps=2)
    assert not any("noise" in name for name in run.metrics)


# ---- The command


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("results")
    for name, strategy in (("sync", fs.SyncSGD()), ("swarm", fs.NoSync(0.1))):
        fs.run("digits-mlp", strategy, 2, steps=20, validation=0.1).save(place / name)
    return [str(place / name) for name in ("sync", "swarm")]


def test_the_command_shows_results_side_by_side(flockstep, folders):
    done = flockstep("flatness", *folders, "--scales", "0,0.5", "--draws", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "sync_sgd, 2 workers" in lines[0]
    assert "nosync(pull=0.1), 2 workers" in lines[1]
    assert "relative noise" in lines[2]
    assert [line.split()[0] for line in lines[-3:-1]] == ["0", "0.5"]
    own = fs.load_result(folders[0]).metrics
    assert f"{100 * own['test_accuracy']:.4g}%" in lines[-3]
    assert lines[-2].count("±") == 4


def test_for_machines_it_prints_an_object_per_result_and_nothing_else(flockstep, folders):
    arguments = ["--scales", "0,0.3", "--draws", "3", "--noise", "absolute", "--seed", "4"]
    done = flockstep("flatness", *folders, *arguments, "--data", "validation", "--json")
    assert done.stderr == ""
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["result"] for each in told] == folders
    result = fs.load_result(folders[1])
    task = result.spec.find_task()
    own = fs.flatness(result.model, task, (0, 0.3), 3, "absolute", "validation", 4)
    assert told[1]["draws"] == [dataclasses.asdict(each) for each in own.draws]
    assert told[1]["scales"] == [dataclasses.asdict(each) for each in own.by_scale]
    assert (told[1]["noise"], told[1]["data"]) == ("absolute", "validation")
    assert told[1]["draws"][0]["accuracy"] == result.history[-1].accuracy


def test_it_draws_a_picture(flockstep, folders, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "flat.svg"
    done = flockstep("flatness", *folders, "--draws", "1", "--out", str(picture))
    assert done.stdout.splitlines()[-1] == f"The picture is in {picture}"
    assert "noise on the parameters" in picture.read_text()
    assert len([line for line in done.stdout.splitlines() if "%" in line]) == len(SCALES)


def test_the_command_says_what_is_wrong(refused, folders, tmp_path):
    refused(["flatness", str(tmp_path)], f"'{tmp_path}' is not a result folder")
    refused(["flatness", folders[0], "--scales", "a"], "'--scales' must be numbers such as")
    refused(["flatness", folders[0], "--out", "flat.gif"], "'--out' must end in .png, .svg, .pdf")


def test_scales_may_be_an_array():
    model = fs.task("digits-mlp").make_model()
    given = {"draws": 1, "seed": 3}
    of_array = fs.flatness(model, "digits-mlp", np.array([0.0, 0.5]), **given)
    assert of_array == fs.flatness(model, "digits-mlp", (0, 0.5), **given)
