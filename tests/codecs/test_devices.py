"""Codecs work where the tensor lies.

The device of these tests is labelled `meta`, but has numbers: each of its tensors stands for one
of the CPU's, on which its operations are done. Its rules are those of a GPU: an operation takes
tensors of one device, single numbers may be looked at, and NumPy cannot see it. What copies a
tensor of it to the CPU fails the test.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.codecs.cases import FEEDING_BACK, SPECS, shapes_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import flockstep as fs

DEVICE = torch.device("meta")
aten = torch.ops.aten
# What makes or moves tensors, and says where to.
MOVES = {aten._to_copy.default, aten.copy_.default, aten._local_scalar_dense.default}


class Elsewhere(torch.Tensor):
    """A tensor of the device."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inside.shape,
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=DEVICE,
        )
        made.inside = inside
        return made

    def __repr__(self):
        return f"Elsewhere({self.inside})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise AssertionError(f"{operation} outside of the device")


class Device(TorchDispatchMode):
    """While it is active there is such a device."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        is_here = any(isinstance(each, Elsewhere) for each in given)
        if is_here and operation not in MOVES:
            # Of the CPU an operation takes numbers alone, as with any device.
            strangers = [each for each in given if not isinstance(each, Elsewhere)]
            assert all(each.dim() == 0 for each in strangers), f"{operation} with a CPU tensor"
        if operation is aten.copy_.default:
            assert is_here == isinstance(args[0], Elsewhere), "copied to the CPU"
        if is_here and device is not None:
            assert torch.device(device) == DEVICE, f"{operation} to {device}"
        makes_here = is_here if device is None else torch.device(device) == DEVICE
        if "device" in kwargs and device is not None:
            kwargs["device"] = torch.device("cpu")

        plain = tree_map(_inside, (args, kwargs))
        result = operation(*plain[0], **plain[1])
        return tree_map(_wrapped, result) if makes_here else result


def _wrapped(value):
    return Elsewhere(value) if isinstance(value, torch.Tensor) else value


def _inside(value):
    return value.inside if isinstance(value, Elsewhere) else value


@pytest.fixture
def device() -> Iterator[torch.device]:
    with Device():
        yield DEVICE


class Alone:
    """Carries messages of one worker and of another, whose messages are the same."""

    size = 2

    def all_reduce(self, tensor, op="sum"):
        return tensor if op == "mean" else tensor.mul_(2)

    def all_gather(self, tensor):
        return [tensor, tensor.clone()]


def test_the_device_tells_who_leaves_it(device):
    tensor = torch.ones(5).to(device)
    assert tensor.device == device
    assert float(tensor.sum()) == 5
    assert (tensor + 1).device == device
    leaving = [
        tensor.cpu,
        lambda: tensor.to("cpu"),
        lambda: torch.zeros(5).copy_(tensor),
        lambda: tensor + torch.ones(5),
    ]
    for leave in leaving:
        with pytest.raises(AssertionError):
            leave()
    for leave in (tensor.numpy, tensor.tolist):
        with pytest.raises((TypeError, RuntimeError)):
            leave()


def tensor_for(codec, elements=1000):
    """Less is sent than there is, and the sum of any of them is exact."""
    draw = torch.Generator().manual_seed(3)
    return torch.randint(-40, 40, (elements,), generator=draw) / 16


@pytest.mark.parametrize("codec", SPECS, ids=repr)
def test_messages_are_made_and_read_where_the_tensor_lies(codec):
    """Three messages, and what they stand for, are those of the CPU."""
    tensor = tensor_for(codec)
    shapes = shapes_of(tensor.numel())
    memory, expected = codec.memory(tensor, shapes), []
    for _ in range(3):
        message = codec.encode(tensor, memory)
        expected.append((message, codec.decode(message, tensor)))

    with Device():
        there = tensor.to(DEVICE)
        memory = codec.memory(there, shapes)
        made = []
        for _ in range(3):
            message = codec.encode(there, memory)
            decoded = codec.decode(message, there, memory)
            made.append((message, decoded))
            assert message.device == decoded.device == DEVICE
            assert message.dtype is torch.uint8
        codec.average(Alone(), there.clone(), memory)
        errors = [each for each in (memory.error, memory.velocity) if each is not None]
        assert all(each.device == DEVICE for each in errors)
    assert len(errors) > 0 or codec not in FEEDING_BACK
    for (message, decoded), (message_there, decoded_there) in zip(expected, made, strict=True):
        assert message_there.inside.shape == message.shape
        assert torch.allclose(decoded_there.inside, decoded, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", [fs.Int8(), fs.QSGD(4), fs.TernGrad(), fs.Natural()], ids=repr)
def test_large_tensors_are_taken_whole_elsewhere_with_the_same_draws(codec):
    tensor = tensor_for(codec, elements=100_000)
    message = codec.encode(tensor, codec.memory(tensor))
    with Device():
        there = codec.encode(tensor.to(DEVICE), codec.memory(tensor))
    assert torch.equal(there.inside, message)


@pytest.mark.parametrize("codec", SPECS, ids=repr)
def test_the_mean_is_made_where_the_tensor_lies(codec):
    tensor = tensor_for(codec)
    memory = codec.memory(tensor, shapes_of(tensor.numel()))
    expected = tensor.clone()
    codec.average(Alone(), expected, memory)
    with Device():
        there = tensor.to(DEVICE)
        codec.average(Alone(), there, codec.memory(there, shapes_of(tensor.numel())))
    assert torch.allclose(there.inside, expected, rtol=1e-5, atol=1e-6)
