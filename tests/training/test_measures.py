"""What papers measure: how good each replica is, how far apart they are, how stale updates were,
and how many epochs an accuracy takes.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import pdist

import flockstep as fs
from flockstep.comm import Meter, staleness_from
from flockstep.tasks import TASKS
from flockstep.training import distances
from flockstep.training.distances import of_replicas_here, of_replicas_of_all, pairs_of
from flockstep.training.figures import Figures, Table


def short(strategy, workers=4, **fields):
    return fs.run("digits-mlp", strategy, workers, **{"steps": 25, "seed": 2, **fields})


def by_hand(replicas):
    """‖x_i − x_j‖ and |x_i − x_j|, as torch has them, over all pairs."""
    values = torch.stack([*replicas]).double()
    return {
        "distance_mean": float(pdist(values).mean()),
        "distance_per_parameter": float(pdist(values, p=1).mean()) / values.shape[1],
    }


# ---- Every worker's own model


def test_the_workers_own_models_are_scored_on_the_test_data_before_they_become_one():
    """With the statistics of batch normalisation that each has gathered: there are none here."""
    result = short(fs.LocalSGD(7), measure="replicas", validation=0.2)
    task = dataclasses.replace(TASKS["digits-mlp"], validation=0.2).loaded()
    on_test, on_validation = [], []
    for replica in result.replicas:
        model = task.model()
        nn.utils.vector_to_parameters(replica, model.parameters())
        on_test.append(task.evaluate(model)[1])
        on_validation.append(task.evaluate(model, task.validation)[1])
    metrics = result.metrics
    assert metrics["test_replicas"] == on_test
    assert metrics["test_replicas_mean"] == pytest.approx(sum(on_test) / 4)
    assert (metrics["test_replicas_max"], metrics["test_replicas_min"]) == (
        max(on_test),
        min(on_test),
    )
    assert result.history[-1].replicas_max == max(on_validation) != max(on_test)
    assert metrics["test_accuracy"] not in on_test  # that is the average's


def test_nobody_touches_the_test_data_for_replicas_before_the_end():
    seen = []

    def metric(model, batch):
        seen.append(len(batch[1]))
        return fs.classification_accuracy(model, batch)

    task = dataclasses.replace(TASKS["digits-mlp"], validation=0.25, metric=metric)
    fs.run(task, fs.LocalSGD(4), 3, steps=12, look_every="4 steps", measure="replicas")
    assert seen.count(360) == 3 + 1  # each replica once, and the model that stands for them


def test_replicas_that_were_not_asked_for_are_not_scored():
    assert not any("replicas" in name for name in short(fs.LocalSGD(7)).metrics)


# ---- How well the training data are known


@pytest.mark.parametrize("strategy", [fs.LocalSGD(7), fs.EAWild(period=3)])
def test_the_representative_is_scored_on_training_data_and_the_run_is_the_same(strategy):
    plain = short(strategy, look_every="10 steps", validation=0.2)
    result = short(strategy, look_every="10 steps", validation=0.2, measure="training")
    task = dataclasses.replace(TASKS["digits-mlp"], validation=0.2).loaded()
    known = task.evaluate(result.model, task.train)[1]  # fewer than 4,096
    assert result.metrics["train_accuracy"] == result.history[-1].train_accuracy == known
    assert all(0 < look.train_accuracy < 1 for look in result.history)
    assert result.history[0].train_accuracy != result.history[0].accuracy
    assert [look.accuracy for look in result.history] == [look.accuracy for look in plain.history]
    assert "train_accuracy" not in plain.metrics


def test_real_workers_score_training_data_together(backend):
    result = short(fs.SyncSGD(), 2, look_every="10 steps", measure="training", backend=backend)
    simulated = short(fs.SyncSGD(), 2, look_every="10 steps", measure="training")
    told = [[look.train_accuracy for look in each.history] for each in (result, simulated)]
    assert told[0] == pytest.approx(told[1], abs=0.002)


def test_training_data_are_scored_as_they_are_and_at_most_4096_of_them():
    seen = []

    def bright(random, pictures, labels):
        return torch.full_like(pictures, 9.0), labels

    def metric(model, batch):
        seen.append((len(batch[1]), float(batch[0].max())))
        return fs.classification_accuracy(model, batch)

    rows = fs.InMemory(torch.rand(5_000, 64), torch.randint(10, (5_000,)), augment=bright)
    task = dataclasses.replace(TASKS["digits-mlp"], train=rows, metric=metric)
    fs.run(task, fs.SyncSGD(), 2, steps=2, batch_size=8, look_every="5 steps", measure="training")
    assert sum(count for count, _ in seen if count != 360) == 4_096  # 360 are the test data
    assert all(brightest <= 1 for _, brightest in seen)


def test_a_stream_of_training_data_cannot_be_scored():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.rand(64), 1

    task = dataclasses.replace(TASKS["digits-mlp"], train=Endless())
    with pytest.raises(ValueError, match="'measure' must be without 'training' where the training"):
        fs.run(task, fs.SyncSGD(), 2, steps=2, measure="training")


# ---- Distances


@pytest.mark.parametrize("strategy", [fs.LocalSGD(7), fs.EAWild(3), fs.GoSGD(0.5)], ids=str)
def test_distances_at_the_end_are_those_of_the_replicas(strategy):
    result = short(strategy, measure="distance")
    found = {name: result.history[-1][name] for name in by_hand(result.replicas)}
    assert found == pytest.approx(by_hand(result.replicas), rel=1e-9)
    assert found["distance_mean"] > 0


def test_distances_at_a_look_are_those_of_a_run_that_ends_there():
    seen = short(fs.NoSync(0.3), measure="distance", look_every="10 steps").history[0]
    ended = short(fs.NoSync(0.3), measure="distance", steps=10)
    assert seen.step == 10
    for name, value in by_hand(ended.replicas).items():
        assert seen[name] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(("strategy", "workers"), [(fs.SyncSGD(), 4), (fs.LocalSGD(4), 1)])
def test_replicas_that_are_one_have_no_distance(strategy, workers):
    last = short(strategy, workers, measure="distance").history[-1]
    assert (last.distance_mean, last.distance_per_parameter) == (0, 0)


PARAMETERS = 3000


class Particle(nn.Module):
    """A parameter that is only ever moved by noise."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(PARAMETERS))


