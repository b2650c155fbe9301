"""Downloads from servers on this machine that are honest, fail and lie; after each, what is in
the folder.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.data.lying_server import (
    Answer,
    Mirror,
    chunked_and_cut,
    endless,
    honest,
    lies,
    redirects,
    stalls,
    status,
    truncates,
    without_length,
    without_ranges,
    wrong_range,
)
from tests.support.full_disk import files_end_at

import flockstep as fs
from flockstep.data.datasets import (
    DATASETS,
    MNIST_PIXELS,
    DataSet,
    load_idx,
)
from flockstep.data.fetching import fetch
from flockstep.data.files import (
    Archive,
    DataFile,
    Files,
    Form,
)
from flockstep.errors import DataError

CONTENT = os.urandom(200_000)
OTHER = os.urandom(200_000)
HALF = 70_000
# Nothing but a stall takes the time, even on a busy machine.
QUICK = {"timeout": 20, "pause_seconds": 0.01}

Serve = Callable[..., Mirror]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ExitStack() as mirrors:

        def start(*answers: Answer, **files: bytes) -> Mirror:
            return mirrors.enter_context(Mirror(files or {"a.bin": CONTENT}, *answers))

        yield start


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def data_set(
    *files: DataFile, archive: Archive | None = None, folders: tuple[str, ...] = ("small",)
) -> DataSet:
    files = files or (DataFile("a.bin", md5(CONTENT), len(CONTENT)),)
    form = Form(lambda _, content: content, folders, files)
    return DataSet("small", lambda: None, (1,), 10, files=Files("small", (form,), archive=archive))


SMALL = data_set()
SIZE_UNKNOWN = data_set(DataFile("a.bin", md5(CONTENT)))


def get(folder: Path, *mirrors: Mirror, dataset: DataSet = SMALL, **options) -> list[Path]:
    return fetch(
        dataset, folder, mirrors=[mirror.url for mirror in mirrors], **{**QUICK, **options}
    )


def failure(folder: Path, *mirrors: Mirror, **options) -> str:
    with pytest.raises(DataError) as raised:
        get(folder, *mirrors, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def state(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def left(folder: Path, content: bytes, name: str = "small/a.bin.part") -> None:
    """What an earlier download left."""
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(content)


WHOLE = {"small/a.bin": CONTENT}
BEGUN = {"small/a.bin.part": CONTENT[:HALF]}
REST = f"bytes={HALF}-"


def test_an_honest_mirrors_file_arrives_and_its_bytes_are_counted(serve, tmp_path):
    mirror, seen = serve(honest), []
    paths = get(tmp_path, mirror, watch=lambda *progress: seen.append(progress))
    assert paths == [tmp_path / "small/a.bin"]
    assert state(tmp_path) == WHOLE
    assert mirror.asked == [("/a.bin", None)]
    assert seen[0] == ("a.bin", 0, 200_000)
    assert seen[-1] == ("a.bin", 200_000, 200_000)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_download_that_ends_early_goes_on_where_it_ended(serve, tmp_path):
    mirror, seen = serve(truncates(HALF), honest), []
    get(tmp_path, mirror, watch=lambda name, done, total: seen.append(done))
    assert state(tmp_path) == WHOLE
    assert mirror.ranges == [None, REST]
    assert seen == sorted(seen)


def test_one_that_ends_early_every_time_is_given_up_and_the_next_fetch_goes_on(serve, tmp_path):
    mirror = serve(truncates(HALF))
    message = failure(tmp_path, mirror)
    assert message.endswith(
        f"small/a.bin could not be fetched from {mirror.url}: ended after 70000 of 200000 bytes; "
        "the next fetch goes on after 70,000 bytes"
    )
    assert mirror.ranges == [None, REST, REST]
    assert state(tmp_path) == BEGUN
    honest_mirror = serve(honest)
    get(tmp_path, honest_mirror)
    assert honest_mirror.ranges == [REST]
    assert state(tmp_path) == WHOLE


def test_the_next_mirror_goes_on_where_the_first_one_ended(serve, tmp_path):
    first, second = serve(truncates(HALF)), serve(honest)
    get(tmp_path, first, second, attempts=1)
    assert first.ranges == [None]
    assert second.ranges == [REST]
    assert state(tmp_path) == WHOLE


def test_a_mirror_without_ranges_starts_over(serve, tmp_path):
    left(tmp_path, CONTENT[:HALF])
    mirror = serve(without_ranges)
    get(tmp_path, mirror)
    assert mirror.ranges == [REST]
    assert state(tmp_path) == WHOLE


def test_a_stalling_mirror_is_left_after_the_timeout_and_the_next_fetch_goes_on(serve, tmp_path):
    mirror = serve(stalls(HALF))
    started = time.monotonic()
    message = failure(tmp_path, mirror, attempts=2, timeout=0.8)
    assert 1.6 <= time.monotonic() - started < 20
    assert f"from {mirror.url}: stalled for 0.8 s after 70000 bytes; the next " in message
    assert mirror.ranges == [None, REST]
    assert state(tmp_path) == BEGUN
    honest_mirror = serve(honest)
    get(tmp_path, honest_mirror)
    assert honest_mirror.ranges == [REST]
    assert state(tmp_path) == WHOLE


def test_wrong_content_is_deleted_and_the_next_mirror_asked_for_all(serve, tmp_path):
    liar, honest_mirror = serve(lies(OTHER)), serve(honest)
    get(tmp_path, liar, honest_mirror)
    assert liar.ranges == [None]
    assert honest_mirror.ranges == [None]
    assert state(tmp_path) == WHOLE


def test_when_all_mirrors_fail_one_line_says_what_happened_at_each(serve, tmp_path):
    mirrors = [
        serve(lies(OTHER)),
        serve(status(404)),
        serve(status(503)),
        serve(lies(b"<html>not found</html>")),
    ]
    message = failure(tmp_path, *mirrors)
    assert message == f"{tmp_path}/small/a.bin could not be fetched from " + "; from ".join(
        f"{mirror.url}: {reason}"
        for mirror, reason in zip(
            mirrors,
            [
                f"a.bin must have md5 {md5(CONTENT)} (got {md5(OTHER)})",
                "404 Not Found",
                "503 Service Unavailable",
                "must have 200000 bytes (got 22)",
            ],
            strict=True,
        )
    )
    # Only what may pass is tried again.
    assert [len(mirror.asked) for mirror in mirrors] == [1, 1, 3, 1]
    assert state(tmp_path) == {}


def test_a_mirror_that_nobody_runs_is_said_to_refuse(tmp_path):
    with Mirror({}, honest) as mirror:
        pass
    assert f"{mirror.url}: ConnectionRefusedError: " in failure(tmp_path, mirror)
    assert state(tmp_path) == {}


def test_pauses_between_attempts_double(serve, tmp_path):
    started = time.monotonic()
    failure(tmp_path, serve(status(500)), attempts=4, pause_seconds=0.05)
    assert 0.05 + 0.1 + 0.2 <= time.monotonic() - started < 20


def test_a_false_beginning_does_not_spoil_an_honest_mirror(serve, tmp_path):
    left(tmp_path, OTHER[:HALF])
    mirror = serve(honest)
    get(tmp_path, mirror)
    assert mirror.ranges == [REST, None]
    assert state(tmp_path) == WHOLE


@pytest.mark.parametrize("false", [OTHER, OTHER + b"more"], ids=["as long", "longer"])
def test_a_false_file_that_was_left_is_replaced(serve, tmp_path, false):
    left(tmp_path, false)
    mirror = serve(honest)
    get(tmp_path, mirror)
    assert mirror.ranges == [None]
    assert state(tmp_path) == WHOLE


def test_a_whole_file_that_was_left_needs_no_request(serve, tmp_path):
    left(tmp_path, CONTENT)
    mirror = serve(honest)
    get(tmp_path, mirror)
    assert mirror.asked == []
    assert state(tmp_path) == WHOLE


def test_a_wrong_content_range_is_not_believed(serve, tmp_path):
    left(tmp_path, CONTENT[:HALF])
    mirror = serve(wrong_range, honest)
    get(tmp_path, mirror)
    assert mirror.ranges == [REST, None]
    assert state(tmp_path) == WHOLE


def test_a_wrong_content_range_is_named(serve, tmp_path):
    left(tmp_path, CONTENT[:HALF])
    message = failure(tmp_path, serve(wrong_range), attempts=1)
    assert message.endswith(
        "must answer bytes=70000- with that range (got 'bytes 0-199999/200000')"
    )
    assert state(tmp_path) == {}


def test_of_an_endless_file_no_more_is_read_than_it_should_have(serve, tmp_path):
    read = []
    message = failure(tmp_path, serve(endless), watch=lambda name, done, total: read.append(done))
    assert message.endswith(f"a.bin must have md5 {md5(CONTENT)} (got {md5(bytes(200_000))})")
    assert max(read) == 200_000
    assert state(tmp_path) == {}


def test_of_an_endless_file_of_unknown_size_no_more_is_read_than_the_limit(serve, tmp_path):
    read = []
    message = failure(
        tmp_path,
        serve(endless),
        dataset=SIZE_UNKNOWN,
        limit_bytes=1_000_000,
        watch=lambda name, done, total: read.append((done, total)),
    )
    assert message.endswith("must have less than 1000000 bytes (got no end)")
    assert max(read) == (1_000_000, None)
    assert state(tmp_path) == {}


def test_a_file_of_unknown_size_that_is_announced_as_too_long_is_not_read(serve, tmp_path):
    message = failure(tmp_path, serve(honest), dataset=SIZE_UNKNOWN, limit_bytes=199_999)
    assert message.endswith("must have at most 199999 bytes (got 200000)")
    assert state(tmp_path) == {}


@pytest.mark.parametrize(
    "answer", [honest, without_length], ids=["length announced", "length not announced"]
)
def test_a_file_of_unknown_size_is_verified_all_the_same(serve, tmp_path, answer):
    get(tmp_path, serve(answer), dataset=SIZE_UNKNOWN)
    assert state(tmp_path) == WHOLE


def test_a_chunked_answer_that_ends_early_goes_on_where_it_ended(serve, tmp_path):
    mirror = serve(chunked_and_cut(HALF), honest)
    get(tmp_path, mirror, dataset=SIZE_UNKNOWN)
    assert mirror.ranges == [None, REST]
    assert state(tmp_path) == WHOLE


def test_a_mirror_that_has_no_more_of_a_file_of_unknown_size_is_believed(serve, tmp_path):
    left(tmp_path, CONTENT)
    mirror = serve(honest)
    get(tmp_path, mirror, dataset=SIZE_UNKNOWN)
    assert mirror.ranges == ["bytes=200000-"]  # and the answer was 416
    assert state(tmp_path) == WHOLE


def test_one_left_longer_than_the_mirrors_is_started_over(serve, tmp_path):
    left(tmp_path, OTHER + b"more")
    mirror = serve(honest)
    get(tmp_path, mirror, dataset=SIZE_UNKNOWN)
    assert mirror.ranges == ["bytes=200004-", None]
    assert state(tmp_path) == WHOLE


def test_a_redirect_to_a_file_of_this_machine_is_refused(serve, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    mirror = serve(redirects(f"file://{secret}"))
    message = failure(tmp_path / "data", mirror)
    assert message.endswith(f"{mirror.url}: must redirect to http or https (got 'file://{secret}')")
    assert len(mirror.asked) == 1
    assert state(tmp_path / "data") == {}


def test_a_redirect_to_another_server_is_followed_and_asks_for_the_rest_there(serve, tmp_path):
    left(tmp_path, CONTENT[:HALF])
    other = serve(honest)
    get(tmp_path, serve(redirects(other.url + "a.bin")))
    assert other.ranges == [REST]
    assert state(tmp_path) == WHOLE


def test_ctrl_c_leaves_the_beginning_and_the_next_fetch_goes_on(serve, tmp_path):
    def interrupt(name, done, total):
        if done == HALF:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, serve(stalls(HALF)), watch=interrupt)
    assert state(tmp_path) == BEGUN
    mirror = serve(honest)
    get(tmp_path, mirror)
    assert mirror.ranges == [REST]
    assert state(tmp_path) == WHOLE


def test_an_error_of_the_watcher_is_not_taken_for_one_of_the_network(serve, tmp_path):
    def fail(name, done, total):
        raise BrokenPipeError("no terminal")

    mirror = serve(honest)
    with pytest.raises(BrokenPipeError, match="no terminal"):
        get(tmp_path, mirror, watch=fail)
    assert len(mirror.asked) == 1


KILLED = """
import sys
from pathlib import Path
from flockstep.data.datasets import DataSet
from flockstep.data.fetching import fetch
from flockstep.data.files import DataFile, Files, Form

