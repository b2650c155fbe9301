"""Figures of runs by name."""

import math

import pytest

import flockstep as fs
from flockstep.study.metrics import METRICS, OF_NOISE, default_direction, is_score, value_of

THROUGHPUT = "samples_per_second"


def test_throughput_is_samples_by_seconds():
    assert value_of(THROUGHPUT, {"samples": 600, "seconds": 1.5}, []) == 400


@pytest.mark.parametrize("metrics", [{}, {"samples": 600}, {"samples": 600, "seconds": 0.0}])
def test_a_run_that_took_no_time_has_no_throughput(metrics):
    assert value_of(THROUGHPUT, metrics, []) is None


def test_more_throughput_is_better_and_it_is_no_accuracy():
    assert default_direction(THROUGHPUT) == "higher"
    assert not is_score(THROUGHPUT)


def test_a_study_compares_throughput_of_the_run_s_clock():
    base = {"task": "digits-mlp", "steps": 4, "strategy": "independent"}
    base |= {"network": "ideal", "compute": 0.5}
    study = fs.Study("Faster?", base, {"workers": [1, 2]}, seeds=1, metric=THROUGHPUT)
    outcome = study.run()
    one, two = (outcome.values(cell)[0] for cell in outcome.study.cells)
    assert one == pytest.approx(16 / 0.5)  # the batch of a worker, a step
    assert two == pytest.approx(2 * one)


def test_what_noise_takes_is_the_distance_to_the_score_and_the_loss_without():
    metrics = {"test_accuracy": 0.9, "test_loss": 0.4}
    metrics |= {"test_accuracy_noise_0.2": 0.7, "test_loss_noise_0.2": 1.4}
    assert value_of("test_accuracy_noise_0.2", metrics, []) == 0.7
    assert value_of("test_accuracy_lost_to_noise_0.2", metrics, []) == pytest.approx(0.2)
    assert value_of("test_loss_added_by_noise_0.2", metrics, []) == pytest.approx(1.0)
    assert value_of("test_accuracy_lost_to_noise_0.5", metrics, []) is None
    metrics["test_loss_noise_0.2"] = math.nan
    assert value_of("test_loss_added_by_noise_0.2", metrics, []) is None


def test_to_lose_less_to_noise_is_better():
    assert default_direction("test_accuracy_noise_0.2") == "higher"
    assert default_direction("test_accuracy_lost_to_noise_0.2") == "lower"
    assert default_direction("test_loss_noise_0.2") == "lower"
    assert default_direction("test_loss_added_by_noise_0.2") == "lower"
    assert is_score("test_accuracy_lost_to_noise_0.2")  # so it is told in per cent
    assert not is_score("test_loss_added_by_noise_0.2")


def test_a_study_compares_what_runs_lose_to_noise_if_they_measure_it():
    assert {*OF_NOISE} <= {*METRICS}
    base = {"task": "digits-mlp", "steps": 4, "strategy": "independent"}
    metric = "test_accuracy_lost_to_noise_0.5"
    with pytest.raises(fs.InvalidField, match="'metric' must be measured: measure = 'flatness'"):
        fs.Study("Broad?", base, {"workers": [1, 2]}, seeds=1, metric=metric).run()
    base["measure"] = "flatness"
    study = fs.Study("Broad?", base, {"workers": [1, 2]}, seeds=1, metric=metric)
    outcome = study.run()
    for cell in outcome.study.cells:
        run = fs.run(cell.spec(0)).metrics
        lost = run["test_accuracy"] - run["test_accuracy_noise_0.5"]
        assert outcome.values(cell) == {0: lost}


def test_what_is_shown_beside_the_metric_must_be_a_mean_and_measured():
    base = {"task": "digits-mlp", "steps": 4, "strategy": "independent"}

    def study(*names):
        return fs.Study("Known?", base, {"workers": [1, 2]}, seeds=1, also_shown=names)

    with pytest.raises(fs.FlockstepError, match="unknown metric 'tset_loss'; did you mean"):
        study("tset_loss")
    rule = "'also_shown' must be a list of metrics that are means over runs"
    with pytest.raises(ValueError, match=rule):
        study("seconds_to_target")
    with pytest.raises(ValueError, match=rule):
        fs.Study("Known?", base, {"workers": [1, 2]}, seeds=1, also_shown="test_loss")
    with pytest.raises(ValueError, match="'also_shown' must be measured: measure = 'training'"):
        study("test_loss", "train_accuracy").run()