def noise_task(samples):
    noise = torch.randn(samples, PARAMETERS, generator=torch.Generator().manual_seed(3))
    return fs.Task(
        "noise",
        model=Particle,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda model, batch: (batch @ model.place).mean(),
        metric=lambda model, batch: 0.0,
        train=noise,
        test=noise[:1],
        batch_size=1,
    )


@pytest.mark.parametrize("pull", [0.1, 0.3])
def test_a_swarm_under_noise_settles_at_the_distance_that_theory_says(pull):
    result = fs.run(noise_task(8 * 40), fs.NoSync(pull), 8, epochs=1, measure="distance")
    expected = fs.settled_distance(pull, lr=0.1, noise=1.0)
    assert result.history[-1].distance_per_parameter == pytest.approx(expected, rel=0.03)


def test_particles_that_nothing_pulls_grow_apart_as_theory_says():
    fields = {"epochs": 1, "measure": "distance", "look_every": "10 steps"}
    looks = fs.run(noise_task(8 * 30), fs.Independent(), 8, **fields).history
    for look in looks:
        expected = fs.growing_distance(lr=0.1, noise=1.0, steps=look.step)
        assert look.distance_per_parameter == pytest.approx(expected, rel=0.03)
    assert len(looks) == 3


def test_up_to_64_workers_all_pairs_count_and_beyond_a_fixed_sample_of_as_many():
    assert pairs_of(3).tolist() == [[0, 1], [0, 2], [1, 2]]
    assert len({tuple(pair) for pair in pairs_of(64).tolist()}) == 64 * 63 // 2 == 2016
    many = pairs_of(1000)
    assert many.shape == (2016, 2)
    assert torch.equal(many, pairs_of(1000))
    assert (many[:, 0] != many[:, 1]).all()
    assert many.min() >= 0
    assert 990 <= many.max() < 1000

    replicas = torch.randn(200, 40, generator=torch.Generator().manual_seed(0))
    assert of_replicas_here(replicas) == pytest.approx(by_hand(replicas), rel=0.02)


