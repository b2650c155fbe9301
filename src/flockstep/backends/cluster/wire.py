"""What travels between hosts: frames of one fixed header and a payload whose size the header names.

Nothing here is ever unpickled. A header is checked whole before a byte of memory is taken for what
follows it: version, kind, dtype and number of dimensions from short lists, the length against shape
and dtype, and against a limit where there is no shape. Memory for a large tensor is taken as it
arrives, so that announcing much is not enough to get it."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flockstep.errors import FlockstepError

VERSION = 4
MAGIC = b"FS"
MAX_DIMENSIONS = 8
MAX_MESSAGE_BYTES = 1 << 24
MAX_ENCODED_FACTOR = 8  # a codec's message is at most so many times as long as its tensor, and
MAX_ENCODED_REST = 1 << 16  # so many bytes more
FIRST_BYTES = 1 << 24  # that are taken for a tensor before any of it has arrived
IDLE_SECONDS = 0.2  # a wait is cut into such slices where it may be given up
NAME_BYTES = 64
RUN_BYTES = 16
TOKEN_BYTES = 32

(
    HELLO,
    WELCOME,
    REFUSED,
    MESSAGE,
    TENSOR,
    CREATE,
    READ,
    WRITE,
    ADD,
    BLEND,
    DONE,
    ADD_ENCODED,
    READ_CHANGES,
    CHANGES,
) = KINDS = tuple(range(1, 15))
READS = (READ, READ_CHANGES)  # they describe the tensor that is wanted
WITH_TENSOR = (TENSOR, CREATE, *READS, WRITE, ADD, BLEND)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)

# magic, version, kind, dtype, dimensions, run, name, shape, length of the payload, a number (scale,
# weight, rank)
_LAYOUT = struct.Struct(f"!2sHBBB{RUN_BYTES}s{NAME_BYTES}s{MAX_DIMENSIONS}QQd")
HEADER_BYTES = _LAYOUT.size

# A host that vanishes is noticed when it does not answer the kernel's probes: four of them, one per
# second.
_PROBES = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 5000,
}


class WireError(FlockstepError):
    """What arrived is not a frame of this version and run."""


@dataclass(frozen=True)
class Header:
    """The first bytes of every frame. `length` counts the payload that follows, `number` is the
    operation's own.
    """

    kind: int
    run: bytes
    name: str = ""
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    length: int = 0
    number: float = 0.0

    def pack(self) -> bytes:
        require_sendable(self.dtype, self.shape)
        shape = self.shape + (0,) * (MAX_DIMENSIONS - len(self.shape))
        dtype, dimensions = DTYPES.index(self.dtype), len(self.shape)
        name = self.name.encode()
        _require(len(name) <= NAME_BYTES, f"the name, at most {NAME_BYTES} bytes,", name)
        head = (MAGIC, VERSION, self.kind, dtype, dimensions, self.run, name)
        return _LAYOUT.pack(*head, *shape, self.length, self.number)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        magic, version, kind, dtype, dimensions, run, name, *shape, length, number = _LAYOUT.unpack(
            data
        )
        _require(magic == MAGIC, "the first two bytes", magic)
        _require(version == VERSION, f"the version, {VERSION} here,", version)
        _require(kind in KINDS, "the kind", kind)
        _require(dtype < len(DTYPES), "the dtype", dtype)
        _require(dimensions <= MAX_DIMENSIONS, "the number of dimensions", dimensions)
        _require(not any(shape[dimensions:]), "the shape", shape)
        # Torch counts elements and bytes in 63 bits, also those of a tensor that has none because
        # one size is 0.
        _require(math.prod(max(size, 1) for size in shape) < 1 << 59, "the shape", shape)
        try:
            text = name.rstrip(b"\0").decode()
        except UnicodeDecodeError:
            raise WireError(f"the name of a frame is wrong (got {name!r})") from None
        header = cls(kind, run, text, DTYPES[dtype], tuple(shape[:dimensions]), length, number)
        if kind in WITH_TENSOR:
            expected = 0 if kind in READS else header.nbytes
            _require(
                length == expected, f"the length, for {header.shape} of {header.dtype},", length
            )
        else:
            longest = MAX_MESSAGE_BYTES
            if kind == ADD_ENCODED:
                longest = MAX_ENCODED_FACTOR * header.nbytes + MAX_ENCODED_REST
            elif kind == CHANGES:
                longest = header.nbytes
            _require(length <= longest, f"the length, at most {longest},", length)
        return header

    @property
    def nbytes(self) -> int:
        """Of the tensor that the header describes."""
        return math.prod(self.shape) * self.dtype.itemsize


def _require(holds: bool, what: str, value: object) -> None:
    if not holds:
        raise WireError(f"{what} of a frame is wrong (got {value!r})")


def require_sendable(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise a `WireError` for a tensor that no header can describe."""
    if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS:
        raise WireError(
            f"a tensor of {dtype} with {len(shape)} dimensions cannot be sent to another host"
        )


def short_name(name: str) -> str:
    """The name itself, or one of fixed length made from it where it would not fit into a header."""
    encoded = name.encode()
    return (
        name
        if len(encoded) <= NAME_BYTES and b"\0" not in encoded
        else hashlib.sha256(encoded).hexdigest()
    )


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, where they lie."""
    return (
        tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        if tensor.numel()
        else memoryview(b"")
    )


def watched(connection: socket.socket) -> socket.socket:
    """The connection, set so that a peer whose host is gone is an error within seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _PROBES.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


