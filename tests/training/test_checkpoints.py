"""Runs that are saved and go on: resumed is never stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.strategies.harness import net, net_with_statistics
from tests.strategies.table import REMEMBERING, TABLE
from tests.support.full_disk import files_end_at
from torch import nn
from torch.nn import functional as F

import flockstep as fs
from flockstep.backends.sim import saving

X = torch.randn(64, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(64) % 3


class Dropping(nn.Module):
    def __init__(self, part: float) -> None:
        super().__init__()
        self.net = net_with_statistics()
        self.drop = nn.Dropout(part)

    def forward(self, x):
        return self.net(self.drop(x))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


def task(dropout: float = 0.0, model=None, **how) -> fs.Task:
    return fs.Task(
        name="small",
        model=model or (lambda: Dropping(dropout)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        loss=loss,
        metric=accuracy,
        train=(X, Y),
        test=(X, Y),
        **{"batch_size": 4, "epochs": 2} | how,
    )


def spec_of(strategy, dropout=0.0, workers=4, **how) -> fs.RunSpec:
    return fs.RunSpec(task(dropout), strategy, workers, schedule=fs.Cosine(), **how)


def outcome(result: fs.Result):
    """All of a result but the wall's time: bits, not numbers."""
    metrics = result.metrics | {"wall_seconds": None}
    replicas = [replica.tolist() for replica in result.replicas]
    model = {name: value.tolist() for name, value in result.model.state_dict().items()}
    return metrics, [dict(look) for look in result.history], replicas, model


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-step-*"))


