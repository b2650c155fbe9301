"""The wire between hosts: what fits goes through whole, what does not is refused, whoever sends
it.
"""

from __future__ import annotations

import ast
import hmac
import json
import math
import resource
import socket
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.cluster_service import LAYOUT, SECONDS, Serving, frame, serving

import flockstep as fs
from flockstep.backends.cluster import service as service_module
from flockstep.backends.cluster import wire
from flockstep.backends.cluster.service import Service
from flockstep.backends.cluster.wire import (
    ADD,
    ADD_ENCODED,
    BLEND,
    CREATE,
    DONE,
    DTYPES,
    HELLO,
    KINDS,
    MESSAGE,
    READ,
    REFUSED,
    TENSOR,
    WELCOME,
    WRITE,
    Connection,
    Header,
    WireError,
    connect,
    raw,
)

SOURCE = Path(fs.__file__).parent
MEGABYTE = 1 << 20


def cases(number: int):
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def served():
    with serving() as made:
        yield made


def peak() -> int:
    """The most memory, in bytes, that this process has ever asked the system for, touched or
    not.
    """
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmPeak:")[1].split()[0]) * 1024


def ask(
    connection: Connection, header: Header, tensor: torch.Tensor | None = None
) -> torch.Tensor | None:
    connection.send(header, b"" if tensor is None else raw(tensor))
    answer = connection.header()
    if answer is None or answer.kind == REFUSED:
        raise WireError("closed" if answer is None else connection.payload(answer).decode())
    return connection.tensor(answer) if answer.kind == TENSOR else None


def of(kind: int, run: bytes, name: str, tensor: torch.Tensor, number: float = 0.0) -> Header:
    length = 0 if kind in wire.READS else tensor.nbytes
    return Header(kind, run, name, tensor.dtype, tuple(tensor.shape), length, number)


def goes_on(served: Serving) -> None:
    """The service is as useful as ever to those who belong to the run."""
    connection = served.join("tensors")
    value = torch.arange(3.0)
    assert ask(connection, of(CREATE, served.run, "good", value), value) is None
    assert torch.equal(ask(connection, of(READ, served.run, "good", value)), value)
    connection.close()
    assert not served.deaths, served.deaths[0]


# --- what goes through ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape_come_back_to_the_bit(served, dtype):
    connection = served.join("tensors")
    large = 20 * MEGABYTE // dtype.itemsize + 3  # more than is taken before any of it has arrived
    for shape in [(), (0,), (1,), (3, 4), (2,) * 8, (0, 1 << 40), (large,)]:
        count = math.prod(shape) * dtype.itemsize
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
        value = data.view(dtype).view(shape)
        name = f"{dtype} {len(shape)} {count}"
        ask(connection, of(CREATE, served.run, name, value), value)
        back = ask(connection, of(READ, served.run, name, value))
        assert (back.dtype, back.shape) == (dtype, value.shape)
        assert raw(back) == raw(value)
    connection.close()


HEADERS = st.builds(
    Header,
    kind=st.sampled_from([MESSAGE, HELLO, WELCOME, REFUSED, DONE]),
    run=st.binary(min_size=16, max_size=16),
    name=st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=16),
    length=st.integers(0, wire.MAX_MESSAGE_BYTES),
    number=st.floats(allow_nan=False),
) | st.builds(
    lambda kind, run, dtype, shape, number: of(
        kind, run, "part", torch.empty(shape, dtype=dtype), number
    ),
    kind=st.sampled_from(wire.WITH_TENSOR),
    run=st.binary(min_size=16, max_size=16),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 3), max_size=8).map(tuple),
    number=st.floats(allow_nan=False),
)


@cases(300)
@given(HEADERS)
def test_headers_come_back_as_they_were(header):
    packed = header.pack()
    assert len(packed) == LAYOUT.size == wire.HEADER_BYTES
    assert Header.unpack(packed) == header


def test_the_format_of_a_header_is_fixed():
    header = Header(WRITE, b"r" * 16, "näme", torch.int16, (2, 3), 12, 0.5)
    name = "näme".encode()
    assert header.pack() == frame(
        WRITE, b"r" * 16, name=name, dtype=6, shape=(2, 3), length=12, number=0.5
    )
    assert LAYOUT.size == 167


@pytest.mark.parametrize("header", [
    Header(WRITE, bytes(16), dtype=torch.complex64, shape=(1,), length=8),
    Header(WRITE, bytes(16), shape=(1,) * 9, length=4),
    Header(WRITE, bytes(16), name="n" * 65, shape=(1,), length=4),
], ids=["dtype", "dimensions", "name"])  # fmt: skip
def test_what_no_header_can_say_is_an_error_of_the_sender(header):
    with pytest.raises(WireError):
        header.pack()


