"""Records: whole or not there, never overwritten, and honest about damage."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import shutil

import pytest
from tests.support.full_disk import files_end_at
from tests.support.outcomes import made_up_record

import flockstep as fs
from flockstep.study.records import (
    SCHEMA,
    checksum_of,
    drop_unfinished,
    read_record,
    read_records,
    require_same_run,
    write_record,
)

SPEC = fs.RunSpec("digits-mlp", fs.LocalSGD(8), workers=2, epochs=1, seed=4)


def record(score=0.9, spec=SPEC, **fields):
    made = made_up_record(spec, spec.id, score)
    return dataclasses.replace(made, spec=json.loads(spec.to_json()), **fields)


def failed(spec=SPEC):
    told = {"type": "NonFiniteLoss", "message": "rank 1: …", "traceback": "…"}
    return dataclasses.replace(
        record(spec=spec), status="failed", metrics={}, history=[], error=told
    )


def test_a_record_is_named_by_its_spec_and_reads_back(tmp_path):
    path = write_record(tmp_path, record())
    assert path.name == f"{SPEC.id}.json"
    again = read_record(path)
    assert json.dumps(dataclasses.asdict(again)) == json.dumps(dataclasses.asdict(record()))
    assert fs.RunSpec.from_json(json.dumps(again.spec)) == SPEC
    body = json.loads(path.read_text())
    assert body["schema"] == SCHEMA
    assert {"spec", "seed", "versions", "commit", "host", "history", "metrics"} <= set(body)


def test_a_finished_record_is_never_overwritten(tmp_path):
    path = write_record(tmp_path, record(0.9))
    before = path.read_bytes()
    write_record(tmp_path, record(0.1))
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_failure_stands_beside_and_goes_when_the_run_is_done(tmp_path):
    write_record(tmp_path, failed())
    assert not read_records(tmp_path)[SPEC.id].is_done
    write_record(tmp_path, failed())  # tried again, failed again
    write_record(tmp_path, record())
    assert [each.name for each in tmp_path.iterdir()] == [f"{SPEC.id}.json"]


def test_folders_merge_by_copying_and_a_failure_hides_no_result(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    other = SPEC.replace(seed=5)
    write_record(here, record())
    write_record(there, failed())
    write_record(there, record(spec=other))
    for path in there.iterdir():
        shutil.copy(path, here)
    found = read_records(here)
    assert {name: each.is_done for name, each in found.items()} == {SPEC.id: True, other.id: True}


def test_infinite_figures_become_none(tmp_path):
    made = record(metrics={"test_loss": float("nan"), "test_accuracy": 0.1})
    again = read_record(write_record(tmp_path, made))
    assert again.metrics == {"test_loss": None, "test_accuracy": 0.1}


def edited(body):
    body["metrics"]["test_accuracy"] = 0.99


def of_another_schema(body):
    body["schema"] = 99
    body["checksum"] = checksum_of(body)


def without_a_schema(body):
    del body["schema"]


def with_a_field_more(body):
    body["extra"] = 1
    body["checksum"] = checksum_of(body)


def of_another_run(body):
    body["id"] = "0" * 16
    body["checksum"] = checksum_of(body)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (edited, "was edited or damaged: its field 'checksum' does not fit"),
        (of_another_schema, f"has schema 99; this version reads {SCHEMA}"),
        (without_a_schema, "is no record: it has no field 'schema'"),
        (with_a_field_more, "has other fields than a record: 'extra'"),
        (of_another_run, "holds another run: its field 'id' says '0000000000000000.json'"),
    ],
)
def test_what_is_wrong_with_a_record_is_told_with_its_file(harm, message, tmp_path):
    path = write_record(tmp_path, record())
    body = json.loads(path.read_text())
    harm(body)
    path.write_text(json.dumps(body))
    with pytest.raises(fs.RecordError, match=message) as caught:
        fs.load_records(tmp_path)
    assert str(path) in str(caught.value)


def test_a_truncated_record_is_told_with_its_file(tmp_path):
    path = write_record(tmp_path, record())
    path.write_text(path.read_text()[:-100])
    with pytest.raises(fs.RecordError, match=f"'{path}' is truncated or no record"):
        read_records(tmp_path)


def test_a_spec_under_another_id_is_found(tmp_path):
    other = SPEC.replace(lr=0.7)
    made = dataclasses.replace(record(), spec=json.loads(other.to_json()))
    with pytest.raises(fs.RecordError, match="its field 'spec' is of another run"):
        require_same_run(made, SPEC)
    require_same_run(record(), SPEC)


def test_a_full_disk_leaves_nothing_and_is_told(tmp_path):
    write_record(tmp_path, record())
    other = SPEC.replace(seed=5)
    with (
        files_end_at(100),
        pytest.raises(fs.RecordError, match="cannot be written: File too large"),
    ):
        write_record(tmp_path, record(spec=other))
    assert [each.name for each in tmp_path.iterdir()] == [f"{SPEC.id}.json"]


def test_what_a_killed_process_left_is_dropped(tmp_path):
    (tmp_path / f"{SPEC.id}.json.{os.getpid()}.part").write_text("{")
    write_record(tmp_path, record())
    drop_unfinished(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [f"{SPEC.id}.json"]


def test_records_are_a_table_in_one_line(tmp_path):
    write_record(tmp_path, record())
    write_record(tmp_path, record(0.8, SPEC.replace(seed=5, strategy="sync_sgd")))
    write_record(tmp_path, failed(SPEC.replace(seed=6)))
    table = fs.load_records(tmp_path)
    assert len(table) == 3
    means = table.groupby("strategy")["test_accuracy"].agg(["count", "mean"])
    assert means.loc["local_sgd(period=8)", "mean"] == pytest.approx(0.9)
    assert set(table["status"]) == {"done", "failed"}
    assert table.loc[table["seed"] == 6, "error"].item() == "NonFiniteLoss: rank 1: …"
    assert table.loc[table["seed"] == 4, "history"].item()[-1]["accuracy"] == pytest.approx(0.9)
    with pytest.raises(fs.RecordError, match="is no folder"):
        fs.load_records(tmp_path / "missing")


def test_packed_records_read_as_single_ones(tmp_path):
    runs = [SPEC.replace(seed=seed) for seed in range(4)]
    for spec in runs[:3]:
        write_record(tmp_path, record(0.9 + spec.seed / 100, spec))
    write_record(tmp_path, failed(runs[3]))
    before = read_records(tmp_path)

    path = fs.pack_records(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert read_records(tmp_path) == before
    assert read_records(tmp_path, [runs[1].id]) == {runs[1].id: before[runs[1].id]}
    assert len(fs.load_records(tmp_path)) == 4

    packed = path.read_bytes()
    assert fs.pack_records(tmp_path).read_bytes() == packed


def test_a_study_goes_on_from_packed_records(tmp_path):
    first, second = SPEC, SPEC.replace(seed=5)
    write_record(tmp_path, failed(first))
    fs.pack_records(tmp_path)
    write_record(tmp_path, record(0.8, first))
    write_record(tmp_path, record(0.7, second))
    assert {each.status for each in read_records(tmp_path).values()} == {"done"}
    fs.pack_records(tmp_path)
    scores = {name: each.metrics["test_accuracy"] for name, each in read_records(tmp_path).items()}
    assert scores == {first.id: 0.8, second.id: 0.7}


def test_damage_of_packed_records_is_told_with_the_file_and_the_line(tmp_path):
    write_record(tmp_path, record())
    path = fs.pack_records(tmp_path)
    whole = path.read_bytes()

    path.write_bytes(whole[:-20])
    with pytest.raises(fs.RecordError, match=r"records\.jsonl\.xz' is truncated or damaged"):
        read_records(tmp_path)

    line = lzma.decompress(whole).decode().replace('"seed": 4', '"seed": 5')
    path.write_bytes(lzma.compress(line.encode()))
    with pytest.raises(fs.RecordError, match="line 1, was edited or damaged"):
        read_records(tmp_path)


def test_a_folder_without_records_cannot_be_packed(tmp_path):
    with pytest.raises(fs.RecordError, match="holds no records"):
        fs.pack_records(tmp_path)