def only(path: Path, folder: Path) -> Path:
    """A folder that holds nothing but that checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(path, folder / path.name)
    return folder


STRATEGIES = [*(row.strategy for row in TABLE), *(fs.SyncSGD(codec=codec) for codec in REMEMBERING)]


@pytest.mark.parametrize("number", range(len(STRATEGIES)), ids=lambda n: repr(STRATEGIES[n]))
def test_resumed_is_never_stopped(number, tmp_path):
    """In the simulator, at a random moment, bit for bit; and with checkpoints as without."""
    draw = random.Random(number)
    spec = spec_of(
        STRATEGIES[number],
        dropout=draw.choice([0.0, 0.2]),
        compute=fs.Compute(0.01, jitter=0.5, slow={2: draw.choice([1.0, 5.0])}),
        network=fs.Network.preset(draw.choice(["ideal", "wan-100m"])),
        look_every=draw.choice(["1 epoch", "3 steps", "0.03 seconds"]),
        measure=("spread", "distance", "staleness", "time"),
        lanes=draw.choice([1, 2]),
        batch_size=draw.choice([4, fs.BatchGrowth(2, (0.5,), 2)]),
        seed=number,
    )
    every = draw.choice(["1 step", "2 steps", "3 steps"])
    whole = outcome(fs.run(spec, checkpoint=tmp_path / "all", every=every, keep=1000))
    if number % 3 == 0:  # of each kind some
        assert outcome(fs.run(spec)) == whole
    one = only(draw.choice(checkpoints(tmp_path / "all")), tmp_path / "one")
    assert outcome(fs.resume(one, spec=spec)) == whole


def test_a_checkpoint_of_another_simulator_is_refused_in_a_line(tmp_path, monkeypatch):
    spec = spec_of(fs.LocalSGD(2), steps=3)
    with monkeypatch.context() as before:
        before.setattr(saving, "MODEL", None)
        fs.run(spec, checkpoint=tmp_path, every="1 step")
    with pytest.raises(fs.CheckpointError, match="is of an earlier simulator"):
        fs.resume(tmp_path, spec=spec)


SHARED_LINKS = {
    "home": fs.Network(1e-3, 1e5),
    "lossy": fs.Network(1e-3, 1e5, loss=0.2),
    "sites": fs.Network(
        2e-3,
        2e5,
        sites=(fs.Site("a", uplink=1e5, downlink=3e5), fs.Site("b", inside="lan-1g")),
        trace=(fs.LinkChange(0.05, 0.5, 2.0), fs.LinkChange(0.1, 0.2, site="a")),
        loss=0.1,
    ),
}


@pytest.mark.parametrize(
    ("strategy", "links"),
    [
        (fs.Hogwild(), "home"),
        (fs.GoSGD(0.5), "lossy"),
        (fs.ADPSGD(), "lossy"),
        (fs.AsyncSGD(), "sites"),
        (fs.DPSGD(), "sites"),
        (fs.AsyncSGD(codec=fs.TopK(0.1)), "home"),
        (fs.AsyncSGD(codec=fs.TopK(0.1)), "sites"),
        (fs.EAWild(2, codec=fs.TopK(0.1)), "lossy"),
        (fs.AllToAllSGD(), "home"),
        (fs.AllToAllSGD(codec=fs.TopK(0.1)), "lossy"),
        (fs.AllToAllSGD(2), "sites"),
    ],
    ids=repr,
)
def test_what_is_under_way_on_links_that_others_use_goes_on(strategy, links, tmp_path):
    spec = spec_of(
        strategy,
        compute=fs.Compute(0.01, jitter=0.5, slow={2: 3.0}),
        network=SHARED_LINKS[links],
        look_every="0.03 seconds",
        measure=("staleness", "time"),
        steps=4,
    )
    whole = outcome(fs.run(spec, checkpoint=tmp_path / "all", every="1 step", keep=1000))
    first = only(checkpoints(tmp_path / "all")[0], tmp_path / "one")
    assert outcome(fs.resume(first, spec=spec)) == whole


def test_a_run_that_is_stopped_again_and_again_is_never_stopped(tmp_path):
    """A checkpoint of a run that goes on from one, while workers are told what they heard."""
    spec = spec_of(
        fs.EAWild(2),
        compute=fs.Compute(0.01, jitter=0.5, slow={1: 9.0}),
        network=fs.Network.preset("wan-100m"),
        look_every="0.05 seconds",
    )
    whole = outcome(fs.run(spec, checkpoint=tmp_path / "0", every="1 step", keep=1000))
    for life in range(3):
        first = only(checkpoints(tmp_path / str(life))[0], tmp_path / str(life + 1))
        about = json.loads((checkpoints(first)[0] / "part-0.json").read_text())["about"]
        assert about["every"] == "1 step"
        assert outcome(fs.resume(first, spec=spec)) == whole
        assert len(checkpoints(first)) > 1


@dataclasses.dataclass
class Streams:
    """Of a worker: what it has not sent yet, by call."""

    exchanged: fs.Memory
    sent: fs.Memory
    added: fs.Memory
    centre: fs.SharedTensor = fs.handle()


@dataclasses.dataclass(frozen=True)
class ThroughCodecs(fs.Strategy[Streams]):
    """Changes go to a neighbour, around the circle and to a centre, through a codec."""

    name: ClassVar[str] = "through_codecs"
    codec: fs.Codec

    def init(self, worker):
        memories = [self.codec.memory(worker.flat.state) for _ in range(3)]
        return Streams(*memories, centre=worker.comm.shared("centre", worker.flat.state))

    def after_step(self, worker, state):
        comm, change, codec = worker.comm, 0.1 * worker.flat.gradients, self.codec
        whole = torch.zeros_like(worker.flat.state)
        whole[: change.numel()] = change
        state.centre.add(whole, -1, codec=codec, memory=state.added)
        heard = comm.exchange(whole, comm.rank ^ 1, codec=codec, memory=state.exchanged)
        comm.send(whole, (comm.rank + 1) % comm.size, codec=codec, memory=state.sent)
        passed = comm.recv(torch.empty_like(whole), (comm.rank - 1) % comm.size, codec=codec)
        worker.flat.state.sub_(heard + passed).lerp_(state.centre.read(), 0.1)

    def finish(self, worker, state):
        worker.comm.all_reduce(worker.flat.state, op="mean")


@pytest.mark.parametrize("codec", [fs.Threshold(0.01), fs.TopK(0.1)], ids=str)
def test_messages_of_codecs_are_told_again(codec, tmp_path):
    """Of a length that the receiver knows, and of one that it does not."""
    spec = spec_of(
        ThroughCodecs(codec),
        compute=fs.Compute(0.01, jitter=0.5, slow={2: 5.0}),
        network=fs.Network.preset("wan-100m"),
    )
    whole = outcome(fs.run(spec, checkpoint=tmp_path / "all", every="1 step", keep=1000))
    assert outcome(fs.run(spec)) == whole
    for each in checkpoints(tmp_path / "all")[1::6]:
        assert outcome(fs.resume(only(each, tmp_path / "one"), spec=spec)) == whole


@pytest.mark.parametrize(
    "budget", [{"steps": 9}, {"seconds": 0.2}, {"bytes": 150_000}, {"target": 0.42}], ids=repr
)
@pytest.mark.parametrize("strategy", [fs.LocalSGD(3), fs.EAWild(2), fs.EASGD(2)], ids=repr)
def test_budgets_and_targets_go_on(strategy, budget, tmp_path):
    spec = spec_of(strategy, compute=fs.Compute(0.01, jitter=0.5), look_every="2 steps", **budget)
    whole = outcome(fs.run(spec, checkpoint=tmp_path / "all", every="1 step", keep=1000))
    found = checkpoints(tmp_path / "all")
    for each in (found[0], found[len(found) // 2], found[-1]):
        assert outcome(fs.resume(only(each, tmp_path / "one"), spec=spec)) == whole


def test_a_stream_goes_on(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(X[:30], Y[:30], strict=True))

    streamed = dataclasses.replace(task(), train=Stream())
    spec = fs.RunSpec(streamed, fs.LocalSGD(2), 3, epochs=2)
    whole = outcome(fs.run(spec, checkpoint=tmp_path / "all", every="1 step", keep=1000))
    for each in checkpoints(tmp_path / "all"):
        assert outcome(fs.resume(only(each, tmp_path / "one"), spec=spec)) == whole


def test_a_spec_that_can_be_written_is_all_that_a_folder_needs(tmp_path):
    spec = fs.RunSpec("digits-mlp", fs.LocalSGD(4), workers=2, epochs=1)
    whole = outcome(fs.run(spec, checkpoint=tmp_path, every="20 steps"))
    assert outcome(fs.resume(tmp_path)) == whole
    with pytest.raises(fs.CheckpointError, match=r"is of another run.*seed=0.*got.*seed=1"):
        fs.resume(tmp_path, spec=spec.replace(seed=1))


def test_a_folder_with_a_run_is_not_begun_anew(tmp_path):
    spec = spec_of(fs.SyncSGD())
    fs.run(spec, checkpoint=tmp_path, every="1 step")
    with pytest.raises(fs.CheckpointError, match=r"without a run.*fs\.resume goes on with it"):
        fs.run(spec, checkpoint=tmp_path)
    with pytest.raises(fs.CheckpointError, match=r"does not hold the run's spec.*spec=…"):
        fs.resume(tmp_path)


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({"every": "often"}, "'every' must be an interval .*'often'"),
        ({"every": 0}, "'every' must be an interval"),
        ({"keep": 0}, r"'keep' must be at least 1 \(got 0\)"),
        ({"checkpoint": None, "keep": 3}, r"'checkpoint' must be given where 'every' or 'keep' is"),
    ],
    ids=repr,
)
def test_what_is_wrong_is_said_before_the_run(how, complaint, tmp_path):
    with pytest.raises(fs.InvalidField, match=complaint):
        fs.run(spec_of(fs.SyncSGD()), **{"checkpoint": tmp_path} | how)


def test_a_folder_that_takes_no_files_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(fs.CheckpointError, match=r"must be a folder that takes files.*file"):
        fs.run(spec_of(fs.SyncSGD()), checkpoint=tmp_path / "file" / "runs")


def test_the_last_ones_are_kept(tmp_path):
    fs.run(spec_of(fs.SyncSGD(), steps=30), checkpoint=tmp_path, every="3 steps", keep=2)
    assert len(checkpoints(tmp_path)) == 2
    assert not list(tmp_path.rglob(".part*"))


# --- what a folder may hold besides ---------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with one checkpoint, and its run."""
    folder = tmp_path_factory.mktemp("kept")
    spec = spec_of(fs.SyncSGD())
    result = fs.run(spec, checkpoint=folder, every="4 steps", keep=1)
    return folder, spec, outcome(result)