class Connection:
    """Frames over a socket, those of one run alone."""

    def __init__(self, connection: socket.socket, run: bytes) -> None:
        self.socket = watched(connection)
        self.run = run
        self.heard_run = bytes(RUN_BYTES)  # what the peer took for the run, right or wrong
        self.deadline: float | None = None  # of all that is received, on the monotonic clock
        self.arrived = 0  # pieces of frames: a sign of life of the peer
        # Held while a frame is sent, by whichever thread; hold it for frames that belong together.
        self.sending = threading.RLock()
        self._idle: Callable[[], None] | None = None

    def be_patient(self, idle: Callable[[], None] | None = None) -> None:
        """Wait for a peer that does not read for a while, which the system would count as gone
        with its host. `idle` is called now and then while anything waits here, and may raise.
        """
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        if idle is not None:
            self._idle = idle
            self.socket.settimeout(IDLE_SECONDS)

    def send(self, header: Header, payload: memoryview | bytes = b"") -> None:
        """One frame, in one system call if the system takes it."""
        left = [memoryview(header.pack()), memoryview(payload)]
        with self.sending:
            while left:
                sent = self._in_slices(lambda: self.socket.sendmsg(left))
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left:
                    left[0] = left[0][sent:]

    def header(self) -> Header | None:
        """The next frame's header; None when the peer has closed between two frames."""
        data = bytearray(HEADER_BYTES)
        first = self._receive(memoryview(data))
        if first == 0:
            return None
        self.fill(memoryview(data)[first:])
        header = Header.unpack(bytes(data))
        self.heard_run = header.run
        if not hmac.compare_digest(header.run, self.run):
            raise WireError("a frame of another run")
        return header

    def fill(self, memory: memoryview) -> None:
        """Read just as many bytes as `memory` has."""
        while len(memory):
            count = self._receive(memory)
            if count == 0:
                raise ConnectionError("the peer closed the connection in the middle of a frame")
            memory = memory[count:]

    def _receive(self, memory: memoryview) -> int:
        if self.deadline is not None:
            self.socket.settimeout(max(1e-3, self.deadline - time.monotonic()))
        count = self._in_slices(lambda: self.socket.recv_into(memory))
        self.arrived += 1
        return count

    def _in_slices(self, move: Callable[[], int]) -> int:
        """What `move` moves, which may take many slices of time."""
        while True:
            try:
                return move()
            except TimeoutError as error:
                is_of_the_peer = error.errno is not None  # it does not answer the kernel's probes
                if self._idle is None or is_of_the_peer:
                    raise
                self._idle()

    def payload(self, header: Header) -> bytes:
        """The payload of a frame without a tensor."""
        data = bytearray(header.length)
        self.fill(memoryview(data))
        return bytes(data)

    def tensor(self, header: Header) -> Tensor:
        """The payload of a frame with a tensor, in memory of its own."""
        data = torch.empty(min(header.length, FIRST_BYTES), dtype=torch.uint8)
        self.fill(raw(data))
        while (arrived := len(data)) < header.length:
            larger = torch.empty(min(2 * arrived, header.length), dtype=torch.uint8)
            larger[:arrived] = data
            data = larger
            self.fill(raw(data[arrived:]))
        return data.view(header.dtype).view(header.shape)

    def say(self, message: dict[str, Any]) -> None:
        """A message of plain values."""
        payload = json.dumps(message).encode()
        if len(payload) > MAX_MESSAGE_BYTES:
            raise WireError(
                f"a message of {len(payload)} bytes, more than {MAX_MESSAGE_BYTES}: "
                "send tensors instead"
            )
        self.send(Header(MESSAGE, self.run, length=len(payload)), payload)

    def hear(self) -> dict[str, Any] | None:
        """The next message; None when the peer has closed."""
        header = self.header()
        if header is None:
            return None
        if header.kind != MESSAGE:
            raise WireError(f"a frame of kind {header.kind} where a message was due")
        return message_of(self.payload(header))

    def close(self) -> None:
        """Also wakes whoever waits in it."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        self.socket.close()


def message_of(payload: bytes) -> dict[str, Any]:
    """A message from its bytes."""
    try:
        message = json.loads(payload.decode())
    except (ValueError, RecursionError):
        raise WireError("a message that is not JSON") from None
    if not isinstance(message, dict):
        raise WireError("a message that is not a JSON object")
    return message


def connect(
    address: tuple[str, int],
    run: bytes,
    token: bytes,
    role: str,
    rank: int,
    seconds: float,
    idle: Callable[[], None] | None = None,
) -> Connection:
    """Join the service at `address` in a role: "worker", "launcher" or "tensors". With `idle` the
    connection is patient from the beginning: `seconds` are for its host alone.
    """
    plain = socket.create_connection(address, timeout=seconds)
    connection = Connection(plain, run)
    try:
        if idle is not None:
            connection.be_patient(idle)
        connection.send(Header(HELLO, run, role, length=len(token), number=rank), token)
        answer = connection.header()
        if answer is None or answer.kind != WELCOME:
            why = "it gave no reason"
            if answer is not None and answer.kind == REFUSED:
                why = connection.payload(answer).decode(errors="replace")
            raise WireError(f"the service at {address[0]}:{address[1]} refused rank {rank}: {why}")
    except BaseException:
        connection.close()
        raise
    if idle is None:
        plain.settimeout(None)
    return connection
