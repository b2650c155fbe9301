"""Flockstep: train one PyTorch model on many workers that do not march in lockstep.

    import flockstep as fs

    result = fs.run("digits-mlp", fs.LocalSGD(period=8), workers=8)

Everything public is importable from here.
"""

from flockstep.backends.base import Backend
from flockstep.backends.local import LocalProcesses
from flockstep.backends.ray import Ray
from flockstep.backends.sim import Compute, Simulator
from flockstep.backends.torchrun import Torchrun
from flockstep.codecs import QSGD, Codec, Float16, Int8, Memory, OneBit, PowerSGD, RandomK, Threshold, TopK
from flockstep.comm import Comm, SharedTensor
from flockstep.data import Assignment, Disjoint, FullOverlap
from flockstep.errors import (
    DeadlockError,
    FlockstepError,
    InvalidField,
    MismatchError,
    NonFiniteLoss,
    ResultError,
    UnknownName,
    WorkerError,
    WorkerLost,
)
from flockstep.launch import launch
from flockstep.network import Link, Network
from flockstep.recalibration import recalibrate
from flockstep.result import Result, load_result
from flockstep.strategies import (
    ADPSGD,
    DPSGD,
    EAMSGD,
    EASGD,
    PSOPS,
    AdaComm,
    AsyncSGD,
    BestOnly,
    Codistillation,
    DiLoCo,
    Downpour,
    EAWild,
    GoSGD,
    Hogwild,
    Households,
    Independent,
    LocalSGD,
    NoSync,
    PostLocalSGD,
    SlowMo,
    StaleSync,
    Strategy,
    SyncSGD,
    effective_batch,
    local_batch,
)
from flockstep.task import Task, classification_accuracy, classification_loss
from flockstep.theory import growing_distance, pull_within, settled_distance
from flockstep.training import run
from flockstep.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "ADPSGD",
    "DPSGD",
    "EAMSGD",
    "EASGD",
    "PSOPS",
    "QSGD",
    "AdaComm",
    "Assignment",
    "AsyncSGD",
    "Backend",
    "BestOnly",
    "Codec",
    "Codistillation",
    "Comm",
    "Compute",
    "DeadlockError",
    "DiLoCo",
    "Disjoint",
    "Downpour",
    "EAWild",
    "Float16",
    "FlockstepError",
    "FullOverlap",
    "GoSGD",
    "Hogwild",
    "Households",
    "Independent",
    "Int8",
    "InvalidField",
    "Link",
    "LocalProcesses",
    "LocalSGD",
    "Memory",
    "MismatchError",
    "Network",
    "NoSync",
    "NonFiniteLoss",
    "OneBit",
    "PostLocalSGD",
    "PowerSGD",
    "RandomK",
    "Ray",
    "Result",
    "ResultError",
    "SharedTensor",
    "Simulator",
    "SlowMo",
    "StaleSync",
    "Strategy",
    "SyncSGD",
    "Task",
    "Threshold",
    "TopK",
    "Torchrun",
    "UnknownName",
    "Worker",
    "WorkerError",
    "WorkerLost",
    "classification_accuracy",
    "classification_loss",
    "effective_batch",
    "growing_distance",
    "launch",
    "load_result",
    "local_batch",
    "pull_within",
    "recalibrate",
    "run",
    "settled_distance",
]
