"""Whole runs in the simulator whose workers die, pause and come back: looks, budgets, targets and
checkpoints."""

from __future__ import annotations

import random

import pytest
from tests.training.test_checkpoints import checkpoints, only, outcome, spec_of

import flockstep as fs
from flockstep.notation import read

# Workers that meet; that share tensors and wait; that never wait; in groups; with peers.
STRATEGIES = [
    fs.LocalSGD(3),
    fs.EASGD(2),
    fs.EAWild(2),
    fs.StaleSync(1),
    fs.GoSGD(0.5),
    fs.ADPSGD(),
    fs.DPSGD(),
    fs.EAWild(2, groups=2),
]
FAULTS = fs.Faults(
    deaths={0: "5 steps", 3: 0.0432},
    pauses=[fs.Pause(1, seconds=0.01), fs.Pause(2, at="4 steps", seconds=0.02)],
)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)


def run(strategy, **how):
    how = {"faults": FAULTS, "on_failure": "continue", "look_every": "3 steps", "lanes": 1} | how
    return fs.run(spec_of(strategy, **how))


@every_strategy
def test_looks_go_on_without_the_lost_and_the_run_is_the_same_without_looks(strategy):
    result = run(strategy, look_every="3 steps", measure="time")
    assert [(loss["rank"], loss["step"]) for loss in result.lost][:1] == [(0, 5)]
    assert {loss["rank"]: loss["seconds"] for loss in result.lost}[3] == 0.0432
    assert result.metrics["lost"] == 2
    assert [look.step for look in result.history] == [3, 6, 8]
    assert [len(look.waiting) for look in result.history][-1] == 2
    unseen = run(strategy, look_every="99 steps", measure="time")
    assert outcome(unseen)[2:] == outcome(result)[2:]


@pytest.mark.parametrize("strategy", [fs.EASGD(2), fs.EAWild(2), fs.GoSGD(0.5)], ids=repr)
def test_looks_by_time_are_of_those_who_were_there(strategy):
    result = run(strategy, look_every="0.02 seconds", measure="time")
    for look in result.history:
        there = 4 - sum(loss["seconds"] <= look.seconds for loss in result.lost)
        assert len(look.waiting) == there


@pytest.mark.parametrize("number", range(len(STRATEGIES)), ids=lambda n: repr(STRATEGIES[n]))
def test_a_checkpoint_goes_on_to_the_bit_and_the_dead_stay_dead(number, tmp_path):
    draw = random.Random(number)
    how = {"faults": FAULTS, "on_failure": "continue", "look_every": "3 steps"}
    spec = spec_of(STRATEGIES[number], **how)
    plain = fs.run(spec)
    kept = fs.run(spec, checkpoint=tmp_path / "all", every="1 step", keep=99)
    assert outcome(kept) == outcome(plain)
    saved = checkpoints(tmp_path / "all")
    for path in {saved[-1], draw.choice(saved)}:
        resumed = fs.resume(only(path, tmp_path / "one"), spec=spec)
        assert outcome(resumed) == outcome(plain)
        assert resumed.lost == plain.lost


@pytest.mark.parametrize("budget", [{"seconds": 0.3}, {"bytes": 400_000}, {"target": 0.4}], ids=str)
@pytest.mark.parametrize("strategy", [fs.LocalSGD(3), fs.StaleSync(1), fs.GoSGD(0.5)], ids=repr)
def test_budgets_and_targets_end_a_run_whose_workers_are_lost(strategy, budget):
    how = {"faults": fs.Faults(deaths={0: "5 steps", 3: 0.0432})} | budget
    if "target" in budget:
        how["epochs"] = 30
    results = [run(strategy, **how | {"lanes": lanes}) for lanes in (1, 2)]
    first, second = results
    assert outcome(first) == outcome(second)
    assert first.metrics["lost"] == 2
    if "target" in budget:
        assert first.history[-1].accuracy >= 0.4


def test_a_pause_costs_those_who_wait_as_long_and_those_who_do_not_nothing():
    def seconds(strategy, faults):
        return run(strategy, faults=faults, network="ideal").metrics["seconds"]

    late = fs.Faults(pauses=[fs.Pause(1, seconds=5)])
    assert seconds(fs.SyncSGD(), late) - seconds(fs.SyncSGD(), None) == pytest.approx(5, abs=1e-9)
    looks = run(fs.GoSGD(0.5), faults=late, look_every="0.01 seconds", measure="time").history
    assert [share for share in looks[2].waiting if share > 0.99] == [1.0]


def test_a_death_in_a_run_that_stops_is_raised():
    with pytest.raises(fs.WorkerLost, match="rank 3 died at 0.0432 s of virtual time after step 3"):
        run(fs.LocalSGD(3), on_failure="stop")


def test_a_result_tells_its_faults():
    faults = fs.Faults({1: "3 steps"}, fs.Pause(0, seconds=2), 0.001, 0.5)
    result = fs.run("digits-mlp", "sync_sgd", 2, steps=4, faults=faults, on_failure="continue")
    assert read(fs.Faults, result.config["faults"]) == faults
    assert faults.in_words() == (
        "rank 1 dies after 3 steps; 0.001 deaths per worker and second; rank 0 pauses for 2 s at "
        "0 s; 0.5 pauses per worker and second, of 1 s"
    )
