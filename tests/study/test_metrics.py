"""Figures of runs by name."""

import pytest

import flockstep as fs
from flockstep.study.metrics import default_direction, is_score, value_of

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