def copied(kept, tmp_path) -> tuple[Path, fs.RunSpec]:
    folder, spec, _ = kept
    return only(checkpoints(folder)[-1], tmp_path / "copy"), spec


def test_what_is_not_whole_is_passed_over(kept, tmp_path):
    folder, spec = copied(kept, tmp_path)
    (whole,) = checkpoints(folder)
    later = folder / "0001-009999-step-1"
    shutil.copytree(whole, later)
    (later / "part-0.json").rename(later / ".part-0.json")  # killed before the last name
    assert outcome(fs.resume(folder, spec=spec)) == kept[2]


@pytest.mark.parametrize(
    ("name", "spoil", "complaint"),
    [
        ("part-0.safetensors", lambda b: b[:-7], "is damaged: its checksum is another"),
        ("part-0.safetensors", lambda b: b[:-9] + b"?" + b[-8:], "is damaged: its checksum"),
        ("part-0.json", lambda b: b[: len(b) // 2], "is damaged, or no part"),
        ("part-0.json", lambda b: b.replace(b'"is_over"', b'"is_ovre"'), "is damaged: its"),
        ("part-0.json", lambda b: b'{"kind": "cake", "format": 1}', "its kind is 'cake'"),
        ("part-0.json", lambda b: b.replace(b'"format": 1', b'"format": 2'), "has format 2"),
        ("part-0.json", lambda b: b"[]", "no part of a checkpoint"),
    ],
    ids=["cut", "changed", "half", "values", "foreign", "newer", "no-dict"],
)
def test_damaged_foreign_and_newer_ones_are_refused_by_name(name, spoil, complaint, kept, tmp_path):
    folder, spec = copied(kept, tmp_path)
    path = checkpoints(folder)[0] / name
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(fs.CheckpointError, match=complaint) as caught:
        fs.resume(folder, spec=spec)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(fs.CheckpointError, match="holds no whole checkpoint"):
        fs.resume(tmp_path / "nothing")


def test_another_model_is_refused(kept, tmp_path):
    folder, spec = copied(kept, tmp_path)
    other = spec.replace(task=task(model=net))
    with pytest.raises(fs.CheckpointError, match=r"rank \d: the checkpoint is of a model with"):
        fs.resume(folder, spec=other)


def test_a_disk_that_is_full_is_said(tmp_path):
    """What cannot be written ends the run with the file's name; nothing half-written counts."""
    spec = spec_of(fs.SyncSGD(), steps=40)
    complaint = r"part-0.safetensors' cannot be written"
    with files_end_at(2000), pytest.raises(fs.CheckpointError, match=complaint):
        fs.run(spec, checkpoint=tmp_path, every="1 step")
    with pytest.raises(fs.CheckpointError, match="holds no whole checkpoint"):
        fs.resume(tmp_path, spec=spec)


def test_what_a_life_has_left_unfinished_is_not_taken_for_the_next_ones(kept, tmp_path):
    folder, spec = copied(kept, tmp_path)
    begun = folder / "0002-000001-step-5"
    begun.mkdir()
    (begun / "part-1.safetensors").touch()
    assert outcome(fs.resume(folder, spec=spec)) == kept[2]
    assert not (begun / "part-1.safetensors").exists()


# --- another number of workers --------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("strategy", [fs.SyncSGD(), fs.LocalSGD(3), fs.DiLoCo(3)], ids=repr)
def test_workers_that_meet_go_on_with_another_number(strategy, workers, tmp_path):
    spec = spec_of(strategy, epochs=4)
    fs.run(spec, checkpoint=tmp_path / "all", every="1 epoch", keep=9)
    first = only(checkpoints(tmp_path / "all")[0], tmp_path / "one")
    with pytest.warns(
        UserWarning, match=f"with {workers} workers in place of 4.*dropped: "
    ) as said:
        result = fs.resume(first, workers, spec=spec)
    assert result.metrics["workers"] == workers
    assert result.metrics["steps"] == 64 // 4 // workers * 4
    assert [look.epoch for look in result.history] == [2, 3, 4]
    drops_optimizers = "optimizers' states" in str(said[0].message)
    assert drops_optimizers == (not isinstance(strategy, fs.SyncSGD))  # there all had the same


def test_the_model_that_stood_for_the_run_is_where_it_goes_on(tmp_path):
    """With a learning rate of nothing from there on, it stays as it was."""
    still = fs.StepDecay(at=(0.5,), gamma=1e-300)
    spec = fs.RunSpec(task(model=net), fs.LocalSGD(3), 4, epochs=4, schedule=still)
    before = fs.run(spec, checkpoint=tmp_path, every="3 epochs").model.state_dict()
    with pytest.warns(UserWarning, match="dropped"):
        after = fs.resume(tmp_path, 2, spec=spec).model.state_dict()
    for name, value in before.items():
        assert torch.allclose(after[name], value, atol=1e-12)


def test_a_later_life_with_fewer_steps_is_the_one_that_goes_on(tmp_path):
    spec = spec_of(fs.LocalSGD(3), epochs=4)
    fs.run(spec, checkpoint=tmp_path / "all", every="1 epoch", keep=9)
    folder = only(checkpoints(tmp_path / "all")[0], tmp_path / "one")
    with pytest.warns(UserWarning, match="8 workers in place of 4"):
        whole = fs.resume(folder, 8, spec=spec)
    assert checkpoints(folder)[-1].name.startswith("0002-")
    assert outcome(fs.resume(folder, 8, spec=spec)) == outcome(whole)


@pytest.mark.parametrize("strategy", [fs.EASGD(2), fs.EAWild(2), fs.Independent()], ids=repr)
def test_others_are_refused_in_one_line(strategy, tmp_path):
    spec = spec_of(strategy)
    fs.run(spec, checkpoint=tmp_path, every="2 steps")
    with pytest.raises(fs.CheckpointError, match=r"of 4 workers and cannot go on with 2: ") as said:
        fs.resume(tmp_path, 2, spec=spec)
    assert "\n" not in str(said.value)


# --- a loop of one's own --------------------------------------------------------------------------


def own_loop(comm, strategy, folder, save=(), stop=None, epochs=3):
    model = Dropping(0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    worker = fs.Worker(comm, model, optimizer, strategy, schedule=fs.Cosine())
    extras = worker.resume(folder)
    for batch in worker.batches((X, Y), 4, epochs=epochs):
        value = worker.adjust_loss(loss(model, batch), batch)
        value.backward()
        worker.step(value, accuracy=0.5)
        if worker.steps in save:
            worker.checkpoint(folder, {"after": worker.steps, "mean": X.mean()})
        if worker.steps == stop:
            worker.finish()
            return extras
    counted = worker.steps, worker.epoch, worker.samples, worker.total_steps
    state = worker.finish().state_dict()
    return (
        extras,
        counted,
        comm.now(),
        comm.meter.saved(),
        {k: v.tolist() for k, v in state.items()},
    )


SOME = [
    fs.SyncSGD(),
    fs.SyncSGD(codec=fs.PowerSGD(1)),
    fs.NoSync(0.3, period=2, staleness=1),
    fs.PSOPS(3),
    fs.EASGD(2),
    fs.EAWild(2, groups=2),
    fs.AsyncSGD(momentum=0.5, staleness_aware=True),
    fs.StaleSync(2),
    fs.GoSGD(0.5),
    fs.ADPSGD(),
    fs.AllToAllSGD(codec=fs.TopK(0.3)),
    fs.SGP(codec=fs.Int8()),
    fs.Codistillation(2, 2, 2),
]


@pytest.mark.parametrize("strategy", SOME, ids=repr)
def test_a_loop_of_ones_own_goes_on(strategy, tmp_path):
    def launched(folder, stop=None, save=(5,)):
        def program(comm):
            return own_loop(comm, strategy, tmp_path / folder, save, stop)

        return fs.launch(program, 4, compute=fs.Compute(0.01, jitter=0.5), seed=3)

    whole = launched("whole")
    assert launched("parts", stop=5) == [None] * 4
    for before, (extras, *after) in zip(whole, launched("parts"), strict=True):
        assert before[0] is None and list(before[1:]) == after
        assert extras["after"] == 5 and torch.equal(extras["mean"], X.mean())


def test_loops_by_epoch_go_on_where_they_were(tmp_path):
    """A checkpoint after an epoch's loop is not in it; one in the last step of the loop is."""

    def program(comm, inside, lives):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        worker = fs.Worker(comm, model, optimizer, fs.SyncSGD())
        worker.resume(tmp_path / str(inside))
        seen = []
        for epoch in range(worker.epoch, 3):
            for x, y in worker.batches((X, Y), 16):
                seen.append(y.tolist())
                loss(model, (x, y)).backward()
                worker.step(0.0)
                if worker.steps == inside:
                    worker.checkpoint(tmp_path / str(inside))
                    if lives == 1:
                        return seen, worker._writer.wait()
            if not inside and epoch == 1:
                worker.checkpoint(tmp_path / str(inside))
                if lives == 1:
                    return seen, worker._writer.wait()
        worker.finish()
        return seen, worker.steps

    for inside in (3, 4, 0):
        (first, _), _ = fs.launch(lambda comm: program(comm, inside, 1), 2)  # noqa: B023
        (then, steps), _ = fs.launch(lambda comm: program(comm, inside, 2), 2)  # noqa: B023
        shutil.rmtree(tmp_path / str(inside))
        (whole, _), _ = fs.launch(lambda comm: program(comm, inside, 2), 2)  # noqa: B023
        assert first + then == whole and steps == 6


def test_two_workers_of_a_comm_have_two_folders(tmp_path):
    def program(comm):
        models = net(), net()
        made = [
            fs.Worker(comm, model, torch.optim.SGD(model.parameters(), 0.1), fs.EASGD(2))
            for model in models
        ]
        for worker, folder in zip(made, folders, strict=True):
            worker.checkpoint(tmp_path / folder)
        for worker in made:
            worker.finish()

    folders = "a", "b"
    fs.launch(program, 2)
    folders = "c", "c"
    with pytest.raises(fs.CheckpointError, match=r"rank \d: .*c' holds .* of another Worker"):
        fs.launch(program, 2)


def test_a_loop_and_a_run_are_not_taken_for_each_other(kept, tmp_path):
    def program(comm, goes_on):
        model = net()
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), 0.1), fs.SyncSGD())
        if goes_on:
            worker.resume(folder)
        worker.checkpoint(tmp_path / "own")
        worker.finish()

    folder, spec = copied(kept, tmp_path)
    with pytest.raises(fs.CheckpointError, match="is of fs.run: fs.resume goes on with it"):
        fs.launch(lambda comm: program(comm, True), 2)
    fs.launch(lambda comm: program(comm, False), 2)
    with pytest.raises(fs.CheckpointError, match="a loop of one's own: worker.resume goes on"):
        fs.resume(tmp_path / "own", spec=spec)


