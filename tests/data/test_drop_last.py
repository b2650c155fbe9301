"""Without the last, smaller batch of a pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import flockstep as fs
from flockstep.data import plan_batches

few = settings(max_examples=50, deadline=None)


def plan(samples, batch_size, passes=1, assignment=None, workers=1, rank=0, **fields):
    return plan_batches(
        torch.arange(samples),
        batch_size,
        passes,
        assignment or fs.Disjoint(),
        None,
        workers=workers,
        rank=rank,
        seed=0,
        **fields,
    )


def sizes_of(made):
    return [batch.samples for batch in made.batches(0, 0)]


@few
@given(
    workers=st.integers(1, 5),
    samples=st.integers(20, 90),
    batch=st.integers(1, 4),
    passes=st.integers(1, 3),
    growth=st.booleans(),
    overlaps=st.booleans(),
)
def test_every_batch_of_every_worker_is_whole_and_all_are_taken_that_can_be(
    workers, samples, batch, passes, growth, overlaps
):
    assignment = fs.FullOverlap() if overlaps else fs.Disjoint()
    size = fs.BatchGrowth(batch, at=(0.6,), factor=2, maximum=4) if growth else batch
    plans = [
        plan(samples, size, passes, assignment, workers, rank, drop_last=True)
        for rank in range(workers)
    ]
    table = plans[0].timetable
    fewest = samples if overlaps else samples // workers
    for number in range(passes):
        starts, sizes = table.cuts(number, 0)
        assert starts[-1] + sizes[-1] <= fewest
        left = fewest - starts[-1] - sizes[-1]
        assert left < (4 if growth else batch)
    wanted = [size for number in range(passes) for size in table.cuts(number, 0)[1]]
    assert all(sizes_of(each) == wanted for each in plans)
    assert table.steps == len(wanted)


@few
@given(workers=st.integers(2, 5), samples=st.integers(20, 90), total=st.integers(5, 20))
def test_a_batch_of_all_workers_together_is_whole_at_every_step(workers, samples, total):
    rows = [
        sizes_of(plan(samples, fs.GlobalBatch(total), 2, None, workers, rank, drop_last=True))
        for rank in range(workers)
    ]
    assert {sum(step) for step in zip(*rows, strict=True)} == {total}
    assert samples // total - 1 <= len(rows[0]) // 2 <= samples // total


@pytest.mark.parametrize(
    ("assignment", "ends"),
    [(fs.Disjoint(), [6, 12, 18]), (fs.MediumCoarse(2), [6, 12, 18, 24, 30, 36])],
)
def test_epochs_end_with_what_is_left_of_the_passes(assignment, ends):
    """On 2 workers in batches of 4, a pass over 25 samples has 6 steps, and over 50 it has 12."""
    table = plan(50, 4, 3, assignment, 2, drop_last=True).timetable
    whole = [step for step in range(1, table.steps + 1) if table.epochs_done(step).is_integer()]
    assert whole == ends
    assert (table.steps, table.epochs) == (ends[-1], len(ends))
    assert [table.step_of(epoch + 1) for epoch in range(len(ends))] == ends


def test_epochs_of_growing_batches_end_with_the_passes():
    growth = fs.BatchGrowth(4, at=(0.5,), factor=2)
    table = plan(50, growth, 4, None, 2, drop_last=True).timetable
    lengths = [len(table.cuts(number, 0)[0]) for number in range(4)]
    assert lengths == [6, 6, 3, 3]
    ends = [step for step in range(1, table.steps + 1) if table.epochs_done(step).is_integer()]
    assert ends == [6, 12, 15, 18]


def test_what_a_pass_leaves_out_comes_in_others():
    seen = [
        set(torch.cat([b.data for b in plan(10, 4, 1, drop_last=True).batches(0, n)]).tolist())
        for n in range(6)
    ]
    assert all(len(each) == 8 for each in seen)
    assert set().union(*seen) == set(range(10))


def test_a_loop_goes_on_with_the_very_next_batch():
    made = plan(50, 4, 3, None, 2, 1, drop_last=True)
    whole = [batch.data.tolist() for batch in made.batches(0, 0)]
    assert [batch.data.tolist() for batch in made.batches(8, 0)] == whole[8:]
    assert made.done_in(8) == (32, 1, 1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(11))


def test_a_stream_ends_with_its_last_whole_batch():
    def sizes(rank, **fields):
        made = plan_batches(
            Stream(), 2, 2, fs.Disjoint(), None, workers=2, rank=rank, seed=0, **fields
        )
        return sizes_of(made)

    assert sizes(0) == [2, 2, 2] * 2
    assert sizes(0, drop_last=True) == sizes(1, drop_last=True) == [2, 2] * 2


@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        (
            torch.arange(10),
            6,
            r"'batch_size' must be at most the samples of a worker, 5, with drop_last=True \(got 6",
        ),
        (
            torch.arange(10),
            fs.BatchGrowth(2, at=(0.5,), factor=4),
            r"'batch_size' must be at most the samples of a worker, 5, with drop_last=True \(got 8",
        ),
        (
            torch.arange(10),
            fs.GlobalBatch(11),
            r"'global_batch' must be at most the number of samples, 10 \(got 11",
        ),
        (
            DataLoader(torch.arange(10), 2),
            None,
            r"'drop_last' must be left out with a DataLoader, which has its own \(got True\)",
        ),
        (Stream(), 6, r"'dataset' must give at least one batch of every worker in every pass"),
    ],
)
def test_a_batch_that_would_always_be_dropped_is_refused(data, batch_size, message):
    with pytest.raises(fs.InvalidField, match=message):
        made = plan_batches(
            data, batch_size, 2, fs.Disjoint(), None, workers=2, rank=0, seed=0, drop_last=True
        )
        list(made.batches(0, 0))


def test_drop_last_is_true_or_false():
    with pytest.raises(fs.InvalidField, match=r"'drop_last' must be True or False \(got 1\)"):
        plan(10, 2, drop_last=1)
    with pytest.raises(fs.InvalidField, match=r"'drop_last' must be true or false \(got 'yes'\)"):
        fs.RunSpec("digits-mlp", "sync_sgd", drop_last="yes")


# ---- In runs


def test_a_run_without_last_batches_has_fewer_steps_and_looks_in_time(tmp_path):
    """1,437 samples on 4 workers in batches of 32 are 12 steps with a batch of 7 or 8, 11
    without.
    """
    settings = {"workers": 4, "epochs": 3, "batch_size": 32}
    plain = fs.run("digits-mlp", fs.SyncSGD(), **settings)
    whole = fs.run("digits-mlp", fs.SyncSGD(), **settings, drop_last=True)
    assert (plain.metrics["steps"], whole.metrics["steps"]) == (36, 33)
    assert whole.metrics["samples"] == 33 * 4 * 32
    assert [row["step"] for row in whole.history] == [11, 22, 33]
    assert [row["epoch"] for row in whole.history] == [1, 2, 3]
    assert whole.config["drop_last"] is True


def test_a_run_that_goes_on_drops_the_same_batches(tmp_path):
    settings = {"workers": 2, "epochs": 2, "batch_size": 100, "drop_last": True}
    whole = fs.run("digits-mlp", fs.SyncSGD(), **settings)

    class Stopped(Exception):
        pass

    def stop(look):
        raise Stopped

    with pytest.raises(Stopped):
        fs.run(
            "digits-mlp",
            fs.SyncSGD(),
            **settings,
            on_look=stop,
            checkpoint=tmp_path / "kept",
            every="3 steps",
        )
    again = fs.resume(tmp_path / "kept")
    assert torch.equal(again.replicas[0], whole.replicas[0])
    assert again.metrics["steps"] == whole.metrics["steps"] == 14


def test_in_a_loop_of_ones_own():
    def program(comm):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = fs.Worker(comm, model, optimizer, fs.SyncSGD())
        data = torch.arange(11.0)[:, None]
        return [len(x) for x in worker.batches(data, 2, epochs=2, drop_last=True)]

    assert fs.launch(program, 2) == [[2, 2] * 2] * 2


def test_the_flag_of_the_command_line_and_its_absence(flockstep, tmp_path):
    def spec(*arguments):
        done = flockstep("run", *arguments, "--print-spec")
        assert done.returncode == 0, done.stderr
        return fs.RunSpec.from_toml(done.stdout)

    assert spec("digits-mlp", "sync_sgd", "--drop-last").drop_last is True
    assert spec("digits-mlp", "sync_sgd").drop_last is False
    path = tmp_path / "spec.toml"
    path.write_text(fs.RunSpec("digits-mlp", "sync_sgd", drop_last=True).to_toml())
    assert spec(str(path)).drop_last is True
    assert spec(str(path), "--no-drop-last").drop_last is False


def test_the_default_is_not_written_and_keeps_the_id():
    bare = fs.RunSpec("digits-mlp", "sync_sgd")
    assert bare.replace(drop_last=False).id == bare.id
    assert bare.replace(drop_last=True).id != bare.id
    assert "drop_last" not in bare.to_toml()
    assert "drop_last = true\n" in bare.replace(drop_last=True).to_toml()
