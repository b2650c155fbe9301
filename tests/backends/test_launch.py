"""`fs.Launch`: what a backend is asked to run."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flockstep as fs
from flockstep.backends import ON_FAILURE


def program(comm):
    return comm.rank, comm.size, comm.seed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"program": 3}, r"'program' must be callable \(got 3\)"),
        ({"workers": 0}, r"'workers' must be at least 1 \(got 0\)"),
        ({"workers": 2.0}, r"'workers' must be a whole number \(got 2.0\)"),
        ({"workers": True}, r"'workers' must be a whole number \(got True\)"),
        ({"seed": -1}, r"'seed' must be at least 0 \(got -1\)"),
        ({"seed": 2**63}, r"'seed' must be below 2\*\*63 \(got 9223372036854775808\)"),
        (
            {"on_failure": "panic"},
            r"'on_failure' must be one of 'stop', 'continue' \(got 'panic'\)",
        ),
    ],
)
def test_a_bad_field_is_refused_when_the_launch_is_made(fields, message):
    with pytest.raises(fs.InvalidField, match=f"^{message}$"):
        fs.Launch(**{"program": program, "workers": 2, **fields})


def test_a_launch_is_frozen_and_needs_only_a_program_and_workers():
    launch = fs.Launch(program, 2)
    assert (launch.seed, launch.on_failure, launch.watch) == (0, "stop", None)
    assert launch == fs.Launch(program, workers=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        launch.workers = 3


def test_a_backend_runs_a_launch(backend):
    seen = []
    launch = fs.Launch(program, 2, seed=2**63 - 1, watch=seen.append)
    assert backend.run(launch) == [(0, 2, 2**63 - 1), (1, 2, 2**63 - 1)]
    assert all(len(steps) == 2 for steps in seen)


@pytest.mark.parametrize("on_failure", ON_FAILURE)
def test_launch_makes_one_and_hands_it_to_the_backend(on_failure):
    class Noting(fs.Simulator):
        def run(self, launch):
            noted.append(launch)
            return super().run(launch)

    noted = []
    watch = noted.append
    fs.launch(program, 3, Noting(), seed=5, on_failure=on_failure, watch=watch)
    assert noted[0] == fs.Launch(program, 3, 5, on_failure, watch)


def test_the_largest_seed_gives_each_worker_a_random_stream_of_its_own(backend):
    launch = fs.Launch(lambda comm: torch.rand(1).item(), 3, seed=2**63 - 1)
    drawn = backend.run(launch)
    assert len(set(drawn)) == 3
    assert backend.run(launch) == drawn


def test_a_simulators_network_may_be_the_name_of_a_preset():
    preset = fs.Network.preset("wan-100m")
    assert fs.Simulator(network="wan-100m") == fs.Simulator(network=preset)
    assert fs.launch(program, 2, network="wan-100m") == [(0, 2, 0), (1, 2, 0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "moon"}, r"unknown network 'moon'; known: .*"),
        (
            {"network": 3},
            r"'network' must be one such as fs.Network.preset\('wan-100m'\) \(got 3\)",
        ),
        ({"network": fs.Link(0.1, 1e6)}, r"'network' must be one such as .*\(got Link\(.*\)\)"),
        (
            {"compute": "fast"},
            r"'compute' must be seconds, or one such as fs.Compute\(seconds=0.02\) \(got 'fast'\)",
        ),
    ],
)
def test_what_is_no_network_or_no_compute_is_refused(options, message):
    for call in (fs.Simulator, lambda **given: fs.launch(program, 2, **given)):
        with pytest.raises(ValueError, match=f"^{message}$"):
            call(**options)
