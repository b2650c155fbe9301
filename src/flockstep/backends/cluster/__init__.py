"""What torchrun and Ray have in common: workers on several hosts, and a coordinator that knows
what they wait for.
"""

from flockstep.backends.cluster.comm import ClusterComm, MakeShared
from flockstep.backends.cluster.coordinator import Coordinator
from flockstep.backends.cluster.groups import abandoned
from flockstep.backends.cluster.rendezvous import GATHER_SECONDS, Rendezvous, be_worker
from flockstep.backends.cluster.service import Service
from flockstep.backends.cluster.shared import CoordinatedTensor
from flockstep.backends.cluster.wire import RUN_BYTES, TOKEN_BYTES
from flockstep.backends.cluster.work import Membership, work

__all__ = [
    "GATHER_SECONDS",
    "RUN_BYTES",
    "TOKEN_BYTES",
    "ClusterComm",
    "CoordinatedTensor",
    "Coordinator",
    "MakeShared",
    "Membership",
    "Rendezvous",
    "Service",
    "abandoned",
    "be_worker",
    "work",
]
