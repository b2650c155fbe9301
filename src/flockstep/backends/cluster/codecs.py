"""A codec's message on its way to the home of a shard: behind the codec, as its name and fields.

Nothing is unpickled: the home makes the codec anew, from the classes that its own program has, and
their checks of fields apply."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from flockstep.backends.cluster import values
from flockstep.backends.cluster.wire import Connection, Header, WireError, message_of, raw
from flockstep.codecs import Codec
from flockstep.errors import FlockstepError

_LENGTH = struct.Struct("!I")  # of the text that says the codec
MAX_TEXT_BYTES = 1 << 12


def with_codec(codec: Codec, message: Tensor) -> bytes:
    """What travels for a message: which codec it is of, and the message."""
    text = json.dumps(_described(codec)).encode()
    if len(text) > MAX_TEXT_BYTES:
        raise WireError(f"a codec with more than {MAX_TEXT_BYTES} bytes of fields: {codec}")
    return b"".join((_LENGTH.pack(len(text)), text, raw(message.cpu())))


def take_codec(connection: Connection, header: Header) -> tuple[Codec, int]:
    """The codec of the message that arrives behind it, and how many bytes that has."""
    head = bytearray(_LENGTH.size)
    if header.length < len(head):
        raise WireError("a message without a codec")
    connection.fill(memoryview(head))
    (length,) = _LENGTH.unpack(head)
    following = header.length - len(head) - length
    if length > MAX_TEXT_BYTES or following < 0:
        raise WireError(f"a codec of {length} bytes in a frame of {header.length}")
    text = bytearray(length)
    connection.fill(memoryview(text))
    return _made(message_of(bytes(text))), following


def _described(codec: Codec) -> dict[str, Any]:
    fields = {
        field.name: values.encode(getattr(codec, field.name), [])
        for field in dataclasses.fields(codec)  # type: ignore[arg-type]  # all codecs are
    }
    return {"codec": type(codec).__name__, "fields": fields}


def _made(said: dict[str, Any]) -> Codec:
    name, fields = said.get("codec"), said.get("fields")
    if not isinstance(name, str) or not isinstance(fields, dict):
        raise WireError("a codec without a name or fields")
    found = [each for each in _subclasses(Codec) if each.__name__ == name]
    if not found:
        raise WireError(f"no codec {name!r} is known where the shared tensor lives")
    try:
        made: Codec = found[-1](**{key: values.decode(each, []) for key, each in fields.items()})
    except (FlockstepError, TypeError, ValueError) as error:
        raise WireError(f"codec {name!r}: {error}") from None
    return made


def _subclasses(kind: Any) -> Iterator[Any]:
    """All codecs of this program, the user's own among them."""
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
