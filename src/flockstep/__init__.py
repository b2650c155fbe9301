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
from flockstep.result import Result, load_result
from flockstep.strategies import EASGD, EAWild, Independent, LocalSGD, Strategy, SyncSGD
from flockstep.task import Task, classification_accuracy, classification_loss
from flockstep.training import run
from flockstep.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "EASGD",
    "Assignment",
    "Backend",
    "Comm",
    "Compute",
    "DeadlockError",
    "Disjoint",
    "EAWild",
    "FlockstepError",
    "FullOverlap",
    "Independent",
    "InvalidField",
    "Link",
    "LocalProcesses",
    "LocalSGD",
    "MismatchError",
    "Network",
    "NonFiniteLoss",
    "Ray",
    "Result",
    "ResultError",
    "SharedTensor",
    "Simulator",
    "Strategy",
    "SyncSGD",
    "Task",
    "Torchrun",
    "UnknownName",
    "Worker",
    "WorkerError",
    "WorkerLost",
    "classification_accuracy",
    "classification_loss",
    "launch",
    "load_result",
    "run",
]