def test_workers_share_the_pairs_and_send_slices(monkeypatch):
    monkeypatch.setattr(distances, "SLICE", 4)
    monkeypatch.setattr(distances, "DIFFERENCES", 5)
    replicas = torch.randn(5, 11, generator=torch.Generator().manual_seed(1))

    def program(comm):
        return of_replicas_of_all(comm, replicas[comm.rank])

    told = fs.launch(program, 5)
    assert all(each == told[0] for each in told)
    assert told[0] == pytest.approx(by_hand(replicas))
    assert of_replicas_here(replicas) == pytest.approx(by_hand(replicas))


def test_many_workers_are_measured_at_the_end_as_well():
    task = dataclasses.replace(TASKS["digits-mlp"], model=lambda: nn.Linear(64, 10))
    result = fs.run(task, fs.Independent(), 70, steps=2, measure="distance", network="ideal")
    assert result.history[-1].distance_mean == pytest.approx(
        by_hand(result.replicas)["distance_mean"], rel=0.03
    )


# ---- Staleness


@pytest.mark.parametrize(
    ("strategy", "pushes"),
    [(fs.AsyncSGD(), 25), (fs.EAWild(1), 25), (fs.Downpour(2), 12 + 1)],  # the rest at the end
    ids=str,
)
def test_the_histogram_of_staleness_counts_every_update(strategy, pushes):
    compute = fs.Compute(0.01, jitter=0.5, slow={0: 3.0})
    looks = short(strategy, measure="staleness", compute=compute, look_every="10 steps").history
    for look in looks:
        counts = dict(look.staleness_histogram)
        updates = sum(counts.values())
        assert max(counts) == look.staleness_max
        mean = sum(staleness * count for staleness, count in counts.items()) / updates
        assert mean == pytest.approx(look.staleness_mean)
    assert updates == 4 * pushes


def test_where_nothing_is_updated_there_is_no_histogram():
    look = short(fs.SyncSGD(), measure="staleness").history[-1]
    assert look.staleness_histogram is None
    assert short(fs.AsyncSGD()).history[-1].staleness_histogram is None


def test_great_staleness_shares_places_that_double():
    meter = Meter()
    for staleness in (0, 63, 64, 127, 128, 255, 1_000_000):
        meter.count_staleness(staleness)
    again = Meter()
    again.load(meter.saved())
    assert again.staleness_counts == meter.staleness_counts

    numbers = [0.0] * 12
    numbers[7], numbers[8], numbers[9] = 1_000_637, 7, 1_000_000  # sum, count and greatest
    of_one = Figures(*numbers, staleness_counts=tuple(again.staleness_counts))
    of_none = Figures(*[0.0] * 12)
    for table in (
        Table.of_figures([of_none, of_one]),
        Table.of(fs.Gathered([of_one.told(), of_none.told()], [0, 1])),
        Table.load(Table.of_figures([of_one]).saved()),
    ):
        histogram = table.staleness()["staleness_histogram"]
        assert histogram == [[0, 1], [63, 1], [64, 2], [128, 2], [2**19, 1]]
    assert [staleness_from(place) for place in (0, 63, 64, 65, 66)] == [0, 63, 64, 128, 256]


# ---- Epochs to an accuracy


def test_epochs_to_an_accuracy_are_those_of_the_first_look_that_has_it():
    result = short(fs.SyncSGD(), steps=None, epochs=4, look_every="5 steps")
    scores = [look.accuracy for look in result.history]
    goal = scores[6]
    first = next(look for look in result.history if look.accuracy >= goal)
    assert result.epochs_to(goal) == first.epoch
    assert result.epochs_to(0.0) == result.history[0].epoch == 5 / 23
    assert result.epochs_to(1.1) is None
    with pytest.raises(fs.InvalidField, match="'accuracy' must be a number"):
        result.epochs_to("high")


def test_epochs_to_a_target_are_those_of_the_look_that_ended_the_run():
    free = short(fs.SyncSGD(), steps=None, epochs=4, look_every="5 steps")
    ended = short(fs.SyncSGD(), steps=None, epochs=4, look_every="5 steps", target=0.7)
    assert ended.metrics["epochs_to_target"] == ended.epochs_to(0.7) == free.epochs_to(0.7)
    assert math.isfinite(ended.metrics["epochs_to_target"])
