"""The methods, one file each. The table holds them by their names on the command line."""

from __future__ import annotations

import dataclasses
from typing import Any

from flockstep.errors import unknown_name
from flockstep.strategies.base import Strategy
from flockstep.strategies.ea_wild import EAWild
from flockstep.strategies.easgd import EASGD
from flockstep.strategies.independent import Independent
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.strategies.sync_sgd import SyncSGD

STRATEGIES: dict[str, type[Strategy[Any]]] = {
    strategy.name: strategy for strategy in (SyncSGD, Independent, LocalSGD, EASGD, EAWild)
}

__all__ = [
    "EASGD",
    "STRATEGIES",
    "EAWild",
    "Independent",
    "LocalSGD",
    "Strategy",
    "SyncSGD",
    "described",
    "find_strategy",
]


def find_strategy(name: str) -> type[Strategy[Any]]:
    """The class behind a name such as `local_sgd`."""
    if name not in STRATEGIES:
        raise unknown_name("strategy", name, STRATEGIES)
    return STRATEGIES[name]


def described(strategy: Strategy[Any]) -> str:
    """`LocalSGD(period=8)`: the strategy with the fields that differ from their defaults."""
    given = []
    for field in dataclasses.fields(strategy):  # type: ignore[arg-type]
        value = getattr(strategy, field.name)
        if value != field.default:
            given.append(f"{field.name}={value!r}")
    return f"{type(strategy).__name__}({', '.join(given)})"
