"""The methods, one file each. The table holds them by their names on the command line."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from flockstep.comm import handle
from flockstep.errors import UnknownName
from flockstep.fields import known_spelling
from flockstep.strategies._state import load_state, read_state, save_state, shared_tensors
from flockstep.strategies.ad_psgd import ADPSGD
from flockstep.strategies.adacomm import AdaComm
from flockstep.strategies.all_to_all_sgd import AllToAllSGD
from flockstep.strategies.async_sgd import AsyncSGD
from flockstep.strategies.base import Strategy
from flockstep.strategies.best_only import BestOnly
from flockstep.strategies.codistillation import Codistillation
from flockstep.strategies.d_psgd import DPSGD
from flockstep.strategies.diloco import DiLoCo
from flockstep.strategies.downpour import Downpour
from flockstep.strategies.ea_wild import EAWild
from flockstep.strategies.eamsgd import EAMSGD
from flockstep.strategies.easgd import EASGD
from flockstep.strategies.gosgd import GoSGD
from flockstep.strategies.hogwild import Hogwild
from flockstep.strategies.households import Households, effective_batch, local_batch
from flockstep.strategies.independent import Independent
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.strategies.nosync import NoSync
from flockstep.strategies.post_local_sgd import PostLocalSGD
from flockstep.strategies.pso_ps import PSOPS
from flockstep.strategies.sgp import SGP
from flockstep.strategies.slowmo import SlowMo
from flockstep.strategies.stale_sync import StaleSync
from flockstep.strategies.sync_sgd import SyncSGD
from flockstep.strategies.theory import (
    LockFreeBound,
    growing_distance,
    lock_free_bound,
    printed_distance,
    pull_within,
    settled_distance,
    small_pull_distance,
)

ENTRY_POINTS = "flockstep.strategies"

STRATEGIES: dict[str, type[Strategy[Any]]] = {
    strategy.name: strategy
    for strategy in (
        SyncSGD,
        Independent,
        BestOnly,
        LocalSGD,
        PostLocalSGD,
        AdaComm,
        Households,
        DiLoCo,
        SlowMo,
        NoSync,
        PSOPS,
        EASGD,
        EAMSGD,
        EAWild,
        Hogwild,
        AsyncSGD,
        Downpour,
        StaleSync,
        AllToAllSGD,
        GoSGD,
        ADPSGD,
        DPSGD,
        SGP,
        Codistillation,
    )
}

__all__ = [
    "ADPSGD",
    "DPSGD",
    "EAMSGD",
    "EASGD",
    "PSOPS",
    "SGP",
    "STRATEGIES",
    "AdaComm",
    "AllToAllSGD",
    "AsyncSGD",
    "BestOnly",
    "Codistillation",
    "DiLoCo",
    "Downpour",
    "EAWild",
    "GoSGD",
    "Hogwild",
    "Households",
    "Independent",
    "LocalSGD",
    "LockFreeBound",
    "NoSync",
    "PostLocalSGD",
    "SlowMo",
    "StaleSync",
    "Strategy",
    "SyncSGD",
    "effective_batch",
    "find_strategy",
    "growing_distance",
    "handle",
    "load_state",
    "local_batch",
    "lock_free_bound",
    "printed_distance",
    "pull_within",
    "read_state",
    "save_state",
    "settled_distance",
    "shared_tensors",
    "small_pull_distance",
]


def find_strategy(name: str) -> type[Strategy[Any]]:
    """The class behind a name such as `local_sgd`, or its own name; also of packages that offer
    theirs as entry points.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    offered = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    name = known_spelling("strategy", name, [*STRATEGIES, *offered])
    if name in STRATEGIES:
        return STRATEGIES[name]
    try:
        found: type[Strategy[Any]] = offered[name].load()
    except (ImportError, AttributeError) as error:
        raise UnknownName(f"cannot load strategy {name!r}: {error}") from error
    return found