folder, url, md5, size = sys.argv[1:]
form = Form(None, ("small",), (DataFile("a.bin", md5, int(size)),))
fetch(DataSet("small", None, (1,), 10, files=Files("small", (form,))), Path(folder), mirrors=[url])
"""


def test_a_killed_fetch_leaves_the_beginning_and_the_next_one_goes_on(serve, tmp_path):
    stalling = serve(stalls(HALF))
    arguments = [str(tmp_path), stalling.url, md5(CONTENT), str(len(CONTENT))]
    with subprocess.Popen([sys.executable, "-c", KILLED, *arguments]) as process:
        deadline = time.monotonic() + 60
        while state(tmp_path) != BEGUN and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert state(tmp_path) == BEGUN
    mirror = serve(honest)
    get(tmp_path, mirror)
    assert mirror.ranges == [REST]
    assert state(tmp_path) == WHOLE


def test_a_second_fetch_at_the_same_time_is_refused(serve, tmp_path):
    mirror, messages = serve(honest), []

    def fetch_too(name, done, total):
        if not messages:
            messages.append(failure(tmp_path, mirror))

    get(tmp_path, mirror, watch=fetch_too)
    assert messages == [
        f"{tmp_path}/small/a.bin.part must be written by one program at a time (another does)"
    ]
    assert len(mirror.asked) == 1
    assert state(tmp_path) == WHOLE


def test_a_file_that_got_its_name_just_before_it_was_locked_is_not_written_to(
    serve, tmp_path, monkeypatch
):
    left(tmp_path, CONTENT[:HALF])
    part, lock = tmp_path / "small/a.bin.part", fcntl.flock

    def too_late(file, operation):
        if part.stat().st_size == HALF:
            part.replace(tmp_path / "small/elsewhere")
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", too_late)
    get(tmp_path, serve(honest))
    assert state(tmp_path) == {**WHOLE, "small/elsewhere": CONTENT[:HALF]}


def test_a_folder_that_cannot_be_made_is_named(serve, tmp_path):
    (tmp_path / "file").touch()
    mirror = serve(honest)
    message = failure(tmp_path / "file", mirror)
    part = tmp_path / "file" / "small" / "a.bin.part"
    assert message == f"{part} must be a file that can be written (got: Not a directory)"
    assert mirror.asked == []


def test_a_full_disk_is_named(serve, tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small/a.bin.part").symlink_to("/dev/full")
    message = failure(tmp_path, serve(honest))
    assert message == (
        f"{tmp_path}/small/a.bin.part must be a file that can be written (got: No space left on "
        "device)"
    )
    assert state(tmp_path) == {}


def test_a_disk_that_is_full_half_way_gets_its_room_back(serve, tmp_path, monkeypatch):
    """Nothing is left: no beginning of a file, and no folder that was not there before."""
    monkeypatch.setattr("flockstep.data.fetching.CHUNK_BYTES", 1_000)
    with files_end_at(HALF):
        message = failure(tmp_path / "new" / "folder", serve(honest))
    assert message.endswith("a.bin.part must be a file that can be written (got: File too large)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", [status(404), lies(OTHER), truncates(0)])
def test_a_fetch_of_which_nothing_came_leaves_no_folders(serve, tmp_path, answer):
    failure(tmp_path / "new" / "folder", serve(answer))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "small").mkdir()  # which was there before
    failure(tmp_path, serve(answer))
    assert [each.name for each in tmp_path.iterdir()] == ["small"]


def test_an_archive_that_does_not_come_leaves_no_folders(serve, tmp_path):
    archived = data_set(archive=Archive("a.tar.gz", md5(b""), 10, folder="inside"))
    failure(tmp_path / "new" / "folder", serve(status(404)), dataset=archived)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_there_are_not_downloaded_again(serve, tmp_path):
    left(tmp_path, CONTENT, "small/a.bin")
    both = data_set(*SMALL.files.forms[0].files, DataFile("b.bin", md5(OTHER), len(OTHER)))
    mirror = serve(honest, **{"b.bin": OTHER})
    for _ in range(2):
        assert get(tmp_path, mirror, dataset=both) == [
            tmp_path / "small/a.bin",
            tmp_path / "small/b.bin",
        ]
    assert mirror.asked == [("/b.bin", None)]
    assert state(tmp_path) == {**WHOLE, "small/b.bin": OTHER}


def test_a_set_that_lies_unpacked_in_another_layout_is_not_downloaded_again(serve, tmp_path):
    packed = gzip.compress(CONTENT)
    dataset = data_set(
        DataFile("a.gz", md5(packed), len(packed), md5(CONTENT)), folders=("small", "Small/raw")
    )
    left(tmp_path, CONTENT, "Small/raw/a")
    mirror = serve(honest)
    assert get(tmp_path, mirror, dataset=dataset) == [tmp_path / "Small/raw/a"]
    assert mirror.asked == []


def test_a_damaged_file_is_replaced_by_a_verified_one_only(serve, tmp_path):
    left(tmp_path, OTHER, "small/a.bin")
    failure(tmp_path, serve(lies(OTHER)))
    assert state(tmp_path) == {"small/a.bin": OTHER}
    get(tmp_path, serve(honest))
    assert state(tmp_path) == WHOLE


def tar(members: dict[str, bytes], *links: tuple[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, target in links:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def archived(content: bytes) -> DataSet:
    """A data set of two files that come in an archive."""
    files = (
        DataFile("a.bin", md5(CONTENT), len(CONTENT)),
        DataFile("b.bin", md5(OTHER), len(OTHER)),
    )
    archive = Archive("all.tar.gz", md5(content), len(content), folder="batches")
    return data_set(*files, archive=archive, folders=("small/batches",))


UNPACKED = {"small/batches/a.bin": CONTENT, "small/batches/b.bin": OTHER}
PACKED = tar({"batches/a.bin": CONTENT, "batches/readme": b"read me", "batches/b.bin": OTHER})


def test_an_archive_is_unpacked_and_removed_also_when_it_comes_in_pieces(serve, tmp_path):
    mirror = serve(truncates(HALF), honest, **{"all.tar.gz": PACKED})
    paths = get(tmp_path, mirror, dataset=archived(PACKED))
    assert paths == [tmp_path / name for name in UNPACKED]
    assert mirror.asked == [("/all.tar.gz", None), ("/all.tar.gz", REST)]
    assert state(tmp_path) == UNPACKED


def test_of_an_archive_only_the_known_files_are_unpacked(serve, tmp_path):
    evil = {
        "../evil": b"evil",
        "/evil": b"evil",
        "batches/../../evil": b"evil",
        "elsewhere/a.bin": OTHER,
    }
    packed = tar(
        {**evil, "batches/a.bin": CONTENT, "batches/b.bin": OTHER},
        ("batches/a.bin", "/etc/passwd"),
        ("batches", "/"),
    )
    get(tmp_path / "data", serve(honest, **{"all.tar.gz": packed}), dataset=archived(packed))
    assert state(tmp_path / "data") == UNPACKED
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_files_of_an_archive_that_are_there_stay_as_they_are(serve, tmp_path):
    left(tmp_path, CONTENT, "small/batches/a.bin")
    before = (tmp_path / "small/batches/a.bin").stat().st_mtime_ns
    get(tmp_path, serve(honest, **{"all.tar.gz": PACKED}), dataset=archived(PACKED))
    assert state(tmp_path) == UNPACKED
    assert (tmp_path / "small/batches/a.bin").stat().st_mtime_ns == before


def test_an_archive_that_was_left_whole_is_unpacked_without_a_request(serve, tmp_path):
    left(tmp_path, PACKED, "small/all.tar.gz.part")
    left(tmp_path, OTHER[:5], "small/batches/b.bin.part")
    mirror = serve(honest)
    get(tmp_path, mirror, dataset=archived(PACKED))
    assert mirror.asked == []
    assert state(tmp_path) == UNPACKED


@pytest.mark.parametrize(
    ("packed", "reason", "kept"),
    [
        (
            tar({"batches/a.bin": OTHER}),
            f"a.bin must have md5 {md5(CONTENT)} (got {md5(OTHER)})",
            {},
        ),
        (
            tar({"batches/b.bin": OTHER}),
            "must have batches/a.bin in it",
            {"small/batches/b.bin": OTHER},
        ),
        (tar({}, ("batches/a.bin", "/etc/passwd")), "must have batches/a.bin in it", {}),
        (OTHER, "must be a tar.gz file (got: not a gzip file)", {}),
        (
            PACKED[:HALF],
            "must be a tar.gz file (got: Compressed file ended before the end-of-stream marker",
            {},
        ),
    ],
    ids=["wrong member", "missing member", "link", "no tar", "half a tar"],
)
def test_an_archive_that_is_not_what_it_should_be_is_deleted(serve, tmp_path, packed, reason, kept):
    assert reason in failure(
        tmp_path, serve(honest, **{"all.tar.gz": packed}), dataset=archived(packed)
    )
    assert state(tmp_path) == kept


def test_a_set_that_needs_no_files_is_not_fetched(tmp_path):
    assert fetch(DATASETS["digits"], tmp_path) == []
    assert state(tmp_path) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mirrors": []}, r"'mirrors' must be one or more addresses \(got \(\)\)"),
        (
            {"mirrors": ["file:///etc/"]},
            r"'mirrors' must start with http:// or https:// \(got 'file:///etc/'\)",
        ),
        ({"timeout": 0}, "'timeout' must be between 0.001 and 3600"),
        ({"attempts": 0}, "'attempts' must be at least 1"),
        ({"pause_seconds": -1}, "'pause_seconds' must be between 0 and 8"),
        ({"limit_bytes": 0}, "'limit_bytes' must be at least 1"),
    ],
)
def test_bad_options_are_named(tmp_path, options, message):
    with pytest.raises(fs.InvalidField, match=message):
        fetch(SMALL, tmp_path, **{"mirrors": ["http://127.0.0.1/"], **options})


def test_the_real_mnist_comes_whole_through_a_mirror(serve, tmp_path):
    found = DATASETS["mnist"].files.find()
    if not found or any(path.suffix != ".gz" for path in found[1]):
        pytest.skip("data set 'mnist' is not there, or not packed: flockstep data fetch mnist")
    mirror = serve(honest, **{path.name: path.read_bytes() for path in found[1]})
    fetched = get(tmp_path, mirror, dataset=DATASETS["mnist"])
    assert [path.relative_to(tmp_path) for path in fetched] == [
        Path("mnist") / path.name for path in found[1]
    ]
    assert sorted(state(tmp_path)) == sorted(f"mnist/{path.name}" for path in found[1])
    train, test = load_idx(DATASETS["mnist"].files, MNIST_PIXELS, [tmp_path])
    assert (len(train), len(test)) == (60_000, 10_000)
