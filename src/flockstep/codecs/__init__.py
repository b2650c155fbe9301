"""How tensors are written on the wire, one file each. The table holds them by their names on the
command line.
"""

from __future__ import annotations

from flockstep.codecs.base import Codec, Memory
from flockstep.codecs.float16 import Float16
from flockstep.codecs.int8 import Int8
from flockstep.codecs.natural import Natural
from flockstep.codecs.one_bit import OneBit
from flockstep.codecs.power_sgd import PowerSGD
from flockstep.codecs.qsgd import QSGD
from flockstep.codecs.quantised_top_k import QuantisedTopK
from flockstep.codecs.random_k import RandomK
from flockstep.codecs.sign_sgd import SignSGD
from flockstep.codecs.tern_grad import TernGrad
from flockstep.codecs.threshold import Threshold
from flockstep.codecs.top_k import TopK
from flockstep.fields import known_spelling

CODECS: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (
        *(Float16, Int8, Natural, QSGD, TernGrad, OneBit, SignSGD),
        *(Threshold, TopK, QuantisedTopK, RandomK, PowerSGD),
    )
}

__all__ = [
    "CODECS",
    "QSGD",
    "Codec",
    "Float16",
    "Int8",
    "Memory",
    "Natural",
    "OneBit",
    "PowerSGD",
    "QuantisedTopK",
    "RandomK",
    "SignSGD",
    "TernGrad",
    "Threshold",
    "TopK",
    "find_codec",
]


def find_codec(name: str) -> type[Codec]:
    """The class behind a name such as `top_k`, or its own name."""
    return CODECS[known_spelling("codec", name, CODECS)]