def test_another_run_of_a_task_of_a_script_is_refused(kept, tmp_path):
    folder, spec = copied(kept, tmp_path)
    with pytest.raises(fs.CheckpointError, match=r"of another run, with seed 0 \(got 7\)"):
        fs.resume(folder, spec=spec.replace(seed=7))


def test_the_slow_are_saved_when_the_fast_have_ended(tmp_path):
    """Checkpoints go on to the end, each in a folder of its own, also while batches grow."""
    slow = fs.Compute(0.01, slow={1: 8.0})
    growing = fs.BatchGrowth(2, (0.5,), 2)
    spec = spec_of(fs.EAWild(2), workers=2, compute=slow, batch_size=growing, epochs=4)
    whole = outcome(fs.run(spec, checkpoint=tmp_path / "all", every="1 epoch", keep=99))
    found = checkpoints(tmp_path / "all")
    assert len(found) == 3
    assert outcome(fs.resume(only(found[-1], tmp_path / "one"), spec=spec)) == whole


def test_a_checkpoint_is_taken_after_a_step(tmp_path):
    def program(comm):
        model = net()
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), 0.1), fs.SyncSGD())
        for _ in worker.batches((X, Y), 4):
            worker.checkpoint(tmp_path)

    complaint = r"rank \d: a checkpoint is taken right after worker.step \(got one with 1 batch"
    with pytest.raises(fs.CheckpointError, match=complaint):
        fs.launch(program, 2)


