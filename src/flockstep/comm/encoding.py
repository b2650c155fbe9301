"""Tensors that travel through a codec: what `Comm` and `SharedTensor` have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.errors import MismatchError
from flockstep.fields import require

LENGTH_BYTES = 8  # that say how long a message is whose length the receiver cannot know


def require_encodable(tensor: Tensor, codec: object, memory: object = None) -> None:
    """Raise unless the tensor can travel through the codec, if there is one."""
    is_codec = codec is None or isinstance(codec, Codec)
    require(is_codec, "codec", "be a codec such as fs.TopK(0.01), or None", codec)
    if not isinstance(codec, Codec):
        require(memory is None, "memory", "be None without a codec", memory)
        return
    is_floating = tensor.dtype.is_floating_point
    require(is_floating, "tensor", "be of a floating-point dtype for a codec", tensor.dtype)
    if memory is None:
        return
    made_by = "be a memory that the codec's own `memory(tensor)` has made"
    require(isinstance(memory, Memory), "memory", made_by, memory)
    assert isinstance(memory, Memory)
    remembers = memory.error is not None
    expected = codec.feeds_back and not memory.of_differences
    require(remembers == expected, "memory", made_by, f"another's, for {codec}")
    if memory.error is not None:
        elements, remembered = tensor.numel(), memory.error.numel()
        rule = f"be of {elements} elements, as the tensor is"
        require(remembered == elements, "memory", rule, remembered)


def encoded(codec: Codec, tensor: Tensor, memory: Memory | None) -> Tensor:
    """The codec's message for a tensor of any shape and strides."""
    return codec.encode(tensor.detach().reshape(-1), memory)


def decoded(codec: Codec, message: Tensor, like: Tensor) -> Tensor:
    """What a message stands for, in the shape of `like`."""
    return codec.decode(message, like).reshape(like.shape)


def add_decoded(codec: Codec, message: Tensor, value: Tensor, scale: float) -> None:
    """Add `scale` times what a message stands for to a contiguous value, where it lies.

    A codec that sends few elements touches only these."""
    if value.dtype in (torch.float32, torch.float64) and value.device.type == "cpu":
        codec.add_decoded(message.cpu(), value.view(-1), scale)
    else:
        value.add_(decoded(codec, message, value), alpha=scale)


def travelling(tensor: Tensor, codec: Codec | None, memory: Memory | None) -> tuple[Tensor, bool]:
    """What goes from one worker to another for a tensor, and whether the other knows how long it
    is; if not, its length stands in front.
    """
    if codec is None:
        return tensor.detach(), True
    message = encoded(codec, tensor, memory)
    if codec.message_nbytes(tensor) is not None:
        return message, True
    length = torch.tensor([message.numel()], device=message.device)
    return torch.cat([length.view(torch.uint8), message]), False


def arriving(tensor: Tensor, codec: Codec | None) -> tuple[Tensor, bool]:
    """Where such a message goes, and whether its length is known."""
    if codec is None:
        return tensor.detach(), True
    nbytes = codec.message_nbytes(tensor)
    message = torch.empty(nbytes or 0, dtype=torch.uint8, device=tensor.device)
    return message, nbytes is not None


def arrived(message: Tensor, codec: Codec, like: Tensor) -> Tensor:
    """What such a message stands for."""
    if codec.message_nbytes(like) is None:
        require_whole(message)
        message = message[LENGTH_BYTES:].clone()  # codecs rely on where numbers begin in memory
    return decoded(codec, message, like)


def require_whole(message: Tensor) -> None:
    """Raise unless as many bytes follow as the first eight of them say."""
    following = message.numel() - LENGTH_BYTES
    if following < 0 or length_in(message) != following:
        raise MismatchError(f"{message.numel()} bytes are no message behind its length")


def length_in(head: Tensor) -> int:
    """The length that a message stands behind."""
    return int(head[:LENGTH_BYTES].clone().view(torch.int64))


def name_of(codec: Codec) -> str:
    """What workers must agree about: the class and, of a dataclass, its fields."""
    return repr(codec) if dataclasses.is_dataclass(codec) else type(codec).__name__


def encoded_parts(
    codec: Codec, tensor: Tensor, memory: Memory | None, spans: Sequence[slice]
) -> list[Tensor]:
    """A message for each part of a tensor, which lives in several places; with its own part of the
    memory.
    """
    flat = tensor.detach().reshape(-1)
    if len(spans) == 1:
        return [codec.encode(flat, memory)]
    parts = [_part_of(memory, span) for span in spans]
    messages = [codec.encode(flat[span], part) for span, part in zip(spans, parts, strict=True)]
    for span, part in zip(spans, parts, strict=True):
        _put_back(memory, span, part)
    return messages


def decoded_parts(
    codec: Codec, messages: Sequence[Tensor], like: Tensor, spans: Sequence[slice]
) -> Tensor:
    """What these messages stand for together, in the shape of `like`."""
    if len(spans) == 1:
        return decoded(codec, messages[0], like)
    whole = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    for span, message in zip(spans, messages, strict=True):
        whole[span] = codec.decode(message, whole[span])
    return whole.view(like.shape)


def _part_of(memory: Memory | None, span: slice) -> Memory | None:
    """What is remembered of each element, where it lies. Of matrices a part knows nothing: they
    may be cut.
    """
    if memory is None:
        return None
    part = dataclasses.replace(memory, shapes=(), bases=[])
    for name, kept in _of_elements(memory).items():
        setattr(part, name, kept[span])
    return part


def _put_back(memory: Memory | None, span: slice, part: Memory | None) -> None:
    if memory is None or part is None or part is memory:
        return
    memory.messages = part.messages
    for name, kept in _of_elements(memory).items():
        now = getattr(part, name)
        if now.data_ptr() != kept[span].data_ptr():
            kept[span] = now


def _of_elements(memory: Memory) -> dict[str, Tensor]:
    """By name, what the memory has of each element of the tensor."""
    elements = 0 if memory.error is None else memory.error.numel()
    fields = {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory)}
    return {
        name: kept
        for name, kept in fields.items()
        if isinstance(kept, Tensor) and kept.shape == (elements,)
    }
