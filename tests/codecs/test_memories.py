"""What codecs remember can be saved, and a stream goes on from it to the bit."""

from __future__ import annotations

import pytest
import torch
from tests.codecs.cases import DTYPES, SPECS, memory_of

import flockstep as fs
from flockstep.strategies import load_state, save_state


def messages_of(codec, memory, tensors):
    return [codec.encode(tensor, memory) for tensor in tensors]


@pytest.mark.parametrize("codec", SPECS, ids=repr)
def test_a_stream_goes_on_from_a_saved_memory(codec):
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(300, generator=draw) for _ in range(6)]
    memory = memory_of(codec, tensors[0])
    messages_of(codec, memory, tensors[:3])
    saved = save_state(memory, "a memory")
    expected = messages_of(codec, memory, tensors[3:])

    other = memory_of(codec, tensors[0], seed=5, rank=2)
    load_state(other, *saved)
    assert all(map(torch.equal, messages_of(codec, other, tensors[3:]), expected))


@pytest.mark.parametrize("codec", SPECS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_zeros_and_one_number(codec, dtype):
    """Tensors without elements, of zeros and of one element go through; zeros come back, but for
    signs that are all that a message has.
    """
    for tensor in (torch.empty(0), torch.zeros(37), torch.full((1,), 0.75)):
        tensor = tensor.to(dtype)
        memory = memory_of(codec, tensor)
        message = codec.encode(tensor, memory)
        decoded = codec.decode(message, tensor)
        assert decoded.shape == tensor.shape
        assert message.nbytes in (codec.message_nbytes(tensor, memory_of(codec, tensor)), 4, 0)
        if not tensor.any() and codec != fs.SignSGD("one"):
            assert not decoded.any()
