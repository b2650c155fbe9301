"""Traces are files that viewers of Chrome's trace events open."""

from __future__ import annotations

import gzip
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import flockstep as fs
from flockstep.comm import EVENT_KINDS, Trace, events_per_worker
from flockstep.training.trace_file import require_trace_path, write_trace

MOST_BYTES = 100e6


def traced(workers, steps=3, limit=None, **options):
    """The tracks of workers that compute, average and hand something round."""

    def program(comm):
        comm.meter.trace = Trace(limit or events_per_worker(comm.size))
        tensor = torch.zeros(8)
        for _ in range(steps):
            comm.elapse()
            comm.all_reduce(tensor)
            comm.send(tensor, (comm.rank + 1) % comm.size)
            comm.recv(tensor, (comm.rank - 1) % comm.size)
        return comm.meter.trace.table()

    return fs.launch(program, workers, **options)


def check_format(trace):
    """What the description of the event format demands of the events that are used here, and what
    viewers need: events of a thread in order, and none that overlap.
    """
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    free: dict[int, float] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        match event["ph"]:
            case "M":
                values = {"process_name": "name", "thread_name": "name"}
                assert set(event["args"]) == {values.get(event["name"], "sort_index")}
            case "i":
                assert event["s"] in ("g", "p", "t")
            case "X":
                assert event["dur"] >= 0
                assert event["cat"] in ("computing", "waiting", "sending")
                assert event["args"]["step"] >= 0
                assert ("bytes" in event["args"]) == (event["cat"] != "computing")
                assert event["ts"] >= free.get(event["tid"], 0) - 1e-3  # a nanosecond
                free[event["tid"]] = event["ts"] + event["dur"]
            case _:
                raise AssertionError(event)
    return trace["traceEvents"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_a_file_of_events(tmp_path, name):
    compute = fs.Compute(0.01, slow={2: 2.0}, jitter=0.3)
    write_trace(tmp_path / name, traced(3, compute=compute), title="three workers")
    opened = gzip.open if name.endswith(".gz") else Path.open
    with opened(tmp_path / name) as file:
        trace = json.load(file)
    assert [path.name for path in tmp_path.iterdir()] == [name]

    events = check_format(trace)
    assert trace["otherData"] == {"title": "three workers", "workers": 3, "clock": "virtual"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}

    drawn = [event for event in events if event["ph"] == "X"]
    for rank in range(3):
        own = [event for event in drawn if event["tid"] == rank]
        assert [e["args"]["step"] for e in own if e["cat"] == "computing"] == [1, 2, 3]
        sends = [e["args"] for e in own if (e["name"], e["cat"]) == ("send", "sending")]
        assert sends == [{"step": k, "bytes": 32, "peer": (rank + 1) % 3} for k in (1, 2, 3)]

    first = next(event for event in drawn if event["name"] == "all_reduce")
    assert (first["tid"], first["cat"]) == (0, "waiting")  # for rank 2, which is slow
    late = next(event for event in drawn if event["tid"] == 2)
    assert first["ts"] + first["dur"] == pytest.approx(late["dur"], abs=2e-3)


def test_the_wall_clock_is_named(local, tmp_path):
    write_trace(tmp_path / "trace.json", traced(2, backend=local))
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_format(trace)
    assert trace["otherData"]["clock"] == "wall"


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_a_run_leaves_its_trace(local, tmp_path, clock):
    path = tmp_path / "trace.json"
    backend = "sim" if clock == "virtual" else local
    result = fs.run("digits-mlp", fs.LocalSGD(4), workers=2, backend=backend, steps=8, trace=path)
    trace = json.loads(path.read_text())
    events = check_format(trace)
    assert trace["otherData"] | {"title": ""} == {"title": "", "workers": 2, "clock": clock}
    for rank in range(2):
        own = [event for event in events if (event["tid"], event["ph"]) == (rank, "X")]
        assert [e["args"]["step"] for e in own if e["cat"] == "computing"][:2] == [4, 8]
    assert sum(e["args"].get("bytes", 0) for e in events) == result.metrics["bytes_sent"]


@dataclass(frozen=True)
class KillsRankZero(fs.LocalSGD):
    def after_step(self, worker, state):
        if (worker.comm.rank, worker.steps) == (0, 6):
            os.kill(os.getpid(), signal.SIGKILL)
        super().after_step(worker, state)


def test_the_trace_of_a_run_that_lost_a_worker_has_every_rank_in_its_place(local, tmp_path):
    path = tmp_path / "trace.json"
    fs.run(
        "digits-mlp",
        KillsRankZero(4),
        workers=3,
        backend=local,
        steps=8,
        on_failure="continue",
        trace=path,
    )
    events = check_format(json.loads(path.read_text()))
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["rank 0 (lost)", "rank 1", "rank 2"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {1, 2}


def test_what_is_too_much_is_counted_and_told(tmp_path):
    tracks = traced(2, steps=10, limit=7)
    whole, _ = traced(2, steps=10)[0]
    for rows, _ in tracks:
        assert len(rows) == 8
        assert EVENT_KINDS[int(rows[-1, 0])] == "dropped"
        assert int(rows[-1, 4]) == len(whole) - 7
    write_trace(tmp_path / "trace.json", tracks)
    events = check_format(json.loads((tmp_path / "trace.json").read_text()))
    told = [event for event in events if event["ph"] == "i"]
    assert [event["tid"] for event in told] == [0, 1]
    assert told[0]["name"] == f"{len(whole) - 7} later events were dropped"


def test_a_lost_worker_has_an_empty_track(tmp_path):
    first, _ = traced(2)
    write_trace(tmp_path / "trace.json", [first, None])
    events = check_format(json.loads((tmp_path / "trace.json").read_text()))
    assert "rank 1 (lost)" in [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0}


def test_names_are_quoted(tmp_path):
    def program(comm):
        comm.meter.trace = Trace(10)
        comm.shared('a "quoted"\nname', torch.zeros(1)).read()
        return comm.meter.trace.table()

    write_trace(tmp_path / "trace.json", fs.launch(program, 1), title='"')
    events = check_format(json.loads((tmp_path / "trace.json").read_text()))
    assert 'read a "quoted"\nname' in [event["name"] for event in events]


def test_a_trace_of_1024_workers_can_be_loaded(tmp_path):
    workers, path = 1024, tmp_path / "trace.json"
    write_trace(path, traced(workers, steps=5))
    events = check_format(json.loads(path.read_text()))
    drawn = [event["tid"] for event in events if event["ph"] == "X"]
    assert set(drawn) == set(range(workers))

    most = path.stat().st_size / len(drawn) * events_per_worker(workers) * workers
    assert most < MOST_BYTES  # however long the run


@dataclass(frozen=True)
class NeverBegins(fs.LocalSGD):
    def init(self, worker):
        raise AssertionError("the run has begun")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux has a /proc")
def test_a_folder_that_takes_no_files_is_found_before_the_run_begins():
    rule = r"'trace' must be a file that can be written \(got '/proc/x.json': "
    with pytest.raises(ValueError, match=rule) as error:
        fs.run("digits-mlp", NeverBegins(4), workers=2, steps=8, trace="/proc/x.json")
    assert "\n" not in str(error.value)


def test_asking_for_a_place_leaves_it_as_it_was(tmp_path):
    path = tmp_path / "trace.json"
    require_trace_path(path)
    assert not list(tmp_path.iterdir())
    path.write_text("old")
    require_trace_path(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_ordinary_file_is_refused(tmp_path):
    pipe, circle = tmp_path / "pipe", tmp_path / "circle"
    os.mkfifo(pipe)
    circle.symlink_to(circle)
    for path in (pipe, circle):
        with pytest.raises(ValueError, match="'trace' must be an ordinary file"):
            write_trace(path, [])
    assert pipe.is_fifo()
    assert circle.is_symlink()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_and_the_file_that_it_points_to_is_written(tmp_path, is_there):
    far, link = tmp_path / "far", tmp_path / "trace.json"
    far.mkdir()
    link.symlink_to(far / "whole.json")
    if is_there:
        (far / "whole.json").write_text("old")
    write_trace(link, traced(2))
    assert link.is_symlink()
    check_format(json.loads((far / "whole.json").read_text()))
    assert [path.name for path in far.iterdir()] == ["whole.json"]


@pytest.mark.parametrize(
    ("path", "rule"),
    [("none/trace.json", "be a file in a folder that exists"), (".", "be a file, not a folder")],
)
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path, path, rule):
    with pytest.raises(fs.FlockstepError, match=f"'trace' must {rule} \\(got '{tmp_path}") as error:
        write_trace(tmp_path / path, [])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"'trace' must {rule}"):
        require_trace_path(tmp_path / path)
    assert not list(tmp_path.iterdir())
