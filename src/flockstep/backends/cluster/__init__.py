"""What torchrun and Ray have in common: workers on several hosts, and a coordinator that knows
what they wait for.
"""

from flockstep.backends.cluster.coordinator import Coordinator
from flockstep.backends.cluster.service import Service
from flockstep.backends.cluster.shared import CoordinatedTensor
from flockstep.backends.cluster.work import Membership, work

__all__ = ["CoordinatedTensor", "Coordinator", "Membership", "Service", "work"]
