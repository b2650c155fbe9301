"""Same seed, same weights, bit for bit."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch
from torch import nn

import flockstep as fs

STRATEGIES = [
    fs.SyncSGD(),
    fs.LocalSGD(period=3),
    fs.EASGD(period=2),
    fs.EASGD(period=2, mode="sync"),
    fs.EAWild(),
    fs.EAWild(period=2, groups=2, delegate="random"),
    fs.Independent(),
]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
        )

    def forward(self, x):
        return self.layers(x)


def fingerprint(strategy, dropout, seed=0, lanes=1):
    """A hash of all replicas, the final model and the clocks."""
    task = fs.Task(
        "fingerprint",
        model=Dropping if dropout else lambda: nn.Linear(64, 10),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        loss=fs.classification_loss,
        train=(
            torch.randn(200, 64, generator=torch.Generator().manual_seed(5)),
            torch.arange(200) % 10,
        ),
        test=(torch.zeros(10, 64), torch.arange(10)),
        metric=fs.classification_accuracy,
    )
    uneven = fs.Compute(0.01, jitter=0.4, slow={1: 1.7})
    result = fs.run(
        task,
        strategy,
        workers=6,
        epochs=2,
        batch_size=5,
        compute=uneven,
        lanes=lanes,
        seed=seed,
        progress=False,
    )
    digest = hashlib.sha256()
    for tensor in (*result.replicas, *result.model.state_dict().values()):
        digest.update(tensor.detach().numpy().tobytes())
    digest.update(repr((result.metrics["seconds"], result.history)).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_runs_repeat_bit_for_bit_with_any_number_of_lanes(strategy, dropout):
    first = fingerprint(strategy, dropout)
    torch.manual_seed(123)  # what the caller draws does not matter
    assert fingerprint(strategy, dropout, lanes=2) == first
    assert fingerprint(strategy, dropout, lanes=6) == first
    assert fingerprint(strategy, dropout, seed=1) != first


@pytest.mark.cluster  # a program of its own
def test_another_process_gives_the_same_bits():
    code = (
        "import flockstep as fs\n"
        "from tests.backends.test_sim_determinism import fingerprint\n"
        "print(fingerprint(fs.EAWild(), True, lanes=2), fingerprint(fs.SyncSGD(), False, lanes=2))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    here = [fingerprint(fs.EAWild(), True), fingerprint(fs.SyncSGD(), False)]
    assert there.stdout.split() == here


def test_workers_draw_from_streams_of_their_own():
    def program(comm):
        first = torch.rand(3)
        comm.barrier()
        return torch.cat([first, torch.rand(3)]).tolist()

    streams = fs.launch(program, 4, seed=9)
    assert len({tuple(stream) for stream in streams}) == 4
    assert streams == fs.launch(program, 4, seed=9)
    assert streams[:2] == fs.launch(program, 2, seed=9)  # (seed, rank) alone decides


def test_local_workers_draw_the_same_streams(local):
    assert fs.launch(lambda comm: torch.rand(5).tolist(), 3, local, seed=4) == fs.launch(
        lambda comm: torch.rand(5).tolist(), 3, seed=4
    )


def test_a_seed_set_by_the_program_is_the_workers_own():
    def program(comm):
        torch.manual_seed(7)
        comm.barrier()
        return float(torch.rand(()))

    expected = float(torch.rand((), generator=torch.Generator().manual_seed(7)))
    assert fs.launch(program, 3, lanes=2) == [expected] * 3


def test_the_callers_generator_and_threads_are_left_as_they_were():
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    fs.launch(lambda comm: torch.rand(comm.rank + 1), 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def _late_drawer(comm):
    model = nn.Linear(2, 1)
    worker = fs.Worker(
        comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.LocalSGD(period=1)
    )
    for step in range(4):
        noise = torch.rand(()) if step == 2 else 0.0
        loss = model(torch.ones(1, 2)).sum() + noise
        loss.backward()
        worker.step(loss)


def test_a_draw_that_lanes_cannot_repeat_is_an_error():
    with pytest.raises(fs.FlockstepError, match="run with lanes=1"):
        fs.launch(_late_drawer, 4, lanes=2)
    fs.launch(_late_drawer, 4, lanes=1)


def test_two_lanes_really_run_two_workers_at_once():
    """Two workers that wait for each other outside the comm can only meet if both run."""
    import threading

    meeting = threading.Barrier(2)

    def program(comm):
        model = nn.Linear(2, 1)
        worker = fs.Worker(
            comm, model, torch.optim.SGD(model.parameters(), lr=0.1), fs.Independent()
        )
        for step in range(2):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            worker.step(loss)
            comm.barrier()
            if step == 1:
                meeting.wait(timeout=60)

    fs.launch(program, 2, lanes=2)
