"""Workers as processes of this machine, over shared memory."""

from flockstep.backends.local.backend import LocalProcesses

__all__ = ["LocalProcesses"]