def test_a_message_too_long_for_the_receiver_is_not_sent(served):
    connection = served.join("launcher", 1)
    with pytest.raises(WireError, match="more than 16777216: send tensors instead"):
        connection.say({"do": "result", "tree": "x" * wire.MAX_MESSAGE_BYTES, "tensors": 0})
    connection.say({"do": "result", "tree": "short", "tensors": 0})
    connection.close()


# --- who is let in --------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture, text: str) -> str:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for record in caplog.records:
            if text in record.getMessage():
                assert (record.name, record.levelname) == ("flockstep", "WARNING")
                return record.getMessage()
        time.sleep(0.01)
    raise AssertionError(f"nothing was logged of {text!r}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": b"another run, yes"}, "a frame of another run"),
        ({"payload": b"t" * 32}, "wrong token"),
        ({"payload": b""}, "it did not say hello"),
        ({"payload": b"t" * 33}, "it did not say hello"),
        ({"kind": MESSAGE}, "it did not say hello"),
        ({"name": b"owner"}, "unknown role 'owner' of rank 0.0"),
        ({"number": math.nan}, "unknown role 'tensors' of rank nan"),
        ({"number": 0.5}, "unknown role 'tensors' of rank 0.5"),
        ({"number": -1.0}, "unknown role 'tensors' of rank -1.0"),
        ({"number": 1e300}, "unknown role 'tensors' of rank 1e+300"),
        ({"magic": b"GE"}, "the first two bytes of a frame is wrong (got b'GE')"),
        ({"version": 1}, "the version, 4 here, of a frame is wrong (got 1)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
def test_who_does_not_belong_is_refused_and_logged_with_its_address(served, caplog, change, reason):
    said: dict[str, Any] = {
        "kind": HELLO,
        "run": served.run,
        "payload": served.token,
        "name": b"tensors",
        **change,
    }
    with served.stranger() as stranger:
        stranger.send(frame(**said))
        assert stranger.refusal() == reason
        assert logged(caplog, reason) == f"refused a connection from {stranger.address}: {reason}"
    goes_on(served)


def test_a_rank_that_nobody_awaits_is_refused(served, caplog):
    taken = served.join("worker", 1), served.join("launcher", 1)
    for role, rank, reason in [
        ("worker", 1, "rank 1 is not awaited"),
        ("worker", 3, "rank 3 is not awaited"),
        ("launcher", 1, "the launcher of rank 1 is not awaited"),
        ("launcher", 3, "the launcher of rank 3 is not awaited"),
    ]:
        with served.stranger() as stranger:
            stranger.send(served.hello(role, rank))
            assert stranger.refusal() == reason
    for connection in taken:
        connection.close()


def test_the_right_token_of_another_run_opens_nothing(caplog):
    with serving() as one, serving() as other:
        for run, token, reason in [
            (one.run, other.token, "wrong token"),
            (other.run, one.token, "another run"),
        ]:
            with pytest.raises(WireError, match=f"refused rank 3: .*{reason}"):
                connect(one.service.address, run, token, "tensors", 3, SECONDS)


def test_nobody_is_told_a_secret(served, caplog, capfd):
    """Neither token nor run reach a stranger, a log, an error or what Python prints of an
    object.
    """
    heard = b""
    for said in (
        b"x" * 500,
        frame(HELLO, bytes(16), served.token),
        frame(HELLO, served.run, bytes(32)),
    ):
        with served.stranger() as stranger:
            stranger.send(said)
            stranger.hang_up()
            for kind, run, payload in stranger.answers():
                assert kind == REFUSED
                heard += payload + (run if said[7:23] != served.run else b"")
    with pytest.raises(WireError) as raised:
        connect(
            served.service.address, served.run, bytes(reversed(served.token)), "worker", 0, SECONDS
        )
    connection = served.join("tensors")
    things = [
        served.service,
        served.coordinator,
        served.homes,
        connection,
        connection.socket,
        raised.value,
    ]
    membership = fs.backends.cluster.Membership(
        0, 1, 0, "stop", ("h", 1), ("h", 1), served.run, served.token, "h"
    )
    text = "".join(map(repr, [*things, membership])) + caplog.text + "".join(capfd.readouterr())
    connection.close()
    assert "wrong token" in caplog.text
    for secret in (served.run, served.token):
        assert secret not in heard
        for written in (secret.hex(), repr(secret)[2:-1], secret.decode("latin-1")):
            assert written not in text


def test_run_and_token_are_compared_in_constant_time(served, monkeypatch):
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append({one, other})
        return hmac_compare(one, other)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    with served.stranger() as stranger:
        stranger.send(frame(HELLO, served.run, b"t" * 32, name=b"tensors"))
        assert stranger.refusal() == "wrong token"
    with served.stranger() as stranger:
        stranger.send(frame(HELLO, b"r" * 16, served.token, name=b"tensors"))
        assert stranger.refusal() == "a frame of another run"
    assert compared == [{served.run}, {b"t" * 32, served.token}, {b"r" * 16, served.run}]


@pytest.mark.parametrize(
    "module", [wire, service_module], ids=lambda module: module.__name__.split(".")[-1]
)
def test_secrets_are_compared_in_no_other_way(module):
    tree = ast.parse(Path(module.__file__).read_text())
    for compare in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(compare)}
        assert not names & {"run", "token", "_run", "_token", "heard_run"}, ast.unparse(compare)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_service_never_listens_on_all_addresses(host):
    with pytest.raises(
        fs.InvalidField,
        match=f"'host' must be one address of this host, not all of them .got '{host}'",
    ):
        Service(host, bytes(16), bytes(32), {})