def test_extras_must_be_data(tmp_path):
    def program(comm):
        model = net()
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), 0.1), fs.SyncSGD())
        worker.checkpoint(tmp_path, {"mine": object()})

    with pytest.raises(fs.FlockstepError, match=r"'state.extras.mine' must be data .*got a object"):
        fs.launch(program, 2)


# --- processes ------------------------------------------------------------------------------------

processes = pytest.mark.cluster


@processes
def test_fifty_random_kills_change_nothing(tmp_path, local):
    """A run that is killed at random moments, also while it writes, and goes on each time."""
    spec = spec_of(fs.EAWild(2), steps=60, compute=fs.Compute(0.01, jitter=0.5))
    whole = outcome(fs.run(spec))
    draw = random.Random(0)

    def life(comm):
        kill = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        kill.daemon = True
        kill.start()
        if checkpoints(tmp_path) and any(tmp_path.glob("*-step-*/part-0.json")):
            result = fs.resume(tmp_path, spec=spec)
        else:
            result = fs.run(spec, checkpoint=tmp_path, every="1 step")
        kill.cancel()
        return outcome(result)

    kills = finished = 0
    while kills < 50:
        seconds = draw.uniform(0.0, 0.4)
        try:
            assert fs.launch(life, 1, local) == [whole]
            finished += 1
            shutil.rmtree(tmp_path)  # and begin again
        except fs.WorkerLost:
            kills += 1
    seconds = 600
    assert fs.launch(life, 1, local) == [whole]


