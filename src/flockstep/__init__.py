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
from flockstep.counting import cc_ratio
from flockstep.data import (
    Assignment,
    Coarse,
    Disjoint,
    FineGrained,
    FullOverlap,
    HouseholdShards,
    InMemory,
    MediumCoarse,
    NeighbourhoodOverlap,
    Sampling,
)
from flockstep.data.augmentation import PadCropFlip
from flockstep.errors import (
    DataError,
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
from flockstep.recipes import (
    LAMB,
    LARS,
    BatchGrowth,
    Constant,
    Cosine,
    FinalCollapse,
    LinearScaling,
    Polynomial,
    Progress,
    RMSpropWarmup,
    Schedule,
    SmoothedLoss,
    StepDecay,
    TwoStage,
    Warmup,
)
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
from flockstep.task import Task, classification_accuracy, classification_loss, token_loss
from flockstep.theory import growing_distance, pull_within, settled_distance
from flockstep.training import run
from flockstep.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "ADPSGD",
    "DPSGD",
    "EAMSGD",
    "EASGD",
    "LAMB",
    "LARS",
    "PSOPS",
    "QSGD",
    "AdaComm",
    "Assignment",
    "AsyncSGD",
    "Backend",
    "BatchGrowth",
    "BestOnly",
    "Coarse",
    "Codec",
    "Codistillation",
    "Comm",
    "Compute",
    "Constant",
    "Cosine",
    "DataError",
    "DeadlockError",
    "DiLoCo",
    "Disjoint",
    "Downpour",
    "EAWild",
    "FinalCollapse",
    "FineGrained",
    "Float16",
    "FlockstepError",
    "FullOverlap",
    "GoSGD",
    "Hogwild",
    "HouseholdShards",
    "Households",
    "InMemory",
    "Independent",
    "Int8",
    "InvalidField",
    "LinearScaling",
    "Link",
    "LocalProcesses",
    "LocalSGD",
    "MediumCoarse",
    "Memory",
    "MismatchError",
    "NeighbourhoodOverlap",
    "Network",
    "NoSync",
    "NonFiniteLoss",
    "OneBit",
    "PadCropFlip",
    "Polynomial",
    "PostLocalSGD",
    "PowerSGD",
    "Progress",
    "RMSpropWarmup",
    "RandomK",
    "Ray",
    "Result",
    "ResultError",
    "Sampling",
    "Schedule",
    "SharedTensor",
    "Simulator",
    "SlowMo",
    "SmoothedLoss",
    "StaleSync",
    "StepDecay",
    "Strategy",
    "SyncSGD",
    "Task",
    "Threshold",
    "TopK",
    "Torchrun",
    "TwoStage",
    "UnknownName",
    "Warmup",
    "Worker",
    "WorkerError",
    "WorkerLost",
    "cc_ratio",
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
    "token_loss",
]