def test_a_service_listens_where_it_was_told_and_nowhere_else(served):
    port = served.service.address[1]
    mine = psutil.Process().net_connections()
    assert [
        kept.laddr.ip for kept in mine if kept.status == "LISTEN" and kept.laddr.port == port
    ] == ["127.0.0.1"]


# --- what comes of nonsense -----------------------------------------------------------------------


def test_random_bytes_are_refused(served):
    before = peak()

    @cases(300)
    @given(st.binary(max_size=600), st.booleans())
    def fuzz(data, begins_well):
        with served.stranger() as stranger:
            stranger.send((b"FS\0\1" if begins_well else b"") + data)
            stranger.hang_up()
            assert [kind for kind, _, _ in stranger.answers()] in ([], [REFUSED])

    fuzz()
    goes_on(served)
    assert peak() < before + 600 * MEGABYTE


NUMBERS = st.sampled_from([0, 1, 2, 7, 8, 9, 31, 255]) | st.integers(0, 255)
SIZES = st.sampled_from(
    [0, 1, 2, 3, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
)
LENGTHS = (
    SIZES | st.sampled_from([4, 32, 33, 1 << 24, (1 << 24) + 1, 1 << 40]) | st.integers(0, 1 << 20)
)
FIELDS = {
    "magic": st.sampled_from([b"FS", b"fs", b"\0\0"]),
    "version": st.sampled_from([0, 1, 2, 3, 4, 65535]),
    "kind": st.sampled_from(KINDS) | NUMBERS,
    "dtype": NUMBERS,
    "dimensions": NUMBERS,
    "name": st.binary(max_size=64)
    | st.sampled_from([b"tensors", b"worker", b"good", b"", b"\xff", b"a\0b"]),
    "shape": st.lists(SIZES, max_size=8).map(tuple),
    "length": LENGTHS,
    "number": st.floats(),
}  # fmt: skip
CHANGES = st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


def is_wrong(data: bytes) -> bool:
    """Whether this is no header at all."""
    try:
        Header.unpack(data[: LAYOUT.size])
    except WireError:
        return True
    return False


def test_hellos_with_wrong_fields_are_refused(served):
    before = peak()
    good = {"kind": HELLO, "name": b"tensors"}

    @cases(400)
    @given(CHANGES, st.sampled_from([None, "run", "token"]), st.integers(0, LAYOUT.size + 32))
    def fuzz(changes, wrong, cut):
        run = b"r" * 16 if wrong == "run" else served.run
        token = b"t" * 32 if wrong == "token" else served.token
        whole = frame(run=run, payload=token, **{**good, **changes})
        with served.stranger() as stranger:
            is_cut = cut < len(whole) // 4
            stranger.send(whole[: 4 * cut] if is_cut else whole)
            if is_cut or not (is_wrong(whole) or wrong):
                stranger.hang_up()  # else it must be refused while it still waits
            if is_cut or is_wrong(whole) or wrong:
                assert [kind for kind, _, _ in stranger.answers()] in ([], [REFUSED])
            else:
                stranger.answers()

    fuzz()
    goes_on(served)
    assert peak() < before + 600 * MEGABYTE


def test_frames_with_wrong_fields_are_refused_by_homes(served):
    """Any frame after a good hello, right or wrong, whole or cut."""
    before = peak()
    value = torch.arange(6.0).view(2, 3)
    good: dict[str, Any] = {"name": b"part", "shape": (2, 3)}

    @cases(500)
    @given(st.sampled_from(KINDS), CHANGES, st.integers(0, 100))
    def fuzz(kind, changes, cut):
        given = {**good, "kind": kind, **changes}
        payload = b"" if given["kind"] in wire.READS else bytes(raw(value))
        whole = frame(run=served.run, payload=payload, **given)
        served.homes.__init__()
        with served.stranger() as stranger:
            create = frame(CREATE, served.run, bytes(raw(value)), **good)
            stranger.send(served.hello("tensors") + create + (whole[:cut] if cut < 50 else whole))
            stranger.hang_up()
            kinds = [kind for kind, _, _ in stranger.answers()]
            assert kinds[:2] == [WELCOME, DONE] or kinds == []  # a reset may swallow what was said
            assert kinds[2:] in ([], [DONE], [TENSOR], [REFUSED])
            if cut >= 50 and is_wrong(whole):
                assert kinds[2:] in ([], [REFUSED])

    fuzz()
    goes_on(served)
    assert peak() < before + 600 * MEGABYTE


WORDS = st.text(max_size=5)
NUMERIC = st.integers() | st.just(10**400) | st.floats()
JUNK = st.recursive(
    st.none() | st.booleans() | NUMERIC | WORDS | st.just("world"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
NO_MESSAGES = [
    b"", b"{", b"nonsense", b"\xff\xfe", b"[]", b"3", b"null", b'"do"', b"[" * 100_000,
    b'{"do":' * 20_000, b'{"do": ' + b"9" * 5000 + b"}", b'{"do": {"do": "steps"}}',
    b'{"do": ["steps"]}', b"{}", b'{"do": "dance"}', b'{"do": "' + b"x" * 100_000 + b'"}',
    json.dumps({"do": "steps", "steps": 3}).encode("utf-16"),
]  # fmt: skip


def spoilt(good: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The message with a field left out, put in or replaced; sometimes as it is."""
    left_out = st.sampled_from(sorted(good)).map(
        lambda name: {key: good[key] for key in good if key != name}
    )
    replaced = st.tuples(st.sampled_from(sorted(good)), JUNK).map(
        lambda pair: {**good, pair[0]: pair[1]}
    )
    return st.just(good) | left_out | replaced | replaced | st.just({**good, "more": 1})


WAIT = {"waits_in": "a test", "passed": {}}
JOIN = {
    "call": "barrier",
    "signature": "s",
    "must": "m",
    "data": None,
    "root": None,
    "moves": True,
    "late": False,
}
JOINED: dict[str, Any] = {"do": "join", "group": "world", "seq": 1, **JOIN, **WAIT}
MOVED: dict[str, Any] = {"do": "moved", "group": "world", "seq": 1}
TO_COORDINATOR: list[dict[str, Any]] = [
    {"do": "began"},
    {"do": "steps", "steps": 3},
    {"do": "tell", "text": "so far, so good"},
    JOINED,
    {**JOINED, "late": True},
    {**JOINED, "group": "world/1.0"},
    MOVED,
    {"do": "report", "group": "world", "seq": 1, "ok": True, **WAIT},
    {"do": "send", "peer": 1, "group": "world", "message": [0, 5], **WAIT},
    {"do": "receive", "peer": 1, "group": "world", **WAIT},
    {"do": "taken", "peer": 1, "group": "world"},
    {"do": "lock", "lock": "l", "group": "world", "in_turn": True, **WAIT},
    {"do": "unlock", "lock": "l", "group": "world"},
    {"do": "retire", "lock": "l", "group": "world"},
    {"do": "watch", **WAIT},
    {"do": "look"},
    {"do": "seen"},
    {"do": "raise"},
    {"do": "end", **WAIT},
]


def test_every_message_of_this_table_is_one_that_the_coordinator_knows():
    assert {
        said["do"] for said in TO_COORDINATOR
    } == fs.backends.cluster.messages.FROM_WORKERS.keys()
    assert {
        said["do"] for said in TO_COLLECTOR
    } == fs.backends.cluster.messages.FROM_LAUNCHERS.keys()


def barrier(control: Any, results: list[Any]) -> None:
    results.append(control.ask("join", "barrier", group="world", seq=1, **JOIN | {"moves": False}))


def test_a_worker_that_talks_nonsense_is_lost_and_the_others_go_on(served):
    before = peak()

    @cases(500)
    @given(
        st.lists(st.sampled_from(TO_COORDINATOR).flatmap(spoilt), max_size=3),
        st.sampled_from([None, *NO_MESSAGES]),
    )
    def fuzz(messages, nonsense):
        served.renew(workers=3)
        controls = [served.control(rank) for rank in (1, 2)]
        with served.stranger() as stranger:
            said = [*messages, *([] if nonsense is None else [nonsense])]
            stranger.send(served.hello("worker", 0) + b"".join(map(served.message, said)))
            if nonsense is None:
                stranger.hang_up()
            kinds = [kind for kind, _, _ in stranger.answers()]
            assert set(kinds) <= {WELCOME, MESSAGE, REFUSED}
        served.coordinator.declare_lost(0)
        results: list[Any] = []
        others = [threading.Thread(target=barrier, args=(control, results)) for control in controls]
        for other in others:
            other.start()
        for other in others:
            other.join(SECONDS)
        assert [result["members"] for result in results] == [[1, 2]] * 2
        for control in controls:
            control.close()

    fuzz()
    goes_on(served)
    assert peak() < before + 600 * MEGABYTE


ERROR = {
    "type": "WorkerError", "text": "rank 0 raised KeyError: 'x'", "notes": ["note"], "rank": 0,
    "exit_code": None, "step": 3, "seconds": 0.5, "frozen_seconds": None,
    "cause": "KeyError", "cause_text": "x",
}  # fmt: skip
TREES = [
    3, {"tensor": 0}, {"array": {"tensor": 0}}, {"scalar": {"tensor": 0}}, {"bytes": "00ff"},
    {"list": [{"tensor": 0}]}, {"tuple": []}, {"set": [1, {"tuple": [2]}]},
    {"dict": [["a", {"tensor": 0}]]}, {"module": ["m", {"dict": []}]},
    {"dataclass": ["d", {"dict": [["a", 1]]}]}, {"error": ERROR}, {"set": [{"list": []}]},
    {"list": 3}, [], {}, {"dict": [[{"tensor": 0}, 1]]}, {"bytes": "0"}, {"bytes": "0x"},
    {"tensor": 1}, {"tensor": -1}, {"error": {}}, {"module": [{"dict": []}]},
    {"module": ["m", {"dict": [3]}]},
]  # fmt: skip
TO_COLLECTOR: list[dict[str, Any]] = [
    {"do": "lost", "exit_code": -9, "step": 4, "frozen_seconds": 2.5},
    {"do": "beat"},
    {"do": "raised", "error": ERROR},
    {"do": "result", "tree": {"list": [1.5, {"tensor": 0}]}, "tensors": 1},
]


def test_a_launcher_that_talks_nonsense_is_refused(served):
    before = peak()
    tensor = bytes(raw(torch.ones(3)))
    results = st.sampled_from([*TREES, {"list": [TREES[1]] * 3}]) | JUNK
    messages = (
        st.sampled_from(TO_COLLECTOR).flatmap(spoilt)
        | results.map(lambda tree: {"do": "result", "tree": tree, "tensors": 1})
        | spoilt(ERROR).map(lambda error: {"do": "raised", "error": error})
    )

    @cases(500)
    @given(st.lists(messages, max_size=3), st.booleans(), st.sampled_from([None, *NO_MESSAGES]))
    def fuzz(messages, with_tensors, nonsense):
        served.renew()
        with served.stranger() as stranger:
            stranger.send(served.hello("launcher", 0))
            for said in messages:
                is_result = said.get("do") == "result" and with_tensors
                stranger.send(
                    served.message(said)
                    + (frame(TENSOR, served.run, tensor, shape=(3,)) if is_result else b"")
                )
            if nonsense is not None:
                stranger.send(served.message(nonsense))
            stranger.hang_up()
            assert {kind for kind, _, _ in stranger.answers()} <= {WELCOME, REFUSED}
        served.collector.results(None)  # what was not refused can be read
        assert served.coordinator.lost.keys() <= {0}
        assert served.coordinator.lost or served.coordinator.failure

    fuzz()
    goes_on(served)
    assert peak() < before + 600 * MEGABYTE


@pytest.mark.parametrize("nonsense", NO_MESSAGES, ids=lambda nonsense: repr(nonsense[:20]))
@pytest.mark.parametrize("role", ["worker", "launcher"])
def test_what_is_no_message_is_refused_and_logged(served, caplog, role, nonsense):
    with served.stranger() as stranger:
        stranger.send(served.hello(role) + served.message(nonsense))
        reason = stranger.refusal()
        assert len(reason) < 300
        assert stranger.address in logged(caplog, reason)


def test_a_worker_that_was_refused_is_lost_soon(served):
    with served.stranger() as stranger:
        stranger.send(served.hello("worker", 2) + served.message({"do": "steps"}))
        assert stranger.refusal() == "the fields of a message to 'steps' are wrong (got [])"
    deadline = time.monotonic() + SECONDS
    while not served.coordinator.lost and time.monotonic() < deadline:
        served.coordinator.tick()
        time.sleep(0.02)
    assert served.coordinator.lost.keys() == {2}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"do": "end", **WAIT}, {"do": "began"}], None),
        ([JOINED, JOINED], "rank 0 goes on without an answer"),
        (
            [{"do": "report", "group": "world", "seq": 7, "ok": True, **WAIT}],
            "rank 0 has no part in call 7 of 'world'",
        ),
        ([{"do": "taken", "peer": 1, "group": "world"}], "rank 0 was handed nothing of rank 1"),
        (
            [{"do": "receive", "peer": 0, "group": "world", **WAIT}],
            "rank 0 has no peer 0 in group 'world'",
        ),
        (
            [{"do": "receive", "peer": 3, "group": "world", **WAIT}],
            "rank 0 has no peer 3 in group 'world'",
        ),
        ([{"do": "unlock", "lock": "l", "group": "mars"}], "rank 0 is in no group 'mars'"),
        ([JOINED, MOVED], "rank 0 did not come late to call 1 of 'world'"),
    ],
)
def test_messages_that_make_no_sense_are_refused(served, messages, reason):
    with served.stranger() as stranger:
        stranger.send(served.hello("worker", 0) + b"".join(map(served.message, messages)))
        *_, (kind, _, payload) = stranger.answers()
        assert kind == REFUSED
        assert (reason or "rank 0 goes on without an answer") in payload.decode()


# --- what homes do not do -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "number"),
    [
        (ADD, torch.ones(3, dtype=torch.int64), 0.5),
        (ADD, torch.ones(3, dtype=torch.int64), math.nan),
        (ADD, torch.ones(3, dtype=torch.int8), 1e30),
        (ADD, torch.ones(3), 1e300),
        (BLEND, torch.ones(3, dtype=torch.int32), 0.5),
        (BLEND, torch.ones(3, dtype=torch.bool), 1.0),
    ],
    ids=str,
)
def test_what_torch_cannot_do_is_refused_and_changes_nothing(served, kind, value, number):
    connection = served.join("tensors")
    ask(connection, of(CREATE, served.run, "part", value), value)
    with pytest.raises(WireError, match=f"shared tensor 'part' of {value.dtype}: "):
        ask(connection, of(kind, served.run, "part", value, number), value)
    connection.close()
    connection = served.join("tensors")
    assert torch.equal(ask(connection, of(READ, served.run, "part", value)), value)
    connection.close()


def encoded(text: str | bytes, message: bytes) -> bytes:
    """What travels for a codec's message."""
    said = text if isinstance(text, bytes) else text.encode()
    return struct.pack("!I", len(said)) + said + message


TOP_K = '{"codec": "TopK", "fields": {"ratio": 0.5}}'
CODEC_NONSENSE = {
    "nothing": (b"", "a message without a codec"),
    "a length alone": (struct.pack("!I", 5), "a codec of 5 bytes in a frame of 4"),
    "a long text": (struct.pack("!I", 5000) + bytes(5000), "a codec of 5000 bytes"),
    "no JSON": (encoded("top_k", b""), "a message that is not JSON"),
    "no object": (encoded("[]", b""), "a message that is not a JSON object"),
    "no name": (encoded('{"codec": 3, "fields": {}}', b""), "a codec without a name"),
    "no fields": (encoded('{"codec": "TopK"}', b""), "a codec without a name or fields"),
    "unknown": (encoded('{"codec": "Zip", "fields": {}}', b""), "no codec 'Zip' is known"),
    "abstract": (encoded('{"codec": "Codec", "fields": {}}', b""), "no codec 'Codec' is known"),
    "other fields": (encoded('{"codec": "TopK", "fields": {"k": 1}}', b""), "codec 'TopK': "),
    "bad fields": (
        encoded('{"codec": "TopK", "fields": {"ratio": 2}}', b""),
        "codec 'TopK': 'ratio' must be",
    ),
    "no value": (encoded('{"codec": "TopK", "fields": {"ratio": {}}}', b""), "codec 'TopK': "),
    "too short": (encoded(TOP_K, b"abc"), "a message of 3 bytes, where TopK(ratio=0.5"),
    "places out of range": (encoded(TOP_K, b"\x7f" * 24), "shared tensor 'part'"),
    "matrices beyond all": (
        encoded('{"codec": "PowerSGD", "fields": {"rank": 1}}', struct.pack("=3q", 1, 5, -1)),
        "shared tensor 'part'",
    ),
    "matrices without end": (
        encoded('{"codec": "PowerSGD", "fields": {"rank": 1}}', b"\x7f" * 40),
        "shared tensor 'part'",
    ),
    "half a place": (
        encoded('{"codec": "Threshold", "fields": {"tau": 1.0}}', b"abc"),
        "shared tensor 'part'",
    ),
}


@pytest.mark.parametrize("payload, reason", CODEC_NONSENSE.values(), ids=CODEC_NONSENSE)
def test_what_no_codec_can_decode_is_refused_and_changes_nothing(served, payload, reason):
    connection, value = served.join("tensors"), torch.arange(6.0)
    ask(connection, of(CREATE, served.run, "part", value), value)
    header = Header(ADD_ENCODED, served.run, "part", value.dtype, (6,), len(payload), 1.0)
    connection.send(header, payload)
    answer = connection.header()
    assert answer.kind == REFUSED
    assert reason in connection.payload(answer).decode()
    connection.close()
    connection = served.join("tensors")
    assert torch.equal(ask(connection, of(READ, served.run, "part", value)), value)
    connection.close()
    goes_on(served)


def test_a_home_sends_each_reader_what_it_does_not_have(served):
    value = torch.zeros(1000)
    readers = [served.join("tensors") for _ in range(2)]
    ask(readers[0], of(CREATE, served.run, "part", value), value)

    def read(reader, handle=1.0):
        reader.send(of(wire.READ_CHANGES, served.run, "part", value, handle))
        answer = reader.header()
        reader.payload(answer)
        return answer.kind, answer.length

    def add(where):
        change = torch.zeros(1000)
        change[where] = 1.0
        ask(readers[1], of(ADD, served.run, "part", change, 1.0), change)

    whole, nothing = (TENSOR, 4000), (wire.CHANGES, 8)
    assert read(readers[0], -1.0) == whole
    assert read(readers[1]) == whole  # whatever it says: nothing was sent to it before
    assert read(readers[0]) == nothing
    add(slice(3))
    assert read(readers[0]) == (wire.CHANGES, 8 + 3 * 8)
    assert read(readers[0]) == nothing
    add(5)
    assert read(readers[1]) == (wire.CHANGES, 8 + 4 * 8)
    assert read(readers[0], 2.0) == whole  # another handle of the same worker
    assert read(readers[0]) == (wire.CHANGES, 8 + 1 * 8)
    assert read(readers[0], -1.0) == whole  # it no longer has what it was sent
    for reader in readers:
        reader.close()


def test_an_encoded_message_that_announces_much_is_refused(served):
    header = Header(ADD_ENCODED, served.run, "part", torch.float32, (6,), 1 << 17, 1.0)
    with served.stranger() as stranger:
        stranger.send(served.hello("tensors") + header.pack())
        assert "the length, at most 65728, of a frame is wrong" in stranger.refusal()


def test_homes_do_whole_numbers_exactly(served):
    connection = served.join("tensors")
    value = torch.tensor([1, 2, (1 << 60) + 1])
    ask(connection, of(CREATE, served.run, "part", value), value)
    ask(connection, of(ADD, served.run, "part", value, -3.0), value)
    assert torch.equal(ask(connection, of(READ, served.run, "part", value)), -2 * value)
    connection.close()


def test_a_part_keeps_its_form_and_its_first_value(served):
    value = torch.ones(4)
    for other, reason in [
        (torch.zeros(4), None),
        (torch.zeros(2, 2), "is torch.float32 of (4,) here (asked for torch.float32 of (2, 2))"),
        (
            torch.zeros(4, dtype=torch.int32),
            "is torch.float32 of (4,) here (asked for torch.int32 of (4,))",
        ),
    ]:
        connection = served.join("tensors")
        ask(connection, of(CREATE, served.run, "part", value), value)
        if reason is None:
            ask(connection, of(CREATE, served.run, "part", other), other)
        else:
            with pytest.raises(WireError) as raised:
                ask(connection, of(CREATE, served.run, "part", other), other)
            assert reason in str(raised.value)
        connection.close()
    connection = served.join("tensors")
    assert torch.equal(ask(connection, of(READ, served.run, "part", value)), value)
    connection.close()


def test_a_worker_may_take_its_time_to_read(served, monkeypatch):
    """Its other homes answer at the same time, and on a slow link that takes a while."""
    monkeypatch.setitem(wire._PROBES, socket.TCP_USER_TIMEOUT, 300)
    connection = served.join("tensors")
    value = torch.rand(8 * MEGABYTE)
    ask(connection, of(CREATE, served.run, "part", value), value)
    connection.send(of(READ, served.run, "part", value))
    time.sleep(1.5)
    assert torch.equal(connection.tensor(connection.header()), value)
    connection.close()


# --- what it costs --------------------------------------------------------------------------------


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("sent", [0, 50 * MEGABYTE], ids=["nothing sent", "50 MB sent"])
def test_a_terabyte_announced_is_not_a_terabyte_taken(served, sent):
    """Memory grows with what has arrived, at most doubled, from 16 MB on."""
    before, real = peak(), resident()
    announced = frame(CREATE, served.run, name=b"part", dtype=1, shape=(1 << 37,), length=1 << 40)
    with served.stranger() as stranger:
        stranger.send(served.hello("tensors") + announced + bytes(sent))
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            assert peak() < before + 1000 * MEGABYTE
            assert resident() < real + 2 * sent + 64 * MEGABYTE
            time.sleep(0.05)
    goes_on(served)


def test_a_result_that_announces_much_gets_little(served):
    before = peak()
    with served.stranger() as stranger:
        said = served.message({"do": "result", "tree": None, "tensors": (1 << 63) - 1})
        announced = frame(TENSOR, served.run, shape=(1 << 38,), length=1 << 40)
        stranger.send(served.hello("launcher") + said + announced)
        stranger.hang_up()
        stranger.answers()
    assert peak() < before + 600 * MEGABYTE


@pytest.mark.parametrize(
    "shape", [(1 << 63,), (1 << 32, 1 << 32), (1 << 16,) * 4, (0, 1 << 63), (0, 1 << 40, 1 << 40)]
)
@pytest.mark.parametrize("length", [0, 4])
def test_shapes_that_overflow_are_refused(served, shape, length):
    """Their product is 0 if it is counted in 64 bits."""
    with served.stranger() as stranger:
        stranger.send(
            served.hello("tensors") + frame(CREATE, served.run, shape=shape, length=length)
        )
        assert "of a frame is wrong" in stranger.refusal()


def test_an_answer_that_announces_much_is_not_believed_either():
    """Nor is a service that is none."""
    before = peak()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            plain, _ = listener.accept()
            with plain:
                plain.recv(1 << 16)
                plain.sendall(frame(CREATE, bytes(16), shape=(1 << 38,), length=1 << 40))
                plain.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WireError, match="refused rank 0: it gave no reason"):
            connect(listener.getsockname(), bytes(16), bytes(32), "worker", 0, SECONDS)
        thread.join()
    assert peak() < before + 600 * MEGABYTE


@pytest.mark.parametrize("sent", [0, 4, LAYOUT.size, LAYOUT.size + 31])
def test_who_says_no_whole_hello_is_refused_in_time(served, monkeypatch, sent):
    monkeypatch.setattr(service_module, "HELLO_SECONDS", 0.2)
    with served.stranger() as stranger:
        began = time.monotonic()
        stranger.send(served.hello("tensors")[:sent])
        assert stranger.refusal() == "it did not say hello within 0.2 s"
        assert time.monotonic() - began < SECONDS


def test_who_talks_slowly_does_not_get_more_time(served, monkeypatch):
    monkeypatch.setattr(service_module, "HELLO_SECONDS", 0.5)
    with served.stranger() as stranger:
        began = time.monotonic()
        for byte in served.hello("tensors"):
            stranger.send(bytes([byte]))
            time.sleep(0.05)
            if time.monotonic() - began > 2:
                break
        assert stranger.answers() in (
            [],
            [(REFUSED, bytes(16), b"it did not say hello within 0.5 s")],
        )


def test_many_strangers_keep_nobody_out_for_long(served, monkeypatch):
    monkeypatch.setattr(service_module, "HELLO_SECONDS", 1.0)
    with ExitStack() as stack:
        for _ in range(3 * service_module.MOST_STRANGERS):
            stack.enter_context(served.stranger())
        began = time.monotonic()
        goes_on(served)
        assert time.monotonic() - began < SECONDS


def test_a_hundred_workers_may_come_at_once(served):
    """More than may be strangers at a time: the rest waits, and is let in."""
    served.renew(workers=100)
    connections: list[Connection] = []
    threads = [
        threading.Thread(target=lambda k=k: connections.append(served.join("worker", k)))
        for k in range(100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(connections) == 100
    for connection in connections:
        connection.close()


def test_a_service_outlives_a_want_of_descriptors(served, caplog):
    with socket.socket() as plain, served.stranger() as other:
        other.send(served.hello("tensors"))
        assert other.socket.recv(LAYOUT.size, socket.MSG_WAITALL)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # not one more than there are
        try:
            plain.connect(served.service.address)
            logged(caplog, "could not take a connection: [Errno 24] Too many open files")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        plain.settimeout(SECONDS)
        plain.sendall(served.hello("tensors"))
        assert plain.recv(LAYOUT.size, socket.MSG_WAITALL)
    goes_on(served)


def test_a_service_closes_at_once_whoever_is_connected():
    with ExitStack() as stack:
        with serving() as served:
            for number in range(2 * service_module.MOST_STRANGERS):
                stranger = stack.enter_context(served.stranger())
                if number < 20:
                    stranger.send(
                        served.hello(["tensors", "worker", "launcher"][number % 3], number // 3 % 3)
                    )
                    stranger.send(frame(CREATE, served.run, shape=(9,), length=36))
            began = time.monotonic()
        assert time.monotonic() - began < SECONDS


# --- what is not in the code ----------------------------------------------------------------------

WIRE_FILES = [
    *sorted((SOURCE / "backends" / "cluster").glob("*.py")),
    SOURCE / "backends" / "torchrun.py",
]


def names_in(path: Path) -> set[str]:
    """Everything that a file imports or mentions, as a dotted name's last part and as the module
    it is from.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {part for alias in node.names for part in alias.name.split(".")}
            found |= set((getattr(node, "module", None) or "").split("."))
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found


def test_nothing_that_unpickles_or_runs_what_arrives_is_near_the_wire():
    unsafe = {
        "pickle",
        "cloudpickle",
        "dill",
        "marshal",
        "shelve",
        "eval",
        "exec",
        "__import__",
        "import_module",
    }
    unsafe |= {"load", "save", "multiprocessing", "rpc"}  # of torch
    unsafe |= {name for name in dir(torch.distributed) if "_object" in name}
    assert {"all_gather_object", "broadcast_object_list"} <= unsafe
    assert len(WIRE_FILES) > 10
    for path in WIRE_FILES:
        assert not names_in(path) & unsafe, path


def test_the_environment_is_read_in_few_places():
    """By the backend of torchrun, where Ray is started and joined, to find data sets, and to choose
    a GPU among those of a host.
    """
    readers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if names_in(path) & {"environ", "getenv"}
    }
    assert readers == {
        "backends/torchrun.py",
        "backends/ray/session.py",
        "data/files.py",
        "device.py",
    }