@processes
@pytest.mark.parametrize(
    "strategy", [fs.SyncSGD(), fs.LocalSGD(3, codec=fs.Int8()), fs.EASGD(2, mode="sync")], ids=repr
)
def test_processes_that_meet_go_on_to_the_bit(strategy, tmp_path, local):
    spec = spec_of(strategy, dropout=0.2, workers=2, backend="local")
    whole = fs.run(spec, backend=local)
    fs.run(spec, backend=local, checkpoint=tmp_path / "all", every="3 steps", keep=1000)
    one = only(checkpoints(tmp_path / "all")[0], tmp_path / "one")
    again = fs.resume(one, spec=spec, backend=local)
    assert outcome(again)[2:] == outcome(whole)[2:]
    assert again.metrics["bytes_sent"] == whole.metrics["bytes_sent"]
    assert [look.loss for look in again.history] == [look.loss for look in whole.history]
    assert again.metrics["seconds"] > 0


@processes
@pytest.mark.parametrize("strategy", [fs.EAWild(2), fs.Hogwild(), fs.GoSGD(0.5)], ids=repr)
def test_processes_that_never_wait_go_on_from_what_was_saved(strategy, tmp_path, local):
    """Replicas and shared tensors are those of the checkpoint."""

    def program(comm, is_first):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        worker = fs.Worker(comm, model, optimizer, strategy)
        if is_first:
            for batch in worker.batches((X, Y), 4):
                loss(model, batch).backward()
                worker.step(0.0)
            comm.barrier()
            worker.checkpoint(tmp_path)
        else:
            assert worker.resume(tmp_path) == {}
        comm.barrier()
        values = [
            tensor.read().tolist() for tensor in fs.strategies.shared_tensors(worker.state).values()
        ]
        told = worker.flat.state.tolist(), values, worker.steps, optimizer.state_dict()
        comm.barrier()
        worker.finish()
        return told

    before = fs.launch(lambda comm: program(comm, True), 3, local)
    after = fs.launch(lambda comm: program(comm, False), 3, local)
    for one, other in zip(before, after, strict=True):
        assert one[:3] == other[:3]
        for key, state in one[3]["state"].items():
            assert torch.equal(state["momentum_buffer"], other[3]["state"][key]["momentum_buffer"])


@processes
@pytest.mark.parametrize("every", ["4 steps", "1 epoch", "0.002 seconds"])
@pytest.mark.parametrize("strategy", [fs.LocalSGD(3), fs.EAWild(2)], ids=repr)
def test_processes_take_checkpoints_in_time(strategy, every, tmp_path, local):
    spec = spec_of(strategy, workers=2, backend="local", epochs=6)
    fs.run(spec, backend=local, checkpoint=tmp_path, every=every)
    assert checkpoints(tmp_path)
    result = fs.resume(tmp_path, spec=spec, backend=local)
    assert result.metrics["steps"] == 48
    assert [look.epoch for look in result.history][-1] == 6


@processes
def test_another_number_of_processes(tmp_path, local):
    spec = spec_of(fs.LocalSGD(3), workers=4, backend="local", epochs=4)
    fs.run(spec, backend=local, checkpoint=tmp_path, every="1 epoch")
    with pytest.warns(UserWarning, match="2 workers in place of 4"):
        result = fs.resume(tmp_path, 2, spec=spec, backend=local)
    assert result.metrics["workers"] == 2
