"""Codecs, tensors and memories to try them with."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as some

import flockstep as fs

SPECS = [
    fs.Float16(),
    fs.Int8(),
    fs.Int8(bucket=3),
    fs.OneBit(),
    fs.Natural(),
    fs.SignSGD(),
    fs.SignSGD("one"),
    fs.SignSGD(error_feedback=True),
    fs.TernGrad(),
    fs.TernGrad(clip=None, bucket=7),
    fs.QSGD(1),
    fs.QSGD(4),
    fs.QSGD(7, bucket=5),
    fs.QSGD(127),
    fs.Threshold(0.5),
    fs.TopK(0.1),
    fs.TopK(1.0),
    fs.TopK(0.02, momentum_correction=0.5, warmup=8),
    fs.QuantisedTopK(0.1),
    fs.QuantisedTopK(0.3, bits=3, bucket=50),
    fs.RandomK(0.3),
    fs.PowerSGD(2),
]
FEEDING_BACK = [codec for codec in SPECS if codec.feeds_back]
DTYPES = [torch.float32, torch.float64]
HALF = [torch.bfloat16, torch.float16]
few = settings(max_examples=40, deadline=None)


def tensors(dtypes=DTYPES):
    return some.builds(
        lambda elements, seed, scale, dtype: (
            torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(dtype)
            * 10.0**scale
        ),
        some.integers(1, 300),
        some.integers(0, 10_000),
        some.integers(-6, 3),
        some.sampled_from(dtypes),
    )


def shapes_of(elements):
    """A matrix that is worth compressing, if there is room for one, and what is left."""
    return (torch.Size([12, 15]),) if elements >= 180 else ()


def memory_of(codec, tensor, seed=0, rank=0):
    return codec.memory(tensor, shapes_of(tensor.numel()), seed=seed, rank=rank)
