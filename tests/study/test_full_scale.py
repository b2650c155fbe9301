"""Studies at their published size are what the papers did, as far as rates have to be found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import flockstep as fs
from flockstep.study import is_score
from flockstep.study.planning import planned_tries
from flockstep.training import planned_steps

STUDIES = Path(__file__).parents[2] / "studies"
OF_PAPERS = sorted(path.stem for letter in "abc" for path in STUDIES.glob(f"{letter}[0-9]*.toml"))


def at_full_scale(name: str) -> fs.Study:
    return fs.Study.from_toml(STUDIES / f"{name}.toml").at_full_scale()


def test_little_of_the_training_data_is_held_out_where_scores_are_compared():
    """A paper trained on all of them; what is held out for rates makes its epochs shorter."""
    tuned = {name: study for name in OF_PAPERS if (study := at_full_scale(name)).tune is not None}
    scored = {name: study for name, study in tuned.items() if is_score(study.metric)}
    assert {"a1_systems", "a2_workers", "b1_pso_ps", "c3_lstm", "c8_deep_wide"} <= {*scored}
    assert max(study.tune.validation for study in scored.values()) <= 0.05


@pytest.mark.skipif("FLOCKSTEP_DATA" not in os.environ, reason="no folder of data sets")
def test_the_large_batch_of_the_lstm_takes_the_steps_of_the_paper():
    """60,000 samples in batches of 8,192 are 8 steps an epoch, for 50 epochs."""
    study = at_full_scale("c3_lstm")
    tries = {run.cell.label: run.spec for run in planned_tries(study)}
    assert {planned_steps(spec) for label, spec in tries.items() if label != "small_batch"} == {400}
